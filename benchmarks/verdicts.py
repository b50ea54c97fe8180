"""Try the verdict of `verify` on results that are honest, and on results that are not.

    python -m benchmarks.verdicts honest [--results 10000] [--least 1] [--most 1000000] [--seed 0]
    python -m benchmarks.verdicts faults [--most 200000] [--seed 0]
    python -m benchmarks.verdicts declared [--most 30000] [--seed 0]

`honest` sums products in every order and way that a kernel may, of many kinds of data, in every dtype, and as PyTorch
and JAX do where they are installed: each result that fails is printed, and the largest share of each rule's limit.
`faults` plants one fault at a time. Each is found, or is smaller than the detection limit that the report states.
`declared` plants them in kernels that declare their arithmetic (`benchmarks.verdict_declared`).
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from benchmarks.verdict_declared import HONEST
from benchmarks.verdict_peers import peer_sums
from benchmarks.verdict_sums import DATA, KINDS, Array, Trial, compiled, empty, honest, trial
from verify.arithmetic import Arithmetic
from verify.model import ulp

LONG = (64, 2304, 25088, 200704)
LENGTHS = (1, 2, 3, 5, 9, 16, 33, 64, 100, 256, 1000, 2304, 4096, 12544, 25088, 65536, 200704, 1000000)


def _images(n: int) -> int:
    return next((count for count in (16, 8, 4, 2) if n % count == 0 and n > count), 1)


def try_honest(results: int, least: int, most: int, seed: int) -> None:
    """Judge a given number of honest results and print those that fail."""
    rng = np.random.default_rng(seed)
    count, failed, began = 0, 0, time.time()
    shares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    counts: Counter[str] = Counter()
    lengths = [n for n in LENGTHS if least <= n <= most]
    while count < results:
        for n in lengths:
            weight = min(1.0, 3000 / n)  # long sums take long
            for data in DATA:
                for dtype in KINDS:
                    if rng.random() > weight and count > 300:
                        continue
                    channels = int(rng.choice([1, 2, 12] if n > 5000 else [1, 3, 12, 12, 40 if n > 300 else 128]))
                    one = trial(rng, data, dtype, n, channels, _images(n))
                    for name, result in chain(honest(one, rng), peer_sums(one)):
                        report = one.judge(result)
                        count += 1
                        rules = {rule["rule"]: rule for rule in report["rules"]}
                        mean = rules["mean_square"]
                        share = mean["measured"] / mean["limit"] if mean["limit"] else 0.0
                        for key in (f"data: {data}", f"dtype: {dtype}", f"sum: {name}", f"n: {n}"):
                            counts[key] += 1
                            shares[key][0] = max(shares[key][0], share)
                            shares[key][1] = max(shares[key][1], float(rules["largest"]["measured"]))
                        if not report["passed"]:
                            failed += 1
                            broken = [
                                (r["rule"], r["measured"], r["limit"]) for r in report["rules"] if not r["passed"]
                            ]
                            print(f"FAILED: {name}, {data}, {dtype}, n = {n}, {channels}^2 elements: {broken}"
                                  f" {[cause['text'] for cause in report['causes']]}", flush=True)  # fmt: skip
        if time.time() - began > 3000:
            break
    print(f"{count} honest results, {failed} failed, {time.time() - began:.0f} s")
    print(f"{'':30}  results  mean square  largest   (shares of the limits)")
    for key, (first, second) in shares.items():
        print(f"{key:30} {counts[key]:8} {first:12.3f} {second:8.3f}")


def _as(kind: str, values: Array) -> Array:
    """Round to a narrower type and back."""
    if kind == "tf32":
        return _cut(values, 11, np.rint)
    rounded: Array = values.astype(KINDS[kind]).astype(values.dtype)
    return rounded


def _cut(values: Array, digits: int, rounding: Callable[[Array], Array]) -> Array:
    mantissa, exponent = np.frexp(values)
    found: Array = np.ldexp(rounding(np.ldexp(mantissa, digits)), exponent - digits).astype(values.dtype)
    return found


@compiled
def _wrong_kahan(a: Array, b: Array, found: Array) -> None:
    """Sum with a compensation of the wrong sign."""
    for o in range(b.shape[0]):
        for i in range(a.shape[0]):
            total, lost = found[o, i], found[o, i]
            for k in range(a.shape[1]):
                term = a[i, k] * b[o, k] + lost
                after = total + term
                lost = (after - total) - term
                total = after
            found[o, i] = total


def _product(trial: Trial, a: Array, b: Array) -> Array:
    return trial.rounded(trial.product(a, b))


def _by_image(trial: Trial, kind: str) -> Array:
    """Add the sums of images, or of 16 stretches of one image, in a narrow dtype."""
    parts = trial.images if trial.images > 1 else 16
    total = np.zeros((trial.b.shape[0], trial.a.shape[0]), trial.a.dtype)
    for a, b in zip(np.array_split(trial.a, parts, 1), np.array_split(trial.b, parts, 1), strict=True):
        total = _as(kind, total + trial.product(a, b))
    return trial.rounded(total)


def _narrow_sum(trial: Trial, kind: str) -> Array:
    total = np.zeros((trial.b.shape[0], trial.a.shape[0]), trial.a.dtype)
    for k in range(trial.a.shape[1]):
        total = _as(kind, total + trial.b[:, k, None] * trial.a[None, :, k])
    return trial.rounded(total)


def _without(trial: Trial, missing: slice, times: float = 0.0) -> Array:
    a = trial.a.copy()
    a[:, missing] *= times
    return _product(trial, a, trial.b)


def _changed(trial: Trial, change: Callable[[Array], None]) -> Array:
    result = _product(trial, trial.a, trial.b)
    change(result)
    return result


def _scaled(trial: Trial, factor: float, *at: Any) -> Array:
    values = trial.product(trial.a, trial.b)
    values[at] *= factor
    return trial.rounded(values)


def _kahan(trial: Trial) -> Array:
    found = empty(trial)
    _wrong_kahan(trial.a, trial.b, found)
    return trial.rounded(found)


def _toward_zero(trial: Trial) -> Array:
    if trial.dtype in ("f32", "f64"):
        exact = trial.sums.high.reshape(trial.b.shape[0], -1)
        near = exact.astype(KINDS[trial.dtype])
        return np.where(np.abs(near.astype(float)) > np.abs(exact), np.nextafter(near, near.dtype.type(0)), near)
    values = (trial.b @ trial.a.T).astype(np.float64)
    return _cut(values, {"f16": 11, "bf16": 8}[trial.dtype], np.trunc).astype(KINDS[trial.dtype])


def _half_away(trial: Trial) -> Array:
    values = trial.sums.high.reshape(trial.b.shape[0], -1)
    digits = {"f16": 11, "bf16": 8, "f32": 24, "f64": 53}[trial.dtype]
    away = _cut(values, digits, lambda x: np.trunc(x + np.copysign(0.5, x)))
    return away.astype(KINDS[trial.dtype])


def _repeat(result: Array) -> None:
    half = result.shape[0] // 2
    result[half : 2 * half] = result[:half]


def _tail(result: Array, value: float) -> None:
    result[:, -max(1, result.shape[1] // 4) :] = value


def _swap(result: Array) -> None:
    result[[0, 1]] = result[[1, 0]]


def _set(result: Array, factor: float) -> None:
    result[-1, -1] = float(result[-1, -1]) * factor


FAULTS: dict[str, Callable[[Trial], Array]] = {
    "inputs read as TF32": lambda t: _product(t, _as("tf32", t.a), _as("tf32", t.b)),
    "inputs truncated to TF32": lambda t: _product(t, _cut(t.a, 11, np.trunc), _cut(t.b, 11, np.trunc)),
    "src alone read as TF32": lambda t: _product(t, _as("tf32", t.a), t.b),
    "inputs read as bf16": lambda t: _product(t, _as("bf16", t.a), _as("bf16", t.b)),
    "inputs truncated to bf16": lambda t: _product(t, _cut(t.a, 8, np.trunc), _cut(t.b, 8, np.trunc)),
    "inputs read as f16": lambda t: _product(t, _as("f16", t.a), _as("f16", t.b)),
    "inputs of two bf16 each": lambda t: _product(t, _cut(t.a, 16, np.rint), _cut(t.b, 16, np.rint)),
    "inputs read as f32": lambda t: _product(t, _as("f32", t.a), _as("f32", t.b)),
    "result kept in bf16": lambda t: t.rounded(_as("bf16", t.product(t.a, t.b))),
    "result kept in f16": lambda t: t.rounded(_as("f16", t.product(t.a, t.b))),
    "result kept in TF32": lambda t: t.rounded(_as("tf32", t.product(t.a, t.b))),
    "images added in bf16": lambda t: _by_image(t, "bf16"),
    "images added in f16": lambda t: _by_image(t, "f16"),
    "every product added in f16": lambda t: _narrow_sum(t, "f16"),
    "every product added in bf16": lambda t: _narrow_sum(t, "bf16"),
    "one pixel of all missing": lambda t: _without(t, slice(-1, None)),
    "one row of the last image missing": lambda t: _without(t, slice(-max(1, t.a.shape[1] // t.images // 56), None)),
    "one image missing": lambda t: _without(t, slice(-(t.a.shape[1] // max(t.images, 16)) or -1, None)),
    "last 16 products dropped": lambda t: _without(t, slice(-16, None)),
    "one pixel counted twice": lambda t: _without(t, slice(0, 1), 2.0),
    "channel scaled by 1.001": lambda t: _scaled(t, 1.001, 0),
    "all scaled by 1 + 2^-10": lambda t: _scaled(t, 1 + 2.0**-10, slice(None)),
    "averaged over images": lambda t: _scaled(t, 1 / max(2, t.images), slice(None)),
    "one element off by 5 %": lambda t: _changed(t, lambda result: _set(result, 1.05)),
    "one element zero": lambda t: _changed(t, lambda result: _set(result, 0.0)),
    "one element of the wrong sign": lambda t: _changed(t, lambda result: _set(result, -1.0)),
    "one element NaN": lambda t: _changed(t, lambda result: _set(result, np.nan)),
    "src shifted by a pixel": lambda t: _product(t, np.roll(t.a, 1, 1), t.b),
    "src mirrored": lambda t: _product(t, t.a[:, ::-1], t.b),
    "two channels swapped": lambda t: _changed(t, _swap),
    "result transposed": lambda t: np.ascontiguousarray(_product(t, t.a, t.b).T),
    "unwritten tail, zero": lambda t: _changed(t, lambda result: _tail(result, 0.0)),
    "unwritten tail, NaN": lambda t: _changed(t, lambda result: _tail(result, np.nan)),
    "tile written twice": lambda t: _changed(t, _repeat),
    "added to an old result": lambda t: t.rounded(t.product(t.a, t.b) + np.roll(t.product(t.a, t.b), 1, 0)),
    "old result": lambda t: _product(t, t.a[:, ::-1], t.b[::-1]),
    "zeros": lambda t: _product(t, t.a, t.b) * 0,
    "rounded toward zero": _toward_zero,
    "ties rounded away from zero": _half_away,
    "Kahan's sum with a wrong sign": _kahan,
}
"""Faults by name: the result that they give, O by I."""

_SPECIAL: dict[str, tuple[float, Callable[[Array], Array]]] = {
    "NaN of an input swallowed": (np.nan, lambda values: np.nan_to_num(values, nan=0.0)),
    "Inf of an input saturated": (np.inf, lambda values: np.nan_to_num(values, posinf=3e4, neginf=-3e4)),
}


def _effect(one: Trial, fault: Array) -> tuple[float, float]:
    """Return the size of a fault as the share of random products with the same effect: on average, and at its largest.

    The limits are those of typical elements: some have limits that are a few times as large. A result that is nearer to
    the exact one than the honest one is, where sums are narrow, is no further off than that.
    """
    exact, spread = (each.reshape(one.b.shape[0], -1) for each in (one.sums.high, one.sums.spread))
    with np.errstate(all="ignore"):
        honest_one = _product(one, one.a, one.b).astype(float)
        wide = fault.astype(float)
        change = np.minimum(np.abs(wide - honest_one), np.abs(wide - exact))
        off = np.square(change / spread)
        mean = np.square(exact / spread)
        share = 2 * off / (1 + np.sqrt(1 + 4 * off * mean))
        # as the rule does, each element in units of the error that is expected of it
        unit = 2.0**-53 if one.dtype == "f64" else 2.0**-24
        weight = np.square(spread / (ulp(exact, one.dtype) + unit * spread))
        every_off, every_mean = (float((each * weight).sum() / weight.sum()) for each in (off, mean))
        every = 2 * every_off / (1 + np.sqrt(1 + 4 * every_off * every_mean))
    return float(every), float(np.nanmax(np.where(change > 1.01 * ulp(exact, one.dtype), share, 0.0), initial=0.0))


Column = tuple[str, str, int]


def _tried(one: Trial, said: Arithmetic | None, column: Column) -> Iterator[tuple[str, str, str]]:
    """Yield each fault of a kernel: its name, the rule that fails it or a dash, and what was missed though visible."""
    honest_one = _product(one, one.a, one.b)
    for name, fault in FAULTS.items():
        if (column[-1] > 3000 and "every product" in name) or (said and name in _as_declared(said)):
            continue
        with np.errstate(all="ignore"):
            result = fault(one)
        exact = one.rounded(one.sums.high.reshape(result.shape))
        if np.array_equal(result, exact) or np.array_equal(result, honest_one):
            continue  # no fault of this dtype, data or kernel
        if (broken := one.broken(result, said)) is not None:
            yield name, broken[0].upper(), ""
            continue
        report = one.judge(result, arithmetic=said)
        every, largest = _effect(one, result)
        seen = report["detection"]
        missed = report["passed"] and (every > 2 * seen["every_element"] or largest > 4 * seen["one_element"])
        text = f"{name} {column} {every:.2g} {largest:.2g} {seen}"
        yield name, "-" if report["passed"] else "H", text if missed else ""
    for name, (value, swallow) in _SPECIAL.items():
        a = one.a.copy()
        a[0, 0] = value
        spoilt = Trial(one.dtype, a.T.astype(KINDS[one.dtype]), one.diff_dst, one.images)
        with np.errstate(all="ignore"):
            report = spoilt.judge(_product(one, swallow(a), one.b), arithmetic=said)
        yield name, "-" if report["passed"] else "L", f"{name} {column}" if report["passed"] else ""


def _as_declared(said: Arithmetic) -> set[str]:
    """Return the faults that a declaration permits: it says the same, or something less precise."""
    digits = {"tf32": 11, "f16": 11, "bf16": 8}.get(said.products, 24)
    better = ("rounded toward zero", "ties rounded away from zero", "Kahan's sum with a wrong sign")
    found = set() if said == Arithmetic() else {*better}
    for least, name in ((11, "TF32"), (11, "f16"), (8, "bf16")):
        if digits <= least:
            found |= {f"inputs read as {name}", f"inputs truncated to {name}", f"src alone read as {name}"}
    return found


def try_declared(most: int, seed: int) -> None:
    """Plant the same faults in kernels that declare their arithmetic; print how many were found as what they are."""
    rng = np.random.default_rng(seed)
    columns = [("f32", data, n) for data in ("normal", "positive", "smooth", "integers") for n in LONG if n <= most]
    trials = [(column, trial(rng, column[1], "f32", column[2], 16, _images(column[2]))) for column in columns]
    for name, (said, kernel) in {"plain": (Arithmetic(), lambda a, b: b @ a.T), **HONEST}.items():
        passed, failed, missed = Counter[str](), 0, []
        for column, one in trials:
            if column[-1] > 3000 and "sums" in name and "f64" not in name:
                continue  # one product after the other takes long
            one.product = kernel
            for fault, rule, seen in _tried(one, said, column):
                failed += rule != "-"
                passed[fault] += rule == "-"
                missed += [seen] if seen else []
        total = failed + passed.total()
        print(f"{name}: {failed} of {total} found, {len(missed)} missed though visible", flush=True)
        print("".join([f"    {fault}: passed {count}\n" for fault, count in passed.items() if count]), end="")
        print("".join([f"    MISSED {each}\n" for each in missed]), end="", flush=True)


def try_faults(most: int, seed: int) -> None:
    """Plant faults and print which were found, by dtype and length, and which were not though they are visible."""
    rng = np.random.default_rng(seed)
    lengths = [n for n in LONG if n <= most]
    columns = [(dtype, data, n) for dtype in KINDS for data in ("normal", "positive", "integers") for n in lengths]
    table: dict[str, dict[Column, str]] = defaultdict(dict)
    missed: list[str] = []
    for column in columns:
        dtype, data, n = column
        for name, rule, seen in _tried(trial(rng, data, dtype, n, 16, _images(n)), None, column):
            table[name][column] = rule
            missed += [seen] if seen else []
    print("E, M, L, H: failed by rule 0 (exact), 1 (mean square), 2 (largest), 3 (hypotheses); -: passed")
    for dtype in KINDS:
        print(f"\n{dtype:34}" + "  ".join(f"{data:>{4 * len(lengths)}}" for data in ("normal", "positive", "integers")))
        print(
            f"{'':34}"
            + "  ".join(
                "".join(f"{n:>{4}}"[-4:] if n < 9999 else f"{n // 1000:>3}k" for n in lengths) for _ in range(3)
            )
        )
        for name, row in table.items():
            cells = ["".join(f"{row.get((dtype, data, n), ' '):>4}" for n in lengths)
                     for data in ("normal", "positive", "integers")]  # fmt: skip
            print(f"{name:34}" + "  ".join(cells))
    print(f"\n{len(table)} kinds of faults; missed though visible by the limits that the report states: {len(missed)}")
    print("\n".join(missed))


def main() -> None:
    """Run one of the two tables."""
    parser = argparse.ArgumentParser(description="Try the verdict on honest and on wrong results.")
    parser.add_argument("table", choices=["honest", "faults", "declared"])
    parser.add_argument("--results", type=int, default=10000)
    parser.add_argument("--least", type=int, default=1, help="shortest sums of honest results")
    parser.add_argument("--most", type=int, default=1_000_000, help="longest sums")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.table == "honest":
        try_honest(options.results, options.least, options.most, options.seed)
    else:
        {"faults": try_faults, "declared": try_declared}[options.table](options.most, options.seed)


if __name__ == "__main__":
    main()
