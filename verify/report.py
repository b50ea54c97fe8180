"""Judge a result, element by element, and describe it as JSON.

`verify.rules` has the rules of our own verdict. oneDNN's tests judge in two other ways. benchdnn fills tensors with
integers so small that every partial sum is exact, and wants the very bits of the rounded reference. Its gtests take any
f32 and allow a relative error of 1e-4, absolute where the reference is no larger; here f16 and bf16 are allowed one
unit of their last digit in the same way. oneDNN Graph has no f64, which is allowed as many units as f32.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.plan import Stop, Storage
from kernels.problem import ConvProblem
from kernels.reference import narrow, widen
from verify.arithmetic import Arithmetic
from verify.compared import Block, Compared
from verify.evaluate import evaluation_work
from verify.hints import hints
from verify.hypotheses import Cause, causes
from verify.layout import channel_axis, pixel_axes, tap_axes, weights_axis
from verify.rules import Shares, Tally, judge
from verify.stopping import until
from verify.suspects import suspected
from verify.terms import worst_terms
from verify.where import where

__all__ = ["as_json", "report_on", "report_work"]

Array = npt.NDArray[np.float64]

_BINS = {1: 64, 2: 64, 3: 16}
"""Most entries of an axis of a map, by the number of its axes: larger ones are joined to this many."""

_ELEMENT, _INPUT = 1 << 12, 1 << 8
"""Multiply-adds that take as long as judging an element, and as looking at a value of an input."""

_EVALUATIONS, _PIECES, _EVALUATED = 50, 128, (1 << 34) + (1 << 33)
"""How often causes and hints compute a part of the result, its most pieces, and the most work that this is."""

_RELATIVE = {"f32": 1e-4, "f16": 2.0**-10, "bf16": 2.0**-7, "f64": 1e-4 * 2.0**-29}
_EDGES = [0, 1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513, 1025, 2049, 4097, 65537]
"""The ULP of the first element of each bucket of the histogram."""


def report_work(problem: ConvProblem) -> int:
    """Return the multiply-adds that take as long as the report on a result, at most."""
    elements, inputs = prod(problem.output_shape), sum(map(prod, problem.input_shapes))
    each = evaluation_work(problem)
    if problem.forward:
        pieces = each * prod(problem.kernel)
    else:
        pieces = min(problem.n, _PIECES) * evaluation_work(replace(problem, n=1))
    return _ELEMENT * elements + _INPUT * inputs + min(_EVALUATED, _EVALUATIONS * each + 2 * pieces)


def as_json(report: dict[str, Any]) -> bytes:
    """Return a report as JSON, in which Inf and NaN are their names."""
    return json.dumps(_plain(report), allow_nan=False, separators=(",", ":")).encode()


@np.errstate(all="ignore")  # in the caller's process a warning would be the caller's
def report_on(
    compared: Compared, stop: Stop, *, whole: Sequence[int] | None = None, first: Sequence[int] | None = None
) -> dict[str, Any]:
    """Judge a result, or a part of a `whole` one that begins at `first`."""
    problem, size = compared.problem, prod(compared.problem.output_shape)
    totals, share = _Totals(problem.dtype), np.zeros(problem.output_shape, np.float32)
    model, tally = judge(compared, share, totals.add, stop)
    failed = bool(tally.exact_failed or tally.failed or not tally.mean_square_passed)
    around = tally.worst[0].index if tally.worst else (0,) * compared.exact.ndim
    found: list[Cause] = []
    if tally.judged:  # where every sum is exact no rounding needs an explanation
        found = causes(
            compared, model, around, tally.distinct, stop, thorough=failed or compared.explain, failed=failed
        )
    failed = failed or bool(found)
    worst = _worst(compared, share, stop)
    wrong = _wrong(share, tally) if failed else None
    described = (
        None if wrong is None else where(problem, wrong, compared.result, compared.exact, whole=whole, first=first)
    )
    guesses: list[str] = []
    if failed and not (found and not tally.failed and not tally.exact_failed):
        guesses = hints(compared, share, tuple(worst["index"]) if worst else around, stop)
        if not guesses and not found and (other := _other(compared, tally, around, stop)) is not None:
            guesses = [f"the errors are as large as those of {other.text}: if the kernel computes so, declare it"]
    stop()
    rules = _rules(problem, tally, found)
    return {
        "dtype": problem.dtype,
        "shape": list(problem.output_shape),
        "elements": size,
        **totals.describe(),
        "rules": rules,
        "verdicts": _verdicts(problem, totals, tally, rules),
        "passed": not failed,
        "causes": [cause.as_data() for cause in found],
        "product_bits": tally.bits,
        "difficulty": tally.witnessed,
        "order": tally.order,
        "errors": None if tally.relative is None else dict(zip(("to_naive", "to_best"), tally.relative, strict=True)),
        "detection": {
            "every_element": tally.visible_everywhere,
            "one_element": tally.visible_in_one,
            "products": int(compared.terms.max(initial=0)),
            "product_bits": tally.visible_bits,
        },
        "where": None if described is None else {"text": described.text, **described.data},
        "maps": _maps(problem, share, stop),
        "worst": worst,
        "hints": guesses,
    }


def _other(compared: Compared, tally: Tally, around: tuple[int, ...], stop: Stop) -> Arithmetic | None:
    return suspected(compared, around, stop, only_algorithms=tally.judged == 0)


def _wrong(share: Shares, tally: Tally) -> npt.NDArray[np.bool_]:
    """Return which elements are wrong: by rules 0 and 2, or if only the mean square is, those that are far off."""
    return share > (1.0 if tally.failed or tally.exact_failed else 0.5)


@dataclass
class _Totals:
    """Sums and extremes of the errors seen so far."""

    dtype: str
    unequal: int = 0
    not_finite: int = 0
    relative_failed: int = 0
    count: int = 0
    largest: float = 0.0
    relative: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    histogram: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(_EDGES), np.int64))

    def add(self, block: Block) -> None:
        """Compare some elements."""
        got, nearest, exact, equal = block.got, block.nearest, block.exact, block.equal
        between = np.isfinite(got) & np.isfinite(nearest)
        error = np.where(np.isfinite(got), block.error, np.inf)
        known = np.isfinite(error)
        self.count += int(known.sum())
        self.unequal += int((~equal).sum())
        self.not_finite += int((~equal & ~between).sum())
        sizes = np.abs(exact)
        if known.any():
            self._measure(error[known], sizes[known])
        limit = _RELATIVE[self.dtype]
        with np.errstate(invalid="ignore", over="ignore"):
            allowed_by_gtest = np.where(sizes <= limit, limit, limit * sizes)
            self.relative_failed += int((~equal & ~(error <= allowed_by_gtest)).sum())
        steps = _steps(block.stored[between], block.rounded[between])
        few = np.bincount(steps[steps < _EDGES[-2]].astype(np.int64), minlength=_EDGES[-2])
        self.histogram[:-2] += np.add.reduceat(few, _EDGES[:-2])
        self.histogram[-2] += int(((steps >= _EDGES[-2]) & (steps < _EDGES[-1])).sum())
        self.histogram[-1] += int((steps >= _EDGES[-1]).sum())

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


def _rules(problem: ConvProblem, tally: Tally, found: Sequence[Cause]) -> list[dict[str, Any]]:
    """Describe each rule, with what it measured and its limit."""
    measured, limit = tally.mean_square
    sums = "f64" if problem.dtype == "f64" else "f32"
    worst = tally.worst_share if tally.judged or tally.failed else 0.0
    return [
        _rule("exact", tally.exact_failed == 0, tally.exact, float(tally.exact_failed), 0.0,
              f"where every partial sum is exact in {sums}, an element has the bits of the rounded reference"),
        _rule("mean_square", tally.mean_square_passed, tally.judged, measured, limit,
              f"in the mean, squared errors are no larger than those of an honest {sums} sum"),
        _rule("largest", tally.failed == 0, tally.judged, worst, 1.0,
              f"no element is off by more than half an ULP and 8 standard deviations of an honest {sums} sum"),
        _rule("hypotheses", not found, tally.judged, found[0].correlation if found else 0.0, None,
              "the errors are not those that narrower inputs or partial sums would make"),
    ]  # fmt: skip


def _rule(name: str, passed: bool, elements: int, measured: float, limit: float | None, text: str) -> dict[str, Any]:
    return {
        "rule": name, "passed": passed, "elements": elements, "measured": measured, "limit": limit, "text": text,
    }  # fmt: skip


def _verdicts(problem: ConvProblem, totals: _Totals, tally: Tally, rules: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if tally.judged == 0:
        name, rule, failed = (
            "benchdnn",
            "every partial sum is exact: each element must equal the rounded reference",
            totals.unequal,
        )
    else:
        limit = f"{_RELATIVE[problem.dtype]:g}"
        name = "gtest"
        rule = f"relative error at most {limit}, or absolute where the reference is at most {limit}"
        failed = totals.relative_failed
    broken = [each for each in rules if not each["passed"]]
    return {
        "convgrad": {
            "passed": not broken,
            "failed": tally.failed + tally.exact_failed,
            "rule": broken[0]["text"] if broken else "all four rules hold",
            "max_share": tally.worst_share,
        },
        "onednn": {"passed": failed == 0, "failed": failed, "test": name, "rule": rule},
    }


def _maps(problem: ConvProblem, share: Shares, stop: Stop) -> dict[str, Any]:
    """Return the largest shares by the axes of the result: by tap and pairs of channels, or by channel and pixel."""
    found: dict[str, Any] = {}
    for name, axes in _axes_of(problem).items():
        values = _largest_by(share, axes, stop)
        for axis in range(values.ndim):
            values = _joined(values, axis, _BINS[len(axes)])
        found[name] = {"shape": [share.shape[axis] for axis in axes], "values": values.tolist()}
    return found


def _largest_by(share: Shares, axes: tuple[int, ...], stop: Stop) -> Array:
    """Return the largest share at each place of these axes, the longest of them joined already.

    Joining it part by part needs little memory where the places are nearly all elements, as the channels of a 1x1 are.
    """
    longest = max(axes, key=lambda axis: share.shape[axis])
    size, kept = share.shape[longest], sorted(axes)
    count = min(_BINS[len(axes)], size)
    values = np.zeros([count if axis == longest else share.shape[axis] for axis in kept])
    dropped = tuple(axis for axis in range(share.ndim) if axis == longest or axis not in axes)
    for part in until(stop, range(count)):
        some = slice(size * part // count, size * (part + 1) // count)
        largest = share[(slice(None),) * longest + (some,)].max(axis=dropped, initial=0.0)
        values[(slice(None),) * kept.index(longest) + (part,)] = largest
    return np.transpose(values, [kept.index(axis) for axis in axes])


def _axes_of(problem: ConvProblem) -> dict[str, tuple[int, ...]]:
    """Return the axes of each map, by its name."""
    if problem.computes == "diff_bias":
        return {"channel": (0,)}
    if problem.forward:
        pixels = tuple(pixel_axes(problem))
        return {"image": (0,), "channel": (channel_axis(problem),), **({"pixel": pixels} if pixels else {})}
    channels = weights_axis(problem, "O"), weights_axis(problem, "I")
    return {"tap": tuple(tap_axes(problem)), "channels": channels}


def _joined(values: Array, axis: int, most: int) -> Array:
    """Join the entries of an axis, so that there are few enough to draw: each is the largest of its own."""
    size = values.shape[axis]
    if size <= most:
        return values
    return np.maximum.reduceat(values, [size * part // most for part in range(most)], axis)


def _worst(compared: Compared, share: Shares, stop: Stop) -> dict[str, Any] | None:
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
        **worst_terms(problem, compared.inputs, index, stop),
    }


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


def _plain(value: Any) -> Any:
    """Replace what JSON can't represent by its name: "inf", "-inf" or "nan"."""
    if isinstance(value, dict):
        return {key: _plain(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_plain(member) for member in value]
    return value if not isinstance(value, float) or isfinite(value) else str(value)
