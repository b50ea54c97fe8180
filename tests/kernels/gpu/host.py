"""Time what the host does in a call on a GPU, without one: everything up to the driver, whose part is left out.

    python -m tests.kernels.gpu.host

prints microseconds of processor time, the best of several runs on one thread: of the kernels' part of a call, with
launches that are prepared and as Triton launches them, and of the whole call by `convgrad.local(device="cuda")`.
Tensors are on the CPU, small enough that their copies take little.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton

import convgrad
from kernels.gpu import compute
from kernels.gpu.launches import Launch
from kernels.problem import ConvProblem
from tests.kernels.gpu.driver import Driver

_REPEATS, _RUNS = 200, 15

OPS = {
    "Convolution": ("src", "weights"), "ConvTranspose": ("src", "weights"),
    "ConvolutionBackwardWeights": ("src", "diff_dst"),
}  # fmt: skip


def microseconds(run: Callable[[], object]) -> float:
    """Return the processor time of a run, the best of several."""
    run()
    run()
    found = []
    for _ in range(_RUNS):
        begun = time.thread_time()
        for _ in range(_REPEATS):
            run()
        found.append((time.thread_time() - begun) / _REPEATS * 1e6)
    return min(found)


def searched(launch: Launch, *tensors: torch.Tensor) -> None:
    """Launch as Triton does, which looks for the compiled code in each launch."""
    launch.find(launch.kernel[launch.grid], tensors)


def main() -> None:
    """Print all times."""
    os.environ["TRITON_INTERPRET"] = "1"  # tensors are on the CPU; the kernels are loaded, and not the interpreter's
    torch.set_num_threads(1)
    driver = Driver(90)
    driver.keeps = False
    triton.runtime.driver.set_active(driver)
    client = convgrad.local(device="cuda").open()
    attributes = {"strides": [1, 1], "pads_begin": [0, 0], "pads_end": [0, 0], "dilations": [1, 1],
                  "data_format": "NXC", "weights_format": "OIX"}  # fmt: skip
    prepared = Launch.__call__
    for dtype in ("bf16", "f32"):
        for op, names in OPS.items():
            problem = ConvProblem(
                op=op, dtype=dtype, n=32, src_channels=64, dst_channels=64, groups=1, src_spatial=(2, 2),  # type: ignore[arg-type]
                dst_spatial=(2, 2), kernel=(1, 1), strides=(1, 1), dilations=(1, 1), pads_begin=(0, 0),
                data_format="NXC", weights_format="OIX",
            )  # fmt: skip
            inputs = [torch.zeros(shape, dtype=compute.TORCH_DTYPES[dtype]) for shape in problem.input_shapes]
            times = []
            for way in (prepared, searched):
                Launch.__call__ = way  # type: ignore[assignment, method-assign]
                times.append(microseconds(partial(compute.compute, problem, *inputs)))
            Launch.__call__ = prepared  # type: ignore[method-assign]
            given: dict[str, Any] = dict(zip(names, inputs, strict=True))
            if op.endswith("Weights"):
                given["weights_shape"] = [64, 64, 1, 1]
            whole = microseconds(partial(client.run, op, given, attributes))
            print(f"{op} {dtype}: kernels {times[0]:.0f}, searched {times[1]:.0f}; whole call {whole:.0f}", flush=True)


if __name__ == "__main__":
    main()
