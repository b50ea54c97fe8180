"""Compare a result with the reference, element by element, and describe the errors as JSON.

The bound of an element is ``8 * 2**-23 * sqrt(n) * sum of |a * b|`` for the f32 sum of its n products, and half a unit
in the last place (ULP) for rounding it; f16 and bf16 may be a whole ULP off. Sums of random numbers in any order stay
far below it. For f64 it is ``2**-52``, which leaves room for the error of the reference itself, a sum in f64 too.

oneDNN's own tests judge in two ways. benchdnn fills tensors with integers so small that every partial sum is exact, and
wants the very bits of the rounded reference. Its gtests take any f32 and allow a relative error of 1e-4, absolute where
the reference is no larger; here f16 and bf16 are allowed one unit of their last digit in the same way. oneDNN Graph has
no f64; it is allowed what f32 is, in units of the last digit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.plan import Stop, Storage
from kernels.problem import ConvProblem
from kernels.reference import narrow, widen
from verify.hints import hints
from verify.terms import worst_terms

__all__ = ["Compared", "sum_bound", "write_report"]

Array = npt.NDArray[np.float64]

_SLICE = 1 << 18
"""Elements that are compared at a time, some tens of megabytes of float64."""

_BINS = 64
"""Most entries of an axis of a map: larger axes are joined to this many."""

_DIGITS = {"f32": 24, "f16": 11, "bf16": 8, "f64": 53}
_LEAST = {"f32": -149, "f16": -24, "bf16": -133, "f64": -1074}
"""Exponent of the smallest subnormal number."""

_LARGEST = {"f32": 128, "f16": 16, "bf16": 128, "f64": 1024}
"""Exponent of the smallest power of two that is too large."""

_RELATIVE = {"f32": 1e-4, "f16": 2.0**-10, "bf16": 2.0**-7, "f64": 1e-4 * 2.0**-29}
_HALF_AN_ULP = ("f32", "f64")
_EDGES = [0, 1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513, 1025, 2049, 4097, 65537]
"""The ULP of the first element of each bucket of the histogram."""


@dataclass(frozen=True)
class Compared:
    """What a report is about: the call, the result to verify, exact values, bounds of the sums, and the largest sum."""

    problem: ConvProblem
    inputs: Sequence[Storage]
    result: Storage
    exact: Array
    bound: Array
    peak: float


def sum_bound(magnitudes: Array, terms: Array, dtype: str) -> Array:
    """Return the bound of the error of sums of so many products, given the sums of their magnitudes.

    The sums are accumulated in f32, those of f64 in f64.
    """
    return 8 * 2.0 ** -_sum_digits(dtype) * np.sqrt(terms) * magnitudes


def write_report(compared: Compared, stop: Stop) -> bytes | None:
    """Compare everything and return the report as JSON; None when `stop` said so. Overwrites the bounds."""
    problem = compared.problem
    totals = _Totals(problem.dtype)
    size = prod(problem.output_shape)
    result, exact, share = (each.reshape(-1) for each in (compared.result, compared.exact, compared.bound))
    for start in range(0, size, _SLICE):
        if stop():
            return None
        part = slice(start, start + _SLICE)
        share[part] = totals.add(result[part], exact[part], share[part])
    exact_sums = compared.peak < 2 ** (_sum_digits(problem.dtype) + 1)
    integers = exact_sums and all(_integers(each, problem.dtype) for each in compared.inputs)
    report = {
        "dtype": problem.dtype,
        "shape": list(problem.output_shape),
        "elements": size,
        **totals.describe(),
        "verdicts": _verdicts(problem, totals, share, integers),
    }
    report["passed"] = report["verdicts"]["convgrad"]["passed"]
    shares = share.reshape(problem.output_shape)
    if stop():
        return None
    report |= {"maps": _maps(problem, shares), "worst": _worst(compared, shares), "hints": []}
    if not report["passed"]:
        found = hints(problem, compared.result, compared.exact, stop)
        if found is None:
            return None
        report["hints"] = found
    return json.dumps(_plain(report), allow_nan=False, separators=(",", ":")).encode()


class _Totals:
    """Sums and extremes of the errors seen so far."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.unequal = self.not_finite = self.relative_failed = self.count = 0
        self.largest = self.relative = self.total = self.squares = 0.0
        self.histogram = np.zeros(len(_EDGES), np.int64)

    def add(self, stored: Storage, exact: Array, bound: Array) -> Array:
        """Compare some elements; return the error of each as a share of its bound, infinite where none is allowed."""
        dtype = self.dtype
        rounded = narrow(exact, dtype)
        got, nearest = widen(stored, dtype), widen(rounded, dtype)
        equal = (got == nearest) | (np.isnan(got) & np.isnan(nearest))
        # An overflow counts as the first number that is too large, so that a sum just below it may overflow too.
        huge = inf if dtype == "f64" else 2.0 ** _LARGEST[dtype]
        finite = np.isfinite(exact) & ~np.isnan(got)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            error = np.where(finite, np.abs(np.clip(got, -huge, huge) - exact), np.inf)
            error[equal & ~np.isfinite(got)] = 0.0  # an Inf is as far off as the exact value is large, but right
            allowed = bound + _ulp(exact, dtype) * (0.5 if dtype in _HALF_AN_ULP else 1.0)
            share = np.where(error == 0, 0.0, error / allowed)
            share = np.where(np.isnan(share), np.inf, share)
        known = np.isfinite(error)
        self.count += int(known.sum())
        self.unequal += int((~equal).sum())
        self.not_finite += int((~equal & ~(np.isfinite(got) & np.isfinite(nearest))).sum())
        if known.any():
            self._measure(error[known], np.abs(exact[known]))
        limit = _RELATIVE[dtype]
        with np.errstate(invalid="ignore", over="ignore"):
            allowed_by_gtest = np.where(np.abs(exact) <= limit, limit, limit * np.abs(exact))
            self.relative_failed += int((~equal & ~(error <= allowed_by_gtest)).sum())
        between = np.isfinite(got) & np.isfinite(nearest)
        places = np.searchsorted(_EDGES, _steps(stored[between], rounded[between]), side="right") - 1
        self.histogram += np.bincount(places, minlength=len(_EDGES))
        return share

    @np.errstate(over="ignore")
    def _measure(self, errors: Array, sizes: Array) -> None:
        """Add the errors of some elements, given the magnitudes of their exact values."""
        self.largest = max(self.largest, float(errors.max()))
        self.total += float(errors.sum())
        self.squares += float((errors * errors).sum())
        above = sizes > 0
        if above.any():
            self.relative = max(self.relative, float((errors[above] / sizes[above]).max()))

    def describe(self) -> dict[str, Any]:
        """Return what is known of all elements."""
        count = max(1, self.count)
        edges = [*_EDGES, None]
        return {
            "equal": self.unequal == 0,
            "unequal": self.unequal,
            "not_finite": self.not_finite,
            "max_error": self.largest,
            "mean_error": self.total / count,
            "rms_error": (self.squares / count) ** 0.5,
            "max_relative_error": self.relative,
            "ulp": [
                {"from": low, "to": None if high is None else high - 1, "count": int(number)}
                for low, high, number in zip(_EDGES, edges[1:], self.histogram, strict=True)
                if number
            ],
        }


def _verdicts(problem: ConvProblem, totals: _Totals, share: Array, integers: bool) -> dict[str, Any]:
    worst = float(share.max(initial=0.0))
    rounding = "half an ULP" if problem.dtype in _HALF_AN_ULP else "one ULP"
    if integers:
        name, rule, failed = (
            "benchdnn",
            "the inputs are integers and every sum is exact: each element must equal the rounded reference",
            totals.unequal,
        )
    else:
        limit = f"{_RELATIVE[problem.dtype]:g}"
        name = "gtest"
        rule = f"relative error at most {limit}, or absolute where the reference is at most {limit}"
        failed = totals.relative_failed
    return {
        "convgrad": {
            "passed": worst <= 1.0,
            "failed": int((share > 1.0).sum()),
            "rule": f"error at most 8 * 2^-{_sum_digits(problem.dtype)} * sqrt(n) * sum of |a * b| over the n products,"
            f" and {rounding}",
            "max_share": worst,
        },
        "onednn": {"passed": failed == 0, "failed": failed, "test": name, "rule": rule},
    }


def _maps(problem: ConvProblem, share: Array) -> dict[str, Any]:
    """Return the largest shares by the axes of the result: by tap and pairs of channels, or by channel and pixel."""
    found: dict[str, Any] = {}
    for name, axes in _axes_of(problem).items():
        values = _largest_by(share, axes)
        for axis in range(values.ndim):
            values = _joined(values, axis)
        found[name] = {"shape": [share.shape[axis] for axis in axes], "values": values.tolist()}
    return found


def _largest_by(share: Array, axes: tuple[int, ...]) -> Array:
    """Return the largest share at each place of these axes, the longest of them joined already.

    Joining it part by part needs little memory where the places are nearly all elements, as the channels of a 1x1 are.
    """
    longest = max(axes, key=lambda axis: share.shape[axis])
    size, kept = share.shape[longest], sorted(axes)
    count = min(_BINS, size)
    values = np.zeros([count if axis == longest else share.shape[axis] for axis in kept])
    dropped = tuple(axis for axis in range(share.ndim) if axis == longest or axis not in axes)
    for part in range(count):
        some = slice(size * part // count, size * (part + 1) // count)
        largest = share[(slice(None),) * longest + (some,)].max(axis=dropped, initial=0.0)
        values[(slice(None),) * kept.index(longest) + (part,)] = largest
    return np.transpose(values, [kept.index(axis) for axis in axes])


def _axes_of(problem: ConvProblem) -> dict[str, tuple[int, ...]]:
    """Return the axes of each map, by its name."""
    if problem.computes == "diff_bias":
        return {"channel": (0,)}
    if problem.forward:
        channel = 1 if problem.data_format == "NCX" else problem.rank + 1
        pixels = tuple(axis for axis in range(1, problem.rank + 2) if axis != channel)
        return {"image": (0,), "channel": (channel,), **({"pixel": pixels} if pixels else {})}
    x, letters = problem.weights_format.index("X"), problem.weights_format
    places = {"X": tuple(range(x, x + problem.rank))}
    for letter in "IO":
        at = letters.index(letter)
        places[letter] = (at if at < x else at + problem.rank - 1,)
    return {"tap": places["X"], "channels": (*places["O"], *places["I"])}


def _joined(values: Array, axis: int) -> Array:
    """Join the entries of an axis, so that there are few enough to draw: each is the largest of its own."""
    size = values.shape[axis]
    if size <= _BINS:
        return values
    return np.maximum.reduceat(values, [size * part // _BINS for part in range(_BINS)], axis)


def _worst(compared: Compared, share: Array) -> dict[str, Any] | None:
    """Describe the element with the largest error as a share of its bound; None if all are exact."""
    problem = compared.problem
    if share.size == 0:
        return None
    index = tuple(int(at) for at in np.unravel_index(int(share.argmax()), share.shape))
    if share[index] == 0:
        return None
    exact = compared.exact[index]
    rounded = narrow(np.array([exact]), problem.dtype)
    stored = compared.result[index].reshape(1)
    return {
        "index": list(index),
        "got": float(widen(stored, problem.dtype)[0]),
        "expected": float(widen(rounded, problem.dtype)[0]),
        "exact": float(exact),
        "ulp": int(_steps(stored, rounded)[0]),
        "share": float(share[index]),
        **worst_terms(problem, compared.inputs, index),
    }


def _ulp(values: Array, dtype: str) -> Array:
    """Return the distance of the numbers of a dtype around each value."""
    exponent = np.frexp(np.abs(np.where(np.isfinite(values), values, 0.0)))[1] - _DIGITS[dtype]
    step: Array = np.ldexp(1.0, np.clip(exponent, _LEAST[dtype], _LARGEST[dtype] - _DIGITS[dtype]))
    return step


def _sum_digits(dtype: str) -> int:
    """Return the binary digits after the point of the type that sums are accumulated in: f32, and f64 for f64."""
    return 52 if dtype == "f64" else 23


def _steps(stored: Storage, rounded: Storage) -> npt.NDArray[np.uint64]:
    """Count the numbers of the dtype from one value to the other."""
    one, other = _ordinal(stored), _ordinal(rounded)
    # Modulo 2**64: the difference of two f64 of opposite signs is too large for an int64.
    return np.maximum(one, other).view(np.uint64) - np.minimum(one, other).view(np.uint64)


def _ordinal(stored: Storage) -> npt.NDArray[np.int64]:
    """Number the finite values of a dtype in their order, from 0 at zero."""
    sign = 8 * stored.itemsize - 1
    plain = stored.view(f"i{stored.itemsize}").astype(np.int64)
    magnitude = plain & ((1 << sign) - 1)
    return np.where(plain < 0, -magnitude, magnitude)


def _integers(stored: Storage, dtype: str) -> bool:
    flat = stored.reshape(-1)
    for start in range(0, flat.size, _SLICE):
        values = widen(flat[start : start + _SLICE], dtype)
        if not (values == np.rint(values)).all():
            return False
    return True


def _plain(value: Any) -> Any:
    """Replace what JSON can't represent by its name: "inf", "-inf" or "nan"."""
    if isinstance(value, dict):
        return {key: _plain(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_plain(member) for member in value]
    return value if not isinstance(value, float) or isfinite(value) else str(value)
