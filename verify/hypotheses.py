"""What the errors of a result are made of: compare them with the errors that known losses of precision predict.

For each hypothesis the error p that it predicts is computed: the sums of what rounding takes from one input, times the
other input. It is correlated with the errors e, both in units of the errors that are expected and without their
part along the sums themselves, since what naive sums of equal numbers lose is a share of the sum. For honest results
e is independent of p, and the correlation of N independent elements is below 8 / sqrt(N). Where it is more, and e is
p times about 1, the hypothesis is true, also where the errors are hidden among those of an honest sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.dtypes import DTYPES
from kernels.plan import Stop, Storage
from kernels.problem import ConvProblem
from kernels.reference import narrow, widen
from verify.arithmetic import Arithmetic, Rounding, round_bits, truncate_bits
from verify.blocks import blocks
from verify.compared import Compared
from verify.evaluate import evaluate, evaluation_work
from verify.layout import is_bias
from verify.model import Model, ulp
from verify.parts import Part, only_tap, part_of

__all__ = ["Cause", "causes"]

Array = npt.NDArray[np.float64]
_SIGNIFICANT, _LIKELY = 8.0, 3.0
_SIZES = (0.5, 1.5)
_ELEMENTS = {False: (256, 144), True: (4096, 1024, 256, 144)}
"""Elements whose errors are explained, at first glance and in earnest; fewer of long sums."""

_FIRST = 5
"""Most hypotheses of a first glance."""

_ROUNDINGS = {"f32": 7, "f64": 3, "f16": 2, "bf16": 1}
"""Most hypotheses about the inputs."""

_SHARE = 8
"""A first glance computes at most this part of the reference's products."""

_FREE = 1 << 30
"""Work, as `evaluation_work` counts it, that takes half a second or so."""

_MOST, _OF_FAILED = 1 << 33, 160
"""Most work of all hypotheses, a few seconds; of a result that fails anyway for each of its products."""


_SPLIT = "two bf16 each, with 16 bits"
"""A hypothesis that is no fault of kernels that declare to split their inputs."""

_PIECES = 128
_PIECE_ELEMENTS = 1 << 23
"""Partial sums are looked at where they are no more than this."""


@dataclass(frozen=True)
class Cause:
    """A hypothesis that is true of a result: errors correlate with those that it predicts, and are `size` of them."""

    name: str
    correlation: float
    size: float
    significance: float

    @property
    def text(self) -> str:
        """The cause in words."""
        return f"{self.name} (correlation {self.correlation:.3f}, size {self.size:.2f})"

    def as_data(self) -> dict[str, Any]:
        """Return the cause as JSON."""
        return {"text": self.text, "cause": self.name, "correlation": self.correlation, "size": self.size}


def causes(
    compared: Compared, model: Model, around: tuple[int, ...], distinct: float, stop: Stop, *, thorough: bool,
    failed: bool = False,
) -> list[Cause]:  # fmt: skip
    """Return the losses of precision that the errors show, the likeliest first.

    Looks at some channels and images of the result, one of its elements at `around`; `thorough` looks at more of them,
    and at partial sums too.
    """
    problem = compared.problem
    most = min(_MOST, max(_FREE, problem.macs * _OF_FAILED if failed else problem.macs // _SHARE))
    if thorough and (compared.explain or not failed):
        most = _MOST
    if compared.exact.size == 0 or problem.macs == 0:
        return []
    times = 2 * _ROUNDINGS[problem.dtype] if thorough else _FIRST
    parts = [part_of(problem, compared.inputs, around, elements) for elements in _ELEMENTS[thorough]]
    parts = [part for part in parts if evaluation_work(part.problem) * times <= most]
    # the whole error of a failed result has a cause, which few elements tell if it is one of these
    for part in reversed(parts) if failed else parts[:1]:
        sums = _Errors.of(compared, model, part, distinct)
        if sums is None:
            return []
        roundings = [
            each for each in _roundings(problem, part.inputs) if not model.arithmetic.noise or each[0] != _SPLIT
        ]
        if not thorough:
            noticed = _notice(sums, roundings, stop)
            return causes(compared, model, around, distinct, stop, thorough=True) if noticed else []
        found = _likely(sums, roundings, stop, partial=_partial_work(part.problem) <= most)
        significant = [cause for cause in found if cause.significance >= _SIGNIFICANT]
        if significant or not found:
            return sorted(significant, key=lambda cause: -round(cause.correlation, 2))[:3]  # of what is alike the first
    return []


def _likely(sums: _Errors, roundings: Sequence[tuple[str, Rounding]], stop: Stop, *, partial: bool) -> list[Cause]:
    """Return the causes that may be significant if more elements are looked at."""
    found, part = sums.cut(), sums.part
    for name, rounding in roundings:
        found += _of_inputs(sums, name, _predicted(part, rounding, stop), part.problem)
    for name, values in _partial(part, stop) if partial else ():
        cause = sums.explained(name, _less(values, sums.exact))
        found += [] if cause is None else [cause]
    return found


def _notice(sums: _Errors, roundings: Sequence[tuple[str, Rounding]], stop: Stop) -> bool:
    """Whether the first hypotheses, each about all inputs, explain anything."""
    noticed = any(cause.significance >= _SIGNIFICANT for cause in sums.cut())
    for name, rounding in roundings[:_FIRST]:

        def change(values: Array, place: int, rounding: Rounding = rounding) -> Array:  # noqa: ARG001
            with np.errstate(over="ignore", invalid="ignore"):
                return rounding(values)

        values = evaluate(sums.part.problem, sums.part.inputs, stop, change)
        cause = sums.explained(name, _less(values, sums.exact))
        noticed |= cause is not None and cause.significance >= _SIGNIFICANT
    return noticed


@dataclass(frozen=True)
class _Errors:
    """Errors of the elements of a part, in units of what is expected, and the exact sums."""

    part: Part
    errors: Array
    exact: Array
    weight: Array
    known: npt.NDArray[np.bool_]
    independent: float
    arithmetic: Arithmetic

    @classmethod
    def of(cls, compared: Compared, model: Model, part: Part, distinct: float) -> _Errors | None:
        """Return the errors of a part; None if too few are known."""
        dtype, at = compared.problem.dtype, part.place
        exact, got = compared.exact[at], widen(compared.result[at], dtype)
        low = 0.0 if compared.low is None else compared.low[at]
        terms = np.broadcast_to(compared.terms, compared.exact.shape)[at]
        with np.errstate(all="ignore"):
            error = (got - exact) - low
            growth = np.broadcast_to(model.growth, compared.exact.shape)[at]
            exact_of, spread_of = (each[at] for each in compared.sources)
            summing = model.summing(exact_of, spread_of, terms, growth)
            sigma = np.hypot(summing, ulp(exact, dtype) / sqrt(12))
        known = np.isfinite(error) & (compared.spread[at] > 0)
        if known.sum() < 4:
            return None
        weight = 1 / np.maximum(sigma[known], 2.0**-1022)
        shown = np.unique(np.abs(exact[known])).size
        return cls(part, error[known] * weight, exact, weight, known, min(float(shown), distinct), model.arithmetic)

    def cut(self) -> list[Cause]:
        """Return the cause that the exact sums were rounded toward zero, unless sums are declared to be cut.

        It must also be true of those that are nearer to the larger number, and of all of their errors: nearly equal
        sums are all rounded to one number.
        """
        name, step = "the results were rounded toward zero", ulp(self.exact, self.part.problem.dtype)
        with np.errstate(invalid="ignore"):
            steps = self.exact / step
            lost = (np.trunc(steps) - steps) * step
            telling = np.where(np.trunc(steps) == np.rint(steps), 0.0, lost)
        if self.arithmetic.truncates or self.explained(name, telling, along=True) is None:
            return []
        cause = self.explained(name, lost)
        return [] if cause is None else [cause]

    def explained(self, name: str, predicted: Array, *, along: bool = False) -> Cause | None:
        """Return the cause if the errors may be those that it predicts of the part, with those `along` the sums."""
        with np.errstate(all="ignore"):
            predicted = predicted[self.known] * self.weight
            sums = self.exact[self.known] * (0.0 if along else self.weight)
            sums /= np.linalg.norm(sums) or 1.0
            rest, errors = (each - (each @ sums) * sums for each in (predicted, self.errors))
            norms = float(np.linalg.norm(rest)), float(np.linalg.norm(errors))
            if not all(0 < norm < np.inf for norm in norms):
                return None
            product = float(rest @ errors)
        correlation, size = product / (norms[0] * norms[1]), product / norms[0] ** 2
        significance = correlation * sqrt(max(0.0, self.independent - 2))
        if significance < _LIKELY or not _SIZES[0] <= size <= _SIZES[1]:
            return None
        return Cause(name, correlation, size, significance)


def _of_inputs(sums: _Errors, name: str, predicted: Sequence[Array], problem: ConvProblem) -> list[Cause]:
    """Return the cause that an input, or both, were rounded, whichever explains more."""
    if len(predicted) == 1:
        found = [sums.explained(f"the input was read as {name}", predicted[0])]
    else:
        first, second = _INPUTS[problem.computes]
        with np.errstate(invalid="ignore", over="ignore"):
            both = predicted[0] + predicted[1]
        found = [
            sums.explained(f"the inputs were read as {name}", both),
            sums.explained(f"the first input, {first}, was read as {name}", predicted[0]),
            sums.explained(f"the second input, {second}, was read as {name}", predicted[1]),
        ]
    return sorted([cause for cause in found if cause is not None], key=lambda cause: -round(cause.correlation, 2))[:1]


_INPUTS = {"diff_weights": ("src", "diff_dst"), "dst": ("the data", "the weights"), "diff_bias": ("diff_dst", "")}


def _less(values: Array, exact: Array) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(values - exact)


def _predicted(part: Part, rounding: Rounding, stop: Stop) -> list[Array]:
    """Return what a part loses if each input is rounded alone; both together lose the sum of the two."""
    found = []
    for rounded in range(1 if is_bias(part.problem) else 2):

        def change(values: Array, place: int, rounded: int = rounded) -> Array:
            if place == rounded or part.problem.op == "BiasAdd":
                with np.errstate(over="ignore", invalid="ignore"):
                    return np.where(np.isfinite(values), rounding(values) - values, 0.0)
            return values if place < 2 else np.zeros_like(values)  # a bias is not rounded

        found.append(evaluate(part.problem, part.inputs, stop, change))
    return found


def _roundings(problem: ConvProblem, inputs: Sequence[Storage]) -> Iterator[tuple[str, Rounding]]:
    """Yield what inputs of a dtype may have been rounded to."""
    if problem.dtype == "f64":
        yield "f32", lambda values: values.astype(np.float32).astype(np.float64)
        yield "TF32", lambda values: round_bits(values, 11)
    elif problem.dtype == "f32":
        yield "TF32", lambda values: round_bits(values, 11)
        yield "TF32, truncated", lambda values: truncate_bits(values, 11)
        yield "bf16", lambda values: round_bits(values, 8)
        yield "bf16, truncated", lambda values: truncate_bits(values, 8)
        yield _SPLIT, lambda values: round_bits(values, 16)
        yield "f16", lambda values: widen(narrow(values, "f16"), "f16")
    elif problem.dtype == "f16":
        yield "bf16", lambda values: round_bits(values, 8)
    least = 2.0 ** DTYPES[problem.dtype].least
    if any(_has_subnormals(tensor, problem.dtype, least) for tensor in inputs):
        yield "numbers whose subnormals are zero", lambda values: np.where(np.abs(values) < least, 0.0, values)


def _has_subnormals(tensor: Storage, dtype: str, least: float) -> bool:
    for part in blocks(tensor.shape):
        magnitudes = np.abs(widen(tensor[part], dtype))
        if ((magnitudes > 0) & (magnitudes < least)).any():
            return True
    return False


def _partial(part: Part, stop: Stop) -> list[tuple[str, Array]]:
    """Return the results of a part whose partial sums, of an image or a tap each, are kept in a narrow dtype."""
    problem = part.problem
    found: list[tuple[str, Array]] = []
    if problem.op == "BiasAdd":
        return []
    pieces = _by_image(part, stop) if not problem.forward else _by_tap(part, stop)
    what = "the images'" if not problem.forward else "the taps'"
    for kind in ("bf16", "f16") if len(pieces) > 1 else ():
        if DTYPES[kind].digits > DTYPES[problem.dtype].digits:
            continue
        total = np.zeros_like(pieces[0])
        for piece in pieces:
            total = widen(narrow(total + piece, kind), kind)
        found.append((f"{what} sums were added in {kind}, one after the other", total))
        apart = sum(widen(narrow(piece, kind), kind) for piece in pieces)
        found.append((f"{what} sums were rounded to {kind} before they were added", np.asarray(apart)))
    return found


def _partial_work(problem: ConvProblem) -> int:
    """Return the work of computing each image, or each tap, alone."""
    if problem.forward:
        return prod(problem.kernel) * evaluation_work(problem)
    return problem.n * evaluation_work(replace(problem, n=1))


def _by_image(part: Part, stop: Stop) -> list[Array]:
    if part.problem.n > _PIECES:
        return []
    single = replace(part.problem, n=1)
    images = [tuple(tensor[at : at + 1] for tensor in part.inputs) for at in range(part.problem.n)]
    return [evaluate(single, each, stop) for each in images]


def _by_tap(part: Part, stop: Stop) -> list[Array]:
    """Return what each tap adds to the result of a forward operation."""
    problem = replace(part.problem, bias=False)
    count = prod(problem.kernel)
    if count > _PIECES or count * prod(problem.output_shape) > _PIECE_ELEMENTS:
        return []
    src, weights = part.inputs[:2]
    return [evaluate(problem, (src, only_tap(problem, weights, tap)), stop) for tap in np.ndindex(*problem.kernel)]
