"""Where a result is wrong: the smallest set of channels, taps, images and pixels that holds the wrong elements.

And what these have in common: zero, NaN, one value, cleared bits, a multiple of what is right, or the value of another
element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.dtypes import DTYPES
from kernels.plan import Storage
from kernels.problem import ConvProblem
from kernels.reference import narrow, widen
from verify.blocks import blocks
from verify.layout import in_data_order, in_weights_order
from verify.model import ulp

__all__ = ["Where", "axis_names", "where"]

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_LISTED = 6
"""Most places of an axis that are listed one by one."""

_MOST = 0.98
"""Share of wrong elements that must agree in something for it to be said of all."""

_LOOKED_AT, _BLOCKS = 1 << 13, 1 << 8
"""Wrong elements whose values are compared, and the blocks of the result that they are taken from."""

_FACTORS = {2.0: "twice what is right", 0.5: "half of what is right", -1.0: "of the wrong sign"}
_SPATIAL = {1: ("x",), 2: ("y", "x"), 3: ("z", "y", "x")}


@dataclass(frozen=True)
class Where:
    """The wrong elements of a result in words, and as data."""

    text: str
    data: dict[str, Any]


def axis_names(problem: ConvProblem) -> list[str]:
    """Return the names of the axes of a result."""
    if problem.computes == "diff_bias":
        return ["channel"]
    pixels = [f"pixel {axis}" for axis in _SPATIAL.get(problem.rank, map(str, range(problem.rank)))]
    if problem.forward:
        return list(in_data_order(problem, "image", "channel", pixels))
    taps = [f"tap {axis}" for axis in _SPATIAL[problem.rank]]
    return list(in_weights_order(problem, "src channel", "dst channel", taps))


def where(
    problem: ConvProblem, wrong: npt.NDArray[np.bool_], result: Storage, exact: Array, *,
    whole: Sequence[int] | None = None, first: Sequence[int] | None = None,
) -> Where | None:  # fmt: skip
    """Describe the wrong elements; None if there are none.

    All arrays have one shape, that of the result, or of a part of the `whole` one, whose index `first` it begins at.
    """
    count = int(wrong.sum())
    if count == 0:
        return None
    axes = []
    for axis, name in enumerate(axis_names(problem)):
        others = tuple(other for other in range(wrong.ndim) if other != axis)
        places = np.flatnonzero(wrong.any(others)) + (0 if first is None else first[axis])
        size = wrong.shape[axis] if whole is None else whole[axis]
        if len(places) < size:
            axes.append({"axis": name, "size": size, **_set(places, size)})
    held = {entry["axis"]: entry["count"] for entry in axes}
    names = axis_names(problem)
    volume = prod(held.get(name, size) for name, size in zip(names, wrong.shape, strict=True))
    alike = _alike(problem, wrong, result, exact)
    data = {
        "wrong": count, "elements": wrong.size, "axes": axes, "box": volume, "share_of_box": count / volume,
        "alike": alike,
    }  # fmt: skip
    return Where(_text(count, wrong.size, axes, volume, alike), data)


def _text(count: int, size: int, axes: Sequence[dict[str, Any]], volume: int, alike: str | None) -> str:
    subject = f"the one wrong element has {_conditions(axes)}" if count == 1 else f"all {count} wrong elements"
    if count == size:
        subject = "every element is wrong" if size > 1 else "the one element is wrong"
    elif count > 1:
        subject += f" have {_conditions(axes)}" if axes else f" are spread over the result, {count / size:.1%} of it"
        if axes and count < volume:
            subject += f" ({count / volume:.0%} of the elements there)"
    if alike is None:
        return subject
    joint = ", and " if count < size else ": "
    return f"{subject}{joint}{'it is' if count == 1 else 'they are'} {alike}"


def _conditions(axes: Sequence[dict[str, Any]]) -> str:
    words = [f"{entry['axis']} {entry['text']}" for entry in axes]
    return " and ".join(words) if len(words) < 3 else ", ".join(words[:-1]) + " and " + words[-1]


def _set(places: Ints, size: int) -> dict[str, Any]:
    """Describe some places of an axis."""
    low, high, count = int(places[0]), int(places[-1]), len(places)
    data: dict[str, Any] = {"first": low, "last": high, "step": None, "count": count}
    if count == 1:
        return {**data, "step": 1, "text": f"= {low}"}
    steps = np.unique(np.diff(places))
    if len(steps) == 1:
        step = int(steps[0])
        data["step"] = step
        if step > 1:
            ends = low < step and high + step >= size
            text = f"= {low % step} modulo {step}" + ("" if ends else f" from {low} to {high}")
            return {**data, "text": text if count > 2 else f"in {{{low}, {high}}}"}
        if high == size - 1:
            return {**data, "text": f">= {low}"}
        return {**data, "text": f"<= {high}" if low == 0 else f"from {low} to {high}"}
    period = _period(places, size)
    if period is not None:
        return {**data, "text": f"modulo {period[0]} {period[1]}"}
    listed = ", ".join(map(str, places[:_LISTED].tolist()))
    return {**data, "text": f"in {{{listed}{', ..' if count > _LISTED else ''}}}"}


def _period(places: Ints, size: int) -> tuple[int, str] | None:
    """Return a period in which the places are one run, with the run in words, as in an unwritten tail of each tile."""
    inside = np.zeros(size, bool)
    inside[places] = True
    for period in (4, 8, 16, 32, 64):
        rest = np.unique(places % period)
        if 2 * period > size or len(rest) == period:
            continue
        if rest[-1] - rest[0] == len(rest) - 1 and (inside == np.isin(np.arange(size) % period, rest)).all():
            return period, f"= {rest[0]}" if len(rest) == 1 else f"from {rest[0]} to {rest[-1]}"
    return None


def _some(wrong: npt.NDArray[np.bool_]) -> Ints:
    """Return the indexes of wrong elements, as many from each of some blocks."""
    parts = [part for part in blocks(wrong.shape) if wrong[part].any()]
    parts = parts[:: ceil(len(parts) / _BLOCKS)]
    most = _LOOKED_AT // len(parts) + 1
    return np.concatenate([np.argwhere(wrong[part])[:most] + [each.start for each in part] for part in parts])


def _alike(problem: ConvProblem, wrong: npt.NDArray[np.bool_], result: Storage, exact: Array) -> str | None:
    """Return what nearly all wrong elements have in common."""
    places = _some(wrong)
    index = tuple(places.T)
    values, right = widen(result[index], problem.dtype), exact[index]
    with np.errstate(all="ignore"):
        for common, words in _kinds(values, right, problem.dtype):
            if common.mean() >= _MOST:
                return words
        size = np.maximum(np.abs(right), 1e-3 * np.sqrt(np.mean(np.square(right))))
        for factor, words in _FACTORS.items():
            if (np.abs(values - factor * right) <= 2.0**-7 * size).mean() >= _MOST and len(values) > 1:
                return words
        return _of_another(places, values, exact, axis_names(problem))


def _kinds(values: Array, right: Array, dtype: str) -> Iterator[tuple[npt.NDArray[np.bool_], str]]:
    """Yield which values are special, such as NaN, and what to say of them; the most specific first."""
    rounded, zero = widen(narrow(right, dtype), dtype), values == 0
    finite, signs = np.isfinite(values), np.signbit(values) != np.signbit(rounded)
    yield np.isnan(values) & ~np.isnan(rounded), "NaN"
    yield np.isinf(values) & ~np.isinf(rounded), "Inf"
    yield zero & np.isnan(rounded), "0 where NaN is right"
    yield finite & np.isnan(rounded), "finite where NaN is right"
    yield finite & np.isinf(rounded), "finite where Inf is right"
    yield zero & (rounded == 0) & signs, "0 of the wrong sign"
    yield zero & (right != 0) & (np.abs(right) < 2.0 ** DTYPES[dtype].least), "0 where subnormal numbers are right"
    yield (values == values[0]) & (len(values) > 1), f"{values[0]:.6g}"
    yield zero, "0"
    if len(values) > 1:
        for bits, words in ((1, "the last bit, which is 0"), (2, "the last two bits, which are 0")):
            step = ulp(rounded, dtype) * 2**bits
            yield (np.trunc(rounded / step) * step == values) & (values != 0), f"right but for {words}"


def _of_another(places: Ints, values: Array, exact: Array, names: Sequence[str]) -> str | None:
    """Return from which other element along an axis nearly all values come, if from one at a fixed distance."""
    if len(values) < 4:
        return None
    scale = 1e-3 * np.sqrt(np.mean(np.square(values[np.isfinite(values)]))) if np.isfinite(values).any() else 0.0
    for axis, name in enumerate(names):
        for distance in (1, -1, 2, -2, 4, -4, 8, -8, 16, -16, 32, -32, 64, -64):
            moved = places[:, axis] + distance
            inside = (moved >= 0) & (moved < exact.shape[axis])
            if inside.sum() < max(4, 0.5 * len(values)):
                continue
            at = places[inside].copy()
            at[:, axis] = moved[inside]
            other = exact[tuple(at.T)]
            near = np.abs(values[inside] - other) <= 2.0**-7 * np.abs(other) + scale
            if near.mean() >= _MOST and np.unique(other).size > 2:
                return f"what is right at {name} {'+' if distance > 0 else '-'} {abs(distance)}"
    return None
