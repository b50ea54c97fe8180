"""Seconds and peak memory of verifying layers, in full and by projections, of results that pass and that fail.

    python -m benchmarks.verdict_costs [--only WORD ..] [--skip-full]

Each figure is the processor time of a process of its own with one thread (set OPENBLAS_NUM_THREADS=1), which other work
on the machine hardly changes. Compiled code is loaded before. `reference` computes the float64 reference alone, and
`read` sums all tensors once. The memory is what was used at most beyond the tensors. In a failing result the first dst
channel has the values of the second.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy import make_inputs, stored
from kernels import ConvProblem, Plan, compute, plan, run_unit, storage_dtype, warmup
from verify.fast import plan_fast_verification
from verify.unit import plan_verification, read_report

Array = np.ndarray[Any, Any]


def _layer(op: str, n: int, channels: tuple[int, int], size: int, kernel: int, dtype: str = "f32") -> ConvProblem:
    src, dst = channels
    return ConvProblem(
        op=op, dtype=dtype, n=n, src_channels=src, dst_channels=dst, groups=1, src_spatial=(size, size),  # type: ignore[arg-type]
        dst_spatial=(size, size), kernel=(kernel, kernel), strides=(1, 1), dilations=(1, 1),
        pads_begin=(kernel // 2,) * 2, data_format="NCX", weights_format="OIX",
    )  # fmt: skip


LAYERS = {
    "gradient, 3x3, 128 to 128, 28x28, 16 images, bf16":
        _layer("ConvolutionBackwardWeights", 16, (128, 128), 28, 3, "bf16"),
    "gradient, 3x3, 64 to 64, 56x56, 16 images": _layer("ConvolutionBackwardWeights", 16, (64, 64), 56, 3),
    "forward, 3x3, 64 to 64, 56x56, 16 images": _layer("Convolution", 16, (64, 64), 56, 3),
    "gradient, 1x1, 256 to 1024, 14x14, 256 images": _layer("ConvolutionBackwardWeights", 256, (256, 1024), 14, 1),
    "gradient, 3x3, 64 to 64, 224x224, 80 images": _layer("ConvolutionBackwardWeights", 80, (64, 64), 224, 3),
}  # fmt: skip


def _memory(name: str) -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return int(fields[name].split()[0]) >> 10


def _measured(work: Callable[[], object], send: Any) -> None:
    """Send seconds, MiB beyond what there was, and what the work returned."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the peak
    before, began = _memory("VmRSS"), time.process_time()
    found = work()
    send.send((time.process_time() - began, _memory("VmHWM") - before, found))


def _apart(work: Callable[[], object]) -> tuple[float, int, Any]:
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measured, args=(work, send))
    process.start()
    send.close()
    found: tuple[float, int, Any] = receive.recv()
    process.join()
    return found


def _run(chosen: Plan, tensors: Sequence[Array]) -> Array:
    output = np.empty(chosen.problem.output_shape, getattr(chosen.problem, "output_dtype", np.uint8))
    if isinstance(chosen.problem, ConvProblem):
        output = np.empty(chosen.problem.output_shape, storage_dtype(chosen.problem.dtype))
    scratch = np.empty(chosen.scratch_bytes, np.uint8) if chosen.scratch_bytes else None
    for unit in chosen.units:
        run_unit(chosen, unit, tensors, output, scratch)
    return output


def _verified(chosen: Plan, tensors: Sequence[Array]) -> bool:
    return bool(read_report(_run(chosen, tensors).tobytes())["passed"])


def measure(problem: ConvProblem, *, full: bool) -> list[str]:
    """Return the cells of a layer's row."""
    inputs = [stored(each) for each in make_inputs(problem)]
    right = compute(problem, *inputs)
    wrong = right.copy()
    first: tuple[Any, ...] = (slice(None),) * problem.forward
    wrong[(*first, 0)] = wrong[(*first, 1)]
    tensors = [[*inputs, each] for each in (right, wrong)]
    cells = [f"{sum(each.nbytes for each in tensors[0]) / 1e9:.2f}", f"{problem.macs / 1e9:.1f}"]
    cells.append(f"{_apart(lambda: sum(float(each.sum()) for each in tensors[0]))[0]:.2f}")
    base = 0.0
    if full:
        base, memory, _ = _apart(lambda: _run(plan(problem, reference=True), inputs).size)
        cells.append(f"{base:.2f}, {memory} MiB")
    makers: list[Callable[[ConvProblem], Plan]] = [*([plan_verification] * full), plan_fast_verification]
    for make in makers:
        for passes, each in zip((True, False), tensors, strict=True):
            seconds, memory, found = _apart(lambda make=make, each=each: _verified(make(problem), each))  # type: ignore[misc]
            assert found is passes, "a wrong verdict"
            cells.append(f"{seconds:.2f}, {memory} MiB")
    return cells


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="Measure the cost of verdicts.")
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--skip-full", action="store_true", help="projections only")
    options = parser.parse_args()
    full = not options.skip_full
    whole = ["reference", "full, passes", "full, fails"] if full else []
    names = ["layer", "GB", "GMAC", "read", *whole, "fast, passes", "fast, fails"]
    list(warmup())
    print("| " + " | ".join(names) + " |\n|---" + "|---:" * (len(names) - 1) + "|", flush=True)
    for name, problem in LAYERS.items():
        if any(word in name for word in options.only):
            print(f"| {name} | " + " | ".join(measure(problem, full=full)) + " |", flush=True)


if __name__ == "__main__":
    main()
