"""How long one call takes on 1 to 1,000 workers, simulated from the constants in `benchmarks/data/scaling.json`.

`python -m benchmarks.scaling` prints a table and draws `docs/images/scaling.png`; `--measure` first measures the
constants that this machine can tell (compute rate, join rate, stragglers) and stores them. `benchmarks/cluster.py`
measures those of a cluster, and `scripts/test-cluster` compares the simulation with two nodes.

The model: a call is cut into shards by its problem alone. Workers take the shards in order as they become free: the
service's own first, and workers on nodes of their own. For each shard on such a node the service submits a task, copies
its inputs to shared memory and sends what the shard needs, one after the other, through one network interface. The time
of a shard is drawn from the measured spread. Results return through the same interface, and partial ones are added in
order. Each node has one processor: what it copies, sends and receives, it does not compute meanwhile. Nodes fail at
random; a failed one costs the time to notice it and runs its shard again.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.cluster.units import portions
from kernels import Plan, storage_dtype

__all__ = ["CALLS", "Call", "Constants", "call_of", "main", "simulate"]

DATA = Path(__file__).parent / "data" / "scaling.json"
IMAGE = Path(__file__).resolve().parents[1] / "docs" / "images" / "scaling.png"
WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
_RUNS = 20


@dataclass(frozen=True)
class Constants:
    """What the simulation depends on; times in seconds, rates per second."""

    macs_per_s: float
    """Multiply-adds of one worker."""
    spread: float
    """Standard deviation of the logarithm of a shard's time."""
    join_bytes_per_s: float
    """Partial results added."""
    put_bytes_per_s: float
    """Copying inputs to the shared memory of the service's node."""
    network_bytes_per_s: float
    """From one node to another."""
    task_s: float
    """Submitting a task and getting its result."""
    notice_s: float
    """Until the loss of a node is noticed and its shards run elsewhere."""
    failures_per_s: float
    """Losses of one node."""

    @staticmethod
    def load(path: Path = DATA) -> Constants:
        """Read them; raises `OSError` or `KeyError`."""
        document = json.loads(path.read_text("utf-8"))
        return Constants(**{name: float(entry["value"]) for name, entry in document["constants"].items()})


@dataclass(frozen=True)
class Call:
    """One call: its multiply-adds, the bytes of its inputs and of its result, and its shards.

    Each node needs `whole_bytes` of the inputs once; of the other `shared_bytes` each shard needs its own part. With
    `partial` a shard is a part of the batch, and returns a partial sum as large as the result. Otherwise it is a block
    of channels, and returns its own part of the result.
    """

    name: str
    macs: float
    whole_bytes: float
    shared_bytes: float
    result_bytes: float
    shards: int
    partial: bool


CALLS = (
    Call("1.8 GMAC, 27 MB in", 1_849_688_064, 0, 26_624_000, 147_456, 32, partial=True),
    Call("118 GMAC, 426 MB in", 118_380_036_096, 0, 425_984_000, 147_456, 128, partial=True),
    Call("3.4 TMAC, 647 MB in", 3_367_254_360_064, 378_535_936, 268_435_456, 205_520_896, 64, partial=False),
)
"""The calls of the plot: small, middle and large, as a processor with AVX2 cuts them for many workers."""


def call_of(name: str, plan: Plan) -> Call:
    """Describe the call of a plan."""
    problem = plan.problem
    units = [unit for unit in plan.units if unit.stage == 0]
    read = zip(*(portions(plan, unit) for unit in units), strict=True)
    sizes = [math.prod(shape) * storage_dtype(problem.dtype).itemsize for shape in problem.input_shapes]
    whole = sum(size for size, each in zip(sizes, read, strict=True) if {portion.high for portion in each} == {None})
    partial = units[0].offset is None
    result = (
        plan.scratch_bytes / len(units) if partial else math.prod(problem.output_shape) * problem.output_dtype.itemsize
    )
    return Call(name, plan.macs, whole, sum(sizes) - whole, result, len(units), partial)


def simulate(call: Call, workers: int, constants: Constants, rng: np.random.Generator, *, here: int = 1) -> float:
    """Return the seconds that `call` takes on `workers` workers.

    The first `here` of them are the service's own, to which nothing is sent; each of the others is a node of its own.
    """
    nodes = min(workers, call.shards)
    own = call.shared_bytes / call.shards
    back = call.result_bytes if call.partial else call.result_bytes / call.shards
    times = call.macs / call.shards / constants.macs_per_s
    spread = constants.spread * rng.standard_normal(call.shards) - constants.spread**2 / 2
    compute = times * np.exp(spread)
    put = sent = 0.0
    owed = [0.0] * here
    seen: set[int] = set()
    done: list[tuple[float, int]] = []
    order = [(0.0, node) for node in range(nodes)]
    for shard in range(call.shards):
        begin, node = heapq.heappop(order)
        if node < here:
            end = begin + compute[shard] + owed[node]
            owed[node] = 0.0
        else:
            copy = constants.task_s + (own + (0 if seen else call.whole_bytes)) / constants.put_bytes_per_s
            needed = (own + (0 if node in seen else call.whole_bytes)) / constants.network_bytes_per_s
            put += copy
            # One after the other through the sender's interface, ahead of the workers.
            sent = max(sent, put) + needed
            # What comes while the worker computes takes its processor, and so does what it sends.
            end = (
                max(begin + (needed if node in seen else 0.0), sent)
                + compute[shard]
                + back / constants.network_bytes_per_s
            )
            seen.add(node)
            owed = [each + (copy + needed + back / constants.network_bytes_per_s) / here for each in owed]
            if rng.random() < -math.expm1(-constants.failures_per_s * compute[shard]):
                end += constants.notice_s + compute[shard]
        heapq.heappush(order, (end, node))
        done.append((end, node))
    last = 0.0
    for finished, node in sorted(done):
        # Results come in one after the other.
        last = max(last + (back / constants.network_bytes_per_s if node >= here else 0.0), finished)
    join = call.result_bytes * call.shards / constants.join_bytes_per_s if call.partial else 0.0
    return last + join


def local_time(call: Call, workers: int, constants: Constants) -> float:
    """Return the seconds that `call` takes on the workers of one machine, which share its memory."""
    rounds = math.ceil(call.shards / workers) / call.shards
    return call.macs * rounds / constants.macs_per_s


def table(constants: Constants, seed: int = 0) -> dict[str, list[float]]:
    """Return the median time of each call on each number of workers, over 20 simulated calls."""
    rng = np.random.default_rng(seed)
    return {
        call.name: [statistics.median(simulate(call, n, constants, rng) for _ in range(_RUNS)) for n in WORKERS]
        for call in CALLS
    }


def measure(document: dict[str, Any]) -> None:
    """Measure compute rate, spread and join rate on one processor of this machine, and put them into `document`."""
    from kernels import ConvProblem, compute

    rng = np.random.default_rng(0)
    problem = ConvProblem(
        op="ConvolutionBackwardWeights", dtype="f32", n=8, src_channels=128, dst_channels=128, groups=1,
        src_spatial=(58, 58), dst_spatial=(56, 56), kernel=(3, 3), strides=(1, 1), dilations=(1, 1), pads_begin=(0, 0),
        data_format="NCX", weights_format="OIX", groups_axis="O", bias=False,
    )  # fmt: skip
    src = rng.standard_normal((8, 128, 58, 58), dtype=np.float32)
    diff_dst = rng.standard_normal((8, 128, 56, 56), dtype=np.float32)
    compute(problem, src, diff_dst)
    seconds = _times(lambda: compute(problem, src, diff_dst))
    macs = 8 * 128 * 128 * 56 * 56 * 9
    total, part = (rng.standard_normal(9_400_000 // 4, dtype=np.float32) for _ in range(2))
    joins = _times(lambda: np.add(total, part, out=total))
    found = {
        "macs_per_s": macs / statistics.median(seconds),
        "spread": statistics.stdev(math.log(each) for each in seconds),
        "join_bytes_per_s": total.nbytes / statistics.median(joins),
    }
    for name, value in found.items():
        document["constants"][name]["value"] = float(f"{value:.3g}")


def _times(run: Any, count: int = 41) -> Sequence[float]:
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return found


def plot(rows: Mapping[str, Sequence[float]], constants: Constants, path: Path) -> None:
    """Draw the speed-up over one local worker as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(WORKERS, WORKERS, color="#b8bfc6", linestyle="--", label="as many times as workers")
    axes.plot([], [], color="#444444", linestyle=":", label="if a call used all of them")
    for (name, times), call, colour in zip(rows.items(), CALLS, ("#d9822b", "#0b6e99", "#5a8f29"), strict=True):
        one = local_time(call, 1, constants)
        axes.plot(WORKERS, [one / each for each in times], ":", color=colour)
        best = [one / each for each in itertools.accumulate(times, min)]  # a call uses no more than are worth it
        axes.plot(WORKERS, best, "o-", color=colour, markersize=4, label=name)
    axes.axhline(1, color="#444444", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(color="#e6e9ec")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("workers: the service's own, and from the second on each on a machine of its own")
    axes.set_ylabel("speed-up over the service's worker alone")
    axes.set_title("One call on a cluster, simulated", loc="left", fontsize=10)
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and draw the plot."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--measure", action="store_true", help="measure this machine's constants first, and store them")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the plot; needs the extra [plot]")
    options = parser.parse_args(arguments)
    if options.measure:
        document = json.loads(DATA.read_text("utf-8"))
        measure(document)
        DATA.write_text(json.dumps(document, indent=2) + "\n", "utf-8")
    constants = Constants.load()
    rows = table(constants)
    print("workers".ljust(22) + "".join(f"{n:>9}" for n in WORKERS))
    for call, (name, times) in zip(CALLS, rows.items(), strict=True):
        print(f"{name:22}" + "".join(f"{each:8.2f}s" for each in times))
        print(f"{'  on one machine':22}" + "".join(f"{local_time(call, n, constants):8.2f}s" for n in WORKERS[:6]))
    if options.plot is not None:
        plot(rows, constants, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
