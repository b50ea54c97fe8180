"""Quality of the choice between paths: the time of the chosen one over that of the best one, layer by layer.

    python -m benchmarks.regret [--shapes FILE] [--dtype D] [--ops NAME,...] [--only TEXT] [--budget SECONDS]
    python -m benchmarks.regret --algorithms [--dtype D] [--ops NAME,...] [--only TEXT] [--budget SECONDS]

With --algorithms the choices are direct sums and Winograd, for the layers of benchmarks/shapes_3x3.json, and the chosen
one is that of the algorithm `auto`. Otherwise:

Every other choice is forced in turn, in this process: weight gradients with the narrow or the wide channels or groups
as lanes, and on products of bf16 if available; ConvTranspose by gathering, with groups as lanes, or scattering.
A choice that can't compute a layer is left out. Times are the least processor time of several runs of the whole layer
in one thread; the choices alternate, so that a machine that slows down affects all of them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.layers import LAYOUTS, OPERATIONS, read_layers
from benchmarks.machine import describe_machine
from kernels import ConvProblem, plan, run_unit, storage_dtype, warmup
from kernels.cache import CACHE
from kernels.forward.tiles import way_costs
from kernels.gradient.geometry import geometry
from kernels.gradient.roles import role_costs
from kernels.problem import Algorithm
from kernels.target import target

ROLES = ("narrow", "wide", "groups")
WAYS = ("gather", "lanes", "scatter")
ALGORITHMS: tuple[Algorithm, ...] = ("direct", "winograd")


@contextmanager
def forced(problem: ConvProblem, choice: str) -> Iterator[None]:
    """Force one choice for the plans made in the block, whatever the cost models say."""
    with ExitStack() as stack:

        def patch(name: str, value: Any) -> None:
            stack.enter_context(mock.patch(name, value))

        CACHE.clear()
        refuse = "kernels.gradient.dots.unit.BwdDots.refuse"
        if choice in ROLES:
            patch("kernels.gradient.tiles.schedule.role_costs", lambda *_: {choice: 0.0})
            if target().dots:
                patch(refuse, lambda *_: "not wanted")
        elif choice in WAYS:
            patch("kernels.forward.tiles.way_costs", lambda *_, **__: {choice: 0.0})
            if target().dots == "amx":
                patch("kernels.forward.amx.ForwardAmx.refuse", lambda *_: "not wanted")
        elif choice == "dots" and problem.forward:
            if target().dots == "amx":
                patch("kernels.forward.amx.MOST_CYCLES", np.inf)
        elif choice == "dots":
            patch("kernels.gradient.dots.unit.LEAST_USE", 0.0)
        yield
    CACHE.clear()


def chosen(problem: ConvProblem) -> str:
    """Return the choice that the cost models make."""
    if problem.algorithm == "auto":
        return "winograd" if "winograd" in plan(problem).kernel else "direct"
    if "tiles" not in plan(problem).kernel:
        return "dots"
    costs = model_costs(problem)
    return min(costs, key=lambda choice: costs[choice])


def model_costs(problem: ConvProblem) -> dict[str, float]:
    """Return the cost models' estimate for each path on register tiles."""
    return dict(way_costs(problem.dims).items()) if problem.forward else role_costs(problem, geometry(problem))


def runner(problem: ConvProblem, choice: str, inputs: list[Any]) -> Callable[[], float] | None:
    """Return a function that computes a layer with one choice and returns the seconds, or None if it can't."""
    if choice == "groups" and problem.groups == 1:
        return None
    if choice in ALGORITHMS:
        problem = replace(problem, algorithm=choice)
    with forced(problem, choice):
        try:
            work = plan(problem)
        except (AssertionError, MemoryError, ValueError):
            return None
    if choice == "dots" and "tiles" in work.kernel:
        return None
    output = np.empty(problem.output_shape, storage_dtype(problem.dtype))
    scratch = np.empty(work.scratch_bytes, np.uint8)

    def run() -> float:
        with forced(problem, choice):
            for unit in work.units:  # also lays out the units' tables
                run_unit(work, unit, inputs, output, scratch)
            started = time.thread_time()
            for unit in work.units:
                run_unit(work, unit, inputs, output, scratch)
            return time.thread_time() - started

    return run


def measure(problem: ConvProblem, budget: float) -> dict[str, float]:
    """Return the seconds of each choice for a layer, timed alternately."""
    rng = np.random.default_rng(3)
    inputs = [_stored(rng.standard_normal(shape), problem.dtype) for shape in problem.input_shapes]
    names = (*(WAYS if problem.forward else ROLES), *(["dots"] if target().dots else []))
    if problem.algorithm == "auto":
        names = ALGORITHMS
    runs = {name: run for name in names if (run := runner(problem, name, inputs)) is not None}
    best = dict.fromkeys(runs, float("inf"))
    until, turns = time.monotonic() + budget, 0
    while turns < 3 or time.monotonic() < until:
        for name, run in runs.items():
            if turns < 2 or best[name] < 3 * min(best.values()):  # no need to time again what is far behind
                best[name] = min(best[name], run())
        turns += 1
    return best


def _stored(values: Any, dtype: str) -> Any:
    single = values.astype(np.float32)
    if dtype == "f32":
        return single
    return single.astype(np.float16).view(np.uint16) if dtype == "f16" else (single.view(np.uint32) >> 16).astype("u2")


def main() -> None:
    """Measure layers and print a line for each, then the mean and the worst."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, help="layers; default: shapes.json or shapes_3x3.json beside this file")
    parser.add_argument("--algorithms", action="store_true", help="compare direct sums, winograd and auto")
    parser.add_argument("--dtype", choices=("f32", "f16", "bf16"), default="f32")
    parser.add_argument(
        "--ops", help="operations, separated by commas; default: all, with --algorithms weight gradients"
    )
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="layers whose name contains TEXT")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for each layer")
    parser.add_argument("--json", type=Path, help="write the measurements here")
    options = parser.parse_args()
    shapes = options.shapes or Path(__file__).with_name("shapes_3x3.json" if options.algorithms else "shapes.json")
    operations = options.ops.split(",") if options.ops else [*OPERATIONS[: 2 if options.algorithms else None]]
    list(warmup())
    record, regrets = [], []
    for layer in read_layers(shapes, operations, options.only):
        for layout in LAYOUTS:
            problem = layer.problem(options.dtype, layout)
            if options.algorithms:
                problem = replace(problem, algorithm="auto")
            times = measure(problem, options.budget)
            taken = chosen(problem)
            regrets.append(times[taken] / min(times.values()))
            milliseconds = {choice: round(1e3 * seconds, 3) for choice, seconds in times.items()}
            record.append({"layer": layer.name, "op": layer.op, "layout": layout, "milliseconds": milliseconds})
            listed = "  ".join(f"{choice} {time:.2f}" for choice, time in milliseconds.items())
            print(f"{layer.name:30} {layer.op:28} {layout} {regrets[-1]:5.2f} {taken:8} ms: {listed}", flush=True)
    mean = exp(sum(map(log, regrets)) / max(1, len(regrets)))
    print(f"{target()}, {options.dtype}: {len(regrets)} layers, mean {mean:.3f}, worst {max(regrets, default=1.0):.2f}")
    if options.json:
        head = json.dumps({"target": str(target()), "cpu": describe_machine()["cpu"]["model"], "dtype": options.dtype})
        lines = ",\n".join(map(json.dumps, record))
        options.json.write_text(f'{head[:-1]}, "layers": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
