"""Try tolerances on results that are honest, and on results that are not.

    python -m benchmarks.tolerances [--seeds 20] [--most 25088]

For each dtype, kind of data and length: how many honest results fail under each tolerance, and how many faults pass.
The tolerances are those of `convgrad tolerance`, for each element and as one pair, and the fixed ones of KernelBench
(`src/kernelbench/eval.py`), GPU MODE (`problems/pmpp/conv2d_py/reference.py`) and cudnn-frontend
(`test/python/conv/graph/test_conv_fixed.py`), all with atol = rtol. Faults that change no bit are left out.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from benchmarks.verdict_sums import DATA, Array, Trial, honest, trial
from benchmarks.verdicts import FAULTS
from kernels import run_unit
from verify.tolerance import places_of, plan_tolerance, smallest_pair

Holds = Callable[[Array], bool]

FIXED = {
    "KernelBench": {"f32": 1e-4, "f16": 1e-2, "bf16": 1e-2},
    "GPU MODE": dict.fromkeys(("f32", "f16", "bf16"), 1e-3),
    "cudnn-frontend": {"f32": 1e-2, "f16": 2.5e-3, "bf16": 1e-2},
}


def tolerance_of(one: Trial) -> tuple[Array, Array]:
    """Return the reference and the tolerance of each element of a trial, O by I."""
    plan = plan_tolerance(one.problem)
    output, scratch = np.zeros(plan.problem.output_shape, np.uint8), np.zeros(plan.scratch_bytes, np.uint8)
    for unit in plan.units:
        run_unit(plan, unit, one.inputs, output, scratch)
    kind = np.float64 if one.dtype == "f64" else np.float32
    found = [
        output[place].view(kind).reshape(one.b.shape[0], -1) for place in places_of(one.problem.output_shape, one.dtype)
    ]
    return found[0], found[1]


def tests_of(one: Trial) -> dict[str, Holds]:
    """Return the tests that a result of a trial may have to pass, by the name of their tolerance."""
    reference, tolerance = tolerance_of(one)
    atol, rtol = smallest_pair(reference, tolerance, lambda: False)

    def close(absolute: float | Array, relative: float) -> Holds:
        return lambda result: bool(np.isclose(result.astype(reference.dtype), reference, relative, absolute).all())

    ours = {"each element": close(tolerance, 0.0), "one pair": close(atol, rtol)}
    return ours | {name: close(each[one.dtype], each[one.dtype]) for name, each in FIXED.items() if one.dtype in each}


def main() -> None:
    """Print both counts."""
    parser = argparse.ArgumentParser(description="Try tolerances on honest and on wrong results.")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--most", type=int, default=25088, help="products of the longest sums")
    parser.add_argument("--dtypes", default="f32,f16,bf16,f64")
    parser.add_argument("--data", default="normal,positive", help="kinds of data, or all")
    options = parser.parse_args()
    kinds = list(DATA) if options.data == "all" else options.data.split(",")
    passed: dict[str, list[int]] = {}
    columns = ["each element", "one pair", *FIXED]
    print(f"{'honest that fail | faults that pass':38}" + "".join(f"{name:>18}" for name in columns))
    for dtype in options.dtypes.split(","):
        for data in kinds:
            for n in (each for each in (64, 2304, 25088) if each <= options.most):
                counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
                for seed in range(options.seeds):
                    rng = np.random.default_rng(seed)
                    _count(trial(rng, data, dtype, n, 8, 4), rng, counts)
                shown = "".join(
                    f"{f'{a}/{b} | {c}/{d}':>18}" for a, b, c, d in (counts[name] for name in columns if name in counts)
                )
                print(f"{f'{dtype}, {data}, {n} products':38}{shown}", flush=True)
                for name, each in counts.items():
                    total = passed.setdefault(name, [0, 0, 0, 0])
                    passed[name] = [a + b for a, b in zip(total, each, strict=True)]
    for name, (a, b, c, d) in passed.items():
        print(f"{name}: {a} of {b} honest results fail, {c} of {d} faults pass")


@np.errstate(all="ignore")
def _count(one: Trial, rng: np.random.Generator, counts: dict[str, list[int]]) -> None:
    """Count honest results that fail, all of them, faults that pass, and all of them."""
    tests = tests_of(one)
    sums = list(honest(one, rng))
    for name, holds in tests.items():
        counts[name][0] += sum(not holds(result) for _, result in sums)
        counts[name][1] += len(sums)
    for name, fault in FAULTS.items():
        if "every product" in name and one.a.shape[1] > 3000:
            continue
        result = fault(one)
        if any(np.array_equal(result, right) for _, right in sums):
            continue
        for test, holds in tests.items():
            counts[test][2] += holds(result)
            counts[test][3] += 1


if __name__ == "__main__":
    main()
