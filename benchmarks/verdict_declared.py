"""Try the verdict of `verify` on honest kernels that declare their arithmetic.

    python -m benchmarks.verdict_declared [--most 400000] [--seed 0] [--layers]

For each declaration, kind of data and length: the verdict, the shares of the limits of rules 1 and 2, and, in
parentheses, whether some elements pass as plain f32, with their errors in units of an honest sum's. With `--layers` the
kernels are those of a padded 3x3 layer, Winograd's algorithm and an FFT among them, judged in full and fast.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.verdict_sums import DATA, Array, compiled, trial
from tests.kernels.harness import problem_of
from tests.problems import Case
from tests.verify import test_arithmetic as layers
from tests.verify.judged import verify
from verify.arithmetic import Arithmetic, round_bits, truncate_bits
from verify.fast import plan_fast_verification
from verify.unit import plan_verification

KINDS_OF_DATA = ("normal", "half positive", "positive", "smooth", "heavy tails", "integers")


def _read(values: Array, change: Callable[[Any, int], Any], digits: int) -> Array:
    return np.asarray(change(values.astype(np.float64), digits).astype(np.float32))


def _empty(a: Array, b: Array) -> Array:
    return np.zeros((b.shape[0], a.shape[0]), a.dtype)


def _split(values: Array, digits: int, parts: int) -> list[Array]:
    found, rest = [], values.astype(np.float64)
    for _ in range(parts):
        found.append(_read(rest, round_bits, digits))
        rest = rest - found[-1]
    return found


def _products_of_parts(a: Array, b: Array, digits: int, parts: int) -> Array:
    """Sum the products of split factors, the smallest first, but for those that are left out."""
    of_a, of_b = _split(a, digits, parts), _split(b, digits, parts)
    total = _empty(a, b)
    for left in range(parts - 1, -1, -1):
        for i in range(left + 1):
            total = total + of_b[left - i] @ of_a[i].T
    return total


def _segments(a: Array, b: Array, count: int, kind: str) -> Array:
    to = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}[kind]
    total = _empty(a, b).astype(to)
    for some, others in zip(np.array_split(a, count, 1), np.array_split(b, count, 1), strict=True):
        total = total + (others @ some.T).astype(to)
    return total.astype(np.float32)


def _kept(a: Array, b: Array, kind: str) -> Array:
    to = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}[kind]
    total = _empty(a, b).astype(to)
    for k in range(a.shape[1]):
        total = total + (b[:, k, None] * a[None, :, k]).astype(to)
    return total.astype(np.float32)


@compiled
def _kahan(a: Array, b: Array, found: Array) -> None:
    for o in range(b.shape[0]):
        for i in range(a.shape[0]):
            total, lost = found[o, i], found[o, i]
            for k in range(a.shape[1]):
                term = a[i, k] * b[o, k] - lost
                after = total + term
                lost = (after - total) - term
                total = after
            found[o, i] = total


@compiled
def _cut(a: Array, b: Array, block: int, extra: int, found: Array) -> None:
    """Add a block of products to the sum, aligned and truncated as in tensor cores, with some extra bits."""
    for o in range(b.shape[0]):
        for i in range(a.shape[0]):
            total = 0.0
            for start in range(0, a.shape[1], block):
                stop, top = min(a.shape[1], start + block), abs(total)
                for k in range(start, stop):
                    top = max(top, abs(np.float64(a[i, k]) * np.float64(b[o, k])))
                unit = 2.0 ** (math.frexp(top)[1] - 24 - extra)
                total = np.trunc(total / unit)
                for k in range(start, stop):
                    total += np.trunc(np.float64(a[i, k]) * np.float64(b[o, k]) / unit)
                total *= unit
                unit = 2.0 ** (math.frexp(total)[1] - 24)
                total = np.trunc(total / unit) * unit
            found[o, i] = total


def _into(function: Callable[..., None], a: Array, b: Array, *more: int) -> Array:
    found = _empty(a, b)
    function(np.ascontiguousarray(a), np.ascontiguousarray(b), *more, found)
    return found


def _tensor_cores(a: Array, b: Array, block: int, extra: int) -> Array:
    return _into(_cut, _read(a, round_bits, 11), _read(b, round_bits, 11), block, extra)


_CUT_TF32 = Arithmetic("tf32", "f32 truncated")

HONEST: dict[str, tuple[Arithmetic, Callable[[Array, Array], Array]]] = {
    "TF32, to nearest": (
        Arithmetic("tf32"), lambda a, b: _read(b, round_bits, 11) @ _read(a, round_bits, 11).T),
    "TF32, truncated": (
        Arithmetic("tf32"), lambda a, b: _read(b, truncate_bits, 11) @ _read(a, truncate_bits, 11).T),
    "TF32, one input": (Arithmetic("tf32"), lambda a, b: _read(b, round_bits, 11) @ a.T),
    "TF32, but f32": (Arithmetic("tf32"), lambda a, b: b @ a.T),
    "TF32, V100": (_CUT_TF32, lambda a, b: _tensor_cores(a, b, 4, 0)),
    "TF32, A100": (_CUT_TF32, lambda a, b: _tensor_cores(a, b, 4, 1)),
    "TF32, H100": (_CUT_TF32, lambda a, b: _tensor_cores(a, b, 8, 2)),
    "bf16": (Arithmetic("bf16"), lambda a, b: _read(b, round_bits, 8) @ _read(a, round_bits, 8).T),
    "f16": (
        Arithmetic("f16"),
        lambda a, b: b.astype(np.float16).astype(np.float32) @ a.astype(np.float16).astype(np.float32).T),
    "3xTF32": (Arithmetic("3xtf32"), lambda a, b: _products_of_parts(a, b, 11, 2)),
    "bf16x3": (Arithmetic("bf16x3"), lambda a, b: _products_of_parts(a, b, 8, 2)),
    "bf16x6": (Arithmetic("bf16x6"), lambda a, b: _products_of_parts(a, b, 8, 3)),
    "split-K 8, f32": (Arithmetic(segments=8), lambda a, b: _segments(a, b, 8, "f32")),
    "split-K 8, bf16": (Arithmetic(segments=8, segment_sum="bf16"), lambda a, b: _segments(a, b, 8, "bf16")),
    "split-K 64, f16": (Arithmetic(segments=64, segment_sum="f16"), lambda a, b: _segments(a, b, 64, "f16")),
    "Kahan": (Arithmetic(), lambda a, b: _into(_kahan, a, b)),
    "f64 sums": (Arithmetic(sum="f64"), lambda a, b: (b.astype(float) @ a.astype(float).T).astype(np.float32)),
    "f16 sums": (Arithmetic(sum="f16"), lambda a, b: _kept(a, b, "f16")),
    "bf16 sums": (Arithmetic(sum="bf16"), lambda a, b: _kept(a, b, "bf16")),
}  # fmt: skip
"""Honest kernels by name: what they declare, and their sums, O by I, of factors."""


PLANES = {64: (1, 8), 2304: (1, 48), 25_088: (128, 14), 401_408: (2048, 14)}
"""Number of products in a gradient's sum: number of images, and their height and width."""


def _winograd(tile: int) -> tuple[Arithmetic, Callable[[Case, dict[str, Array]], Array]]:
    def compute(case: Case, inputs: dict[str, Array]) -> Array:
        return (layers.winograd if "Weights" in case.op else layers.forward_winograd)(case, inputs, tile)

    return Arithmetic(algorithm=f"winograd F({tile}, 3)"), compute


LAYERS: dict[str, tuple[Arithmetic, Callable[[Case, dict[str, Array]], Array]]] = {
    "f32": (Arithmetic(), lambda case, inputs: case.expected(inputs)),
    "TF32": (Arithmetic("tf32"), lambda case, inputs: case.expected(layers.each(inputs, round_bits, 11))),
    "bf16": (Arithmetic("bf16"), lambda case, inputs: case.expected(layers.each(inputs, round_bits, 8))),
    "3xTF32": (Arithmetic("3xtf32"), lambda case, inputs: layers.of_parts(case, inputs, 11, 2)),
    "Winograd F(2, 3)": _winograd(2),
    "Winograd F(4, 3)": _winograd(4),
    "FFT": (Arithmetic(algorithm="fft"), layers.by_fft),
    "images in bf16": (
        Arithmetic(segments=2048, segment_sum="bf16"),
        lambda case, inputs: layers.by_image(case, inputs, ml_dtypes.bfloat16)),
}  # fmt: skip
"""Honest kernels of a padded 3x3 layer: what they declare, and what they compute."""


def judged_layers(rng: np.random.Generator, most: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the name of a kernel, the data that it was tried on, and the report on its result."""
    for op in ("ConvolutionBackwardWeights", "Convolution"):
        for n, (images, side) in PLANES.items():
            if n > (most if "Weights" in op else min(most, 30_000)):
                continue
            case = replace(layers.LAYER, op=op, n=images, src_spatial=(side, side), dst_spatial=(side, side))
            if "Weights" not in op:
                case = replace(case, n=1, src_channels=n // 9)
            for data in KINDS_OF_DATA:
                inputs = {name: _of_kind(rng, data, tensor) for name, tensor in case.floats().items()}
                for name, (said, kernel) in LAYERS.items():
                    if "Weights" not in op and name in ("FFT", "images in bf16"):
                        continue
                    with np.errstate(all="ignore"):
                        result = kernel(case, inputs)
                    for plan in (plan_verification, plan_fast_verification):
                        report = verify(case, inputs, result, plan(problem_of(case), arithmetic=said))
                        how = "fast" if plan is plan_fast_verification else "full"
                        yield name, f"{op} {n} {data} {how}", report


def _of_kind(rng: np.random.Generator, data: str, tensor: Array) -> Array:
    """Return numbers of a kind in the shape of a tensor, along whose pixels they are smooth or not."""
    images, channels, *plane = tensor.shape
    values = DATA[data](rng, images * math.prod(plane), channels).reshape(images, *plane, channels)
    return np.ascontiguousarray(np.moveaxis(values, -1, 1).astype(np.float32))


def judged_sums(rng: np.random.Generator, most: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the name of a kernel, the data that it was tried on, and the report on its result."""
    for data in KINDS_OF_DATA:
        for n in (n for n in (64, 2304, 25088, 400_000) if n <= most):
            one = trial(rng, data, "f32", n, 12 if n < 100_000 else 6, 16 if n % 16 == 0 else 1)
            for name, (said, kernel) in HONEST.items():
                if "sums" in name and "f64" not in name and n > 100_000:
                    continue
                with np.errstate(all="ignore"):
                    yield name, f"{data[:8]} {n}", one.judge(kernel(one.a, one.b), arithmetic=said)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=400_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", action="store_true")
    chosen = parser.parse_args()
    rng = np.random.default_rng(chosen.seed)
    table: dict[str, dict[str, str]] = defaultdict(dict)
    passed = count = 0
    for name, what, report in (judged_layers if chosen.layers else judged_sums)(rng, chosen.most):
        rules = {r["rule"]: r for r in report["rules"]}
        m = rules["mean_square"]
        share = m["measured"] / m["limit"] if m["limit"] else 0.0
        plain = report.get("arithmetic", {}).get("plain")
        table[name][what] = f"{'ok' if report['passed'] else 'FAIL'} {share:.2f}/{rules['largest']['measured']:.2f}" + (
            "" if plain is None else f" ({'p' if plain['passed'] else 'F'} {float(plain['errors']):.2g})"
        )
        passed, count = passed + report["passed"], count + 1
    for name, row in table.items():
        print(name)
        for column, text in row.items():
            print(f"    {column:58} {text}")
    print(f"{passed} of {count} passed")


if __name__ == "__main__":
    main()
