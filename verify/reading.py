"""The inputs as a kernel reads them that declares to round them, and its result beside what plain sums would be.

A kernel says which numbers its products are formed of, but not how it rounds to them, and it may round one input alone,
or none where another kernel of the same library computes. So some elements of the result are compared with the sums of
inputs that are read in each of these ways; the whole result is judged by the one that fits best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kernels.dtypes import DTYPES
from kernels.plan import Stop, Storage
from kernels.problem import ConvProblem
from kernels.reference import Change, widen
from verify.arithmetic import Arithmetic
from verify.blocks import blocks
from verify.compared import Compared
from verify.evaluate import evaluate, evaluation_work
from verify.layout import channel_axis, weights_axis
from verify.model import ulp
from verify.parts import Part, part_of
from verify.rules import judge
from verify.stopping import until
from verify.sums import sums_of

__all__ = ["Inputs", "choices", "deviations", "read_bytes"]

Ways = tuple[int, ...]
"""For each input the number of its `Arithmetic.readings`, or -1 where it is read as it is."""

_ROUNDED = 2
"""Inputs that are rounded: the factors of the products, not a bias."""

_HEAD = 16
"""Bytes before the inputs: how they are read."""

_ELEMENTS = (256, 64, 16)
"""Elements that tell how inputs are read; fewer of long sums."""

_CHANNELS: Sequence[Literal["I", "O"]] = ("I", "O")
"""The channels of the inputs of a gradient."""

_ALIKE = 1.5
"""How many times as large as the least the typical errors of a way may be that is as likely."""

_WORK = 1 << 28
"""Work of one way to read the inputs, as `evaluation_work` counts it, that is not too much."""


def read_bytes(problem: ConvProblem, arithmetic: Arithmetic) -> int:
    """Return the bytes that the inputs take as they are read; 0 if that is as they are."""
    if not arithmetic.readings:
        return 0
    sizes = [prod(shape) * DTYPES[problem.dtype].size for shape in problem.input_shapes[:_ROUNDED]]
    return _HEAD + sum(map(_padded, sizes))


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def choices(arithmetic: Arithmetic) -> Iterator[Ways]:
    """Yield the ways to read the inputs, the likeliest first: both in one way, one of them, none."""
    ways = range(len(arithmetic.readings))
    yield from ((way, way) for way in ways)
    yield from ((way, -1) for way in ways)
    yield from ((-1, way) for way in ways)
    yield (-1, -1)


def _reading(arithmetic: Arithmetic, ways: Ways) -> Change:
    """Return what rounds the inputs in these ways."""

    def change(values: npt.NDArray[np.float64], place: int) -> npt.NDArray[np.float64]:
        if place >= _ROUNDED or ways[place] < 0:
            return values
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = arithmetic.readings[ways[place]].rounding(values)
        return np.where(np.isfinite(values), rounded, values)

    return change


def deviations(
    problem: ConvProblem, arithmetic: Arithmetic, inputs: Sequence[Storage], exact: npt.NDArray[np.float64], stop: Stop
) -> npt.NDArray[np.float64]:
    """Return how far each sum may be from the exact one because inputs are rounded, in the worst of all ways."""
    found = np.zeros(exact.shape)
    for ways in until(stop, choices(arithmetic) if arithmetic.readings else ()):
        with np.errstate(invalid="ignore", over="ignore"):
            off = np.abs(evaluate(problem, inputs, stop, _reading(arithmetic, ways)) - exact)
        np.maximum(found, np.where(np.isnan(off), np.inf, off), out=found)
    return found


class Inputs:
    """The inputs of a result; `room` has `read_bytes` of memory for them."""

    def __init__(
        self, problem: ConvProblem, arithmetic: Arithmetic, original: Sequence[Storage], room: Storage
    ) -> None:
        self._problem = problem
        self._arithmetic = arithmetic
        self._original = original
        self._ways = room[:_HEAD].view(np.int64)
        self.given = list(original)
        """The inputs as the kernel reads them, once `read` has run."""
        start = _HEAD
        for place, tensor in enumerate(original[:_ROUNDED] if arithmetic.readings else ()):
            self.given[place] = room[start : start + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
            start += _padded(tensor.nbytes)

    def read(self, result: Storage, stop: Stop) -> None:
        """Write the inputs as they are read, in the way that fits the result best."""
        part = self._part(result)
        errors = {ways: self._errors(part, ways, result, stop) for ways in until(stop, choices(self._arithmetic))}
        typical = {ways: float(np.median(error)) for ways, error in errors.items()}
        # Ways that differ in halves alone do so in few elements, which the mean shows: that of typical ways only, since
        # a wrong element may be near to what another way gives.
        least = _ALIKE * min(typical.values())
        chosen = min([ways for ways in errors if typical[ways] <= least], key=lambda ways: float(errors[ways].mean()))
        self._ways[:] = chosen
        for way, tensor, into in zip(chosen, self._original, self.given, strict=False):
            stop()
            if way < 0:
                np.copyto(into, tensor)
            else:
                self._arithmetic.readings[way].read(tensor, self._problem.dtype, into)

    def described(self, report: dict[str, Any], result: Storage, stop: Stop) -> dict[str, Any]:
        """Return a report with the arithmetic that its kernel declares, and what the result is without that."""
        said, usual = self._arithmetic, Arithmetic.usual(self._problem.dtype)
        if said == usual:
            return report
        read = [None if way < 0 else said.readings[way].name for way in self._ways.tolist()] if said.readings else []
        about = {
            "products": said.products, "sum": said.sum, "segments": said.segments,
            "segment_sum": said.segment_sum if said.segments > 1 else None, "algorithm": said.algorithm, "read": read,
        }  # fmt: skip
        verdict = "passed" if report["passed"] else "failed"
        text, plain = f"{verdict} as declared: {said.text}", self._plainly(result, usual, stop)
        if read and not any(read):
            text += "; the inputs were not rounded"
        if plain is not None:
            times = f"its errors are {plain['errors']:.3g} times those of an honest sum"
            text += f"; as plain {usual.sum} it {'passes' if plain['passed'] else 'fails'}, {times}"
        return report | {"arithmetic": {**about, "plain": plain, "text": text}}

    def _center(self, result: Storage) -> tuple[int, ...]:
        """Return the element that is looked around: of channels that are read in different ways, if any are."""
        found, problem, readings = [size // 2 for size in result.shape], self._problem, self._arithmetic.readings
        if len(readings) < _ROUNDED or problem.computes != "diff_weights" or problem.groups > 1:
            return tuple(found)
        axis = channel_axis(problem)
        for tensor, letter in zip(self._original, _CHANNELS, strict=False):
            for part in blocks(tensor.shape):
                values = widen(tensor[part], problem.dtype)
                halves = (readings[0].rounding(values) != readings[1].rounding(values)) & np.isfinite(values)
                if halves.any():
                    channel = int(np.argwhere(halves)[0][axis])
                    found[weights_axis(problem, letter)] = channel + (part[axis].start or 0)
                    break
        return tuple(found)

    def _part(self, result: Storage) -> Part:
        around = self._center(result)
        for elements in _ELEMENTS:
            part = part_of(self._problem, self._original, around, elements)
            if evaluation_work(part.problem) <= _WORK:
                break
        return part

    def _errors(self, part: Part, ways: Ways, result: Storage, stop: Stop) -> npt.NDArray[np.float64]:
        """Return the squared errors of some elements, in units of their last place; a zero if none is known."""

        exact = evaluate(part.problem, part.inputs, stop, _reading(self._arithmetic, ways))
        got = widen(result[part.place], part.problem.dtype)
        known = np.isfinite(exact) & np.isfinite(got)
        exact, error = exact[known], got[known] - exact[known]
        with np.errstate(all="ignore"):
            if self._arithmetic.truncates:  # which makes all sums smaller, as other inputs would
                error -= exact * np.nan_to_num((error @ exact) / (exact @ exact))
            error = np.square(error / ulp(exact, part.problem.dtype))
        return error if error.size else np.zeros(1)

    def _plainly(self, result: Storage, usual: Arithmetic, stop: Stop) -> dict[str, Any] | None:
        """Return whether some elements pass as results of plain sums, and their errors; None where that is unknown."""
        part = self._part(result)
        if self._problem.dtype == "f64" or not prod(part.problem.output_shape):
            return None
        sums, some = sums_of(part.problem, part.inputs, stop), np.ascontiguousarray(result[part.place])
        compared = Compared(part.problem, part.inputs, some, sums.high, None, sums.spread, arithmetic=usual)
        _, tally = judge(compared, np.zeros(some.shape, np.float32), lambda _: None, stop, closely=False)
        if tally.relative is None:
            return None
        passed = not (tally.failed or tally.exact_failed) and tally.mean_square_passed
        return {"passed": passed, "errors": tally.relative[0]}
