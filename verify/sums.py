"""What a result should be: the exact sums, and the spread of the products of each.

f32, f16 and bf16 are summed in float64, whose errors are 2^29 times smaller than theirs. Sums in f64 are formed without
an error: each input is cut into slices of so few bits that sums of their products are integers that float64 holds, and
the sums of all pairs of slices are added as pairs of float64 (the scheme of Ozaki, Ogita, Oishi and Rump, 2012).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, frexp, log2

import numpy as np
import numpy.typing as npt

from kernels.plan import Stop, Storage, Unit
from kernels.problem import ConvProblem
from kernels.reference import REFERENCE
from verify.evaluate import evaluate, gradients

__all__ = ["Sums", "sums_of", "two_sum", "unit_sums"]

Array = npt.NDArray[np.float64]

_DEEPEST = 500
"""Bits below the largest value of a tensor that slices reach: products of two stay above the smallest number."""

_NEGLIGIBLE = 2.0**-66
"""Share of a sum's spread that may be missing: what is left out is 2^-13 of the last digit of an f64."""


@dataclass(frozen=True)
class Sums:
    """Exact sums, as `high` + `low` where the dtype is f64, and the root of the sum of the squared products."""

    high: Array
    low: Array | None
    spread: Array


def unit_sums(problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], stop: Stop) -> Sums | None:
    """Return the sums of one unit of the reference kernel; None when `stop` said so."""
    if problem.dtype == "f64":
        return _f64_sums(problem, unit, inputs, stop)
    high = REFERENCE.values(problem, unit, inputs, stop)
    squares = None if high is None else REFERENCE.values(problem, unit, inputs, stop, change=_square)
    if high is None or squares is None:
        return None
    return Sums(high, None, np.sqrt(squares, out=squares))


def sums_of(problem: ConvProblem, inputs: Sequence[Storage], stop: Stop) -> Sums | None:
    """Return the sums of a whole problem that is not f64; None when `stop` said so."""
    changes = (None, _square)
    if problem.computes == "diff_weights":
        found = gradients(problem, inputs, stop, changes)
    else:
        each = [evaluate(problem, inputs, stop, change) for change in changes]
        found = [values for values in each if values is not None]
    return None if found is None or len(found) < len(changes) else Sums(found[0], None, np.sqrt(found[1]))


def _square(values: Array, place: int) -> Array:  # noqa: ARG001
    """Square the values of an input; a `Change` of the reference kernel."""
    with np.errstate(over="ignore"):
        return np.square(values, out=values)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return a + b rounded, and the rounding error (Knuth)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def _f64_sums(problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], stop: Stop) -> Sums | None:
    """Return the sums of a unit in f64, without rounding errors of their own."""
    scales = [_exponent(tensor) for tensor in inputs]
    if problem.op == "BiasAdd":  # two terms, on one scale
        scales = [max(scales)] * 2
    bias = problem.bias and problem.op != "BiasAdd"
    products = replace(problem, bias=False) if bias else problem
    tensors = inputs[:-1] if bias else inputs
    scale = max(scales) if len(tensors) == 1 or problem.op == "BiasAdd" else sum(scales[: len(tensors)])

    def scaled(values: Array, place: int) -> Array:
        return np.ldexp(values, -scales[place])

    def squared(values: Array, place: int) -> Array:
        return _square(scaled(values, place), place)

    squares = REFERENCE.values(products, unit, tensors, stop, change=squared)
    if squares is None:
        return None
    spread = np.sqrt(squares, out=squares)
    summed = _sliced(products, unit, tensors, scales, spread, stop)
    if summed is None:
        return None
    high, low = summed
    with np.errstate(all="ignore"):
        high, low, spread = (np.ldexp(each, scale) for each in (high, low, spread))
        if not all(np.isfinite(tensor).all() for tensor in tensors):
            marks = REFERENCE.values(products, unit, tensors, stop, change=_marks)
            if marks is None:
                return None
            high = np.where(np.isfinite(marks), high, marks)
        if bias:
            more = inputs[-1].reshape((1, -1, *(1,) * problem.rank) if problem.data_format == "NCX" else (-1,))
            high, error = two_sum(high, np.broadcast_to(more, high.shape))
            low, spread = low + error, np.hypot(spread, more)
        total = np.where(np.isfinite(high), high + low, high)
        low = np.where(np.isfinite(total), low - (total - high), 0.0)
    return Sums(total, low, spread)


def _sliced(
    problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], scales: Sequence[int], spread: Array, stop: Stop
) -> tuple[Array, Array] | None:
    """Return the sums of a unit of scaled inputs as pairs of float64."""
    alone = len(inputs) == 1 or problem.op == "BiasAdd"  # sums of values, not of products
    most = max(1.0, float(REFERENCE.terms(problem).max(initial=1.0)))
    width = int((53 - ceil(log2(most))) if alone else (53 - ceil(log2(most))) // 2)
    above = spread[spread > 0]
    enough = _NEGLIGIBLE * (float(above.min()) if above.size else 1.0)
    depth = _DEEPEST // width
    high, low = np.zeros_like(spread), np.zeros_like(spread)
    for order in range(depth if alone else 2 * depth - 1):
        # what all further slices can add, relative to the largest value of 1
        if most * 2.0 ** (-order * width) * (order + 2) < enough:
            break
        pairs = [(order, order)] if alone else [(i, order - i) for i in range(order + 1) if max(i, order - i) < depth]
        for pair in pairs:
            part = REFERENCE.values(problem, unit, inputs, stop, change=_Slice(scales, width, pair))
            if part is None:
                return None
            high, error = two_sum(high, part)
            low += error
    return high, low


@dataclass(frozen=True)
class _Slice:
    """A `Change` that leaves `width` bits of each value, of each input those of the slice at its place in `pair`."""

    scales: Sequence[int]
    width: int
    pair: tuple[int, int]

    def __call__(self, values: Array, place: int) -> Array:
        index = self.pair[place]
        scaled = np.ldexp(np.where(np.isfinite(values), values, 0.0), -self.scales[place])
        return _down_to(scaled, (index + 1) * self.width) - (_down_to(scaled, index * self.width) if index else 0.0)


def _down_to(values: Array, bits: int) -> Array:
    """Round values below 1 to multiples of 2^-bits."""
    return np.ldexp(np.rint(np.ldexp(values, bits)), -bits)


def _marks(values: Array, place: int) -> Array:  # noqa: ARG001
    """Leave Inf and NaN, and of other values their sign: their sums are where they belong, and do not overflow."""
    return np.where(np.isfinite(values), np.sign(values), values)


def _exponent(tensor: Storage) -> int:
    """Return the exponent of the first power of two above all finite values."""
    flat, largest = tensor.reshape(-1), 0.0
    for start in range(0, flat.size, 1 << 20):
        part = np.abs(flat[start : start + (1 << 20)])
        largest = max(largest, float(part[np.isfinite(part)].max(initial=0.0)))
    return frexp(largest)[1]
