"""Try the verdict of `verify` on honest kernels that declare their arithmetic.

    python -m benchmarks.verdict_declared [--most 400000] [--seed 0]

For each declaration, kind of data and length: the verdict, the shares of the limits of rules 1 and 2, and, in
parentheses, whether some elements pass as plain f32, with their errors in units of an honest sum's.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.verdict_sums import Array, compiled, trial
from verify.arithmetic import Arithmetic, round_bits, truncate_bits

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
    import ml_dtypes

    to = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}[kind]
    total = _empty(a, b).astype(to)
    for some, others in zip(np.array_split(a, count, 1), np.array_split(b, count, 1), strict=True):
        total = total + (others @ some.T).astype(to)
    return total.astype(np.float32)


def _kept(a: Array, b: Array, kind: str) -> Array:
    import ml_dtypes

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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=400_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    rng = np.random.default_rng(chosen.seed)
    lengths = [n for n in (64, 2304, 25088, 400_000) if n <= chosen.most]
    table: dict[str, dict[str, str]] = defaultdict(dict)
    for data in KINDS_OF_DATA:
        for n in lengths:
            one = trial(rng, data, "f32", n, 12 if n < 100_000 else 6, 16 if n % 16 == 0 else 1)
            for name, (said, kernel) in HONEST.items():
                if "sums" in name and "f64" not in name and n > 100_000:
                    continue
                with np.errstate(all="ignore"):
                    report = one.judge(kernel(one.a, one.b), arithmetic=said)
                rules = {r["rule"]: r for r in report["rules"]}
                m = rules["mean_square"]
                share = m["measured"] / m["limit"] if m["limit"] else 0.0
                word = "ok" if report["passed"] else "FAIL"
                plain = report.get("arithmetic", {}).get("plain")
                table[name][f"{data[:8]} {n}"] = f"{word} {share:.2f}/{rules['largest']['measured']:.2f}" + (
                    "" if plain is None else f" ({'p' if plain['passed'] else 'F'} {plain['errors']:.2g})"
                )
    for name, row in table.items():
        print(name)
        for column, text in row.items():
            print(f"    {column:18} {text}")


if __name__ == "__main__":
    main()
