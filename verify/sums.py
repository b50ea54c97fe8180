"""What a result should be: the exact sums, and the spread of the products of each.

f32, f16 and bf16 are summed in float64, whose errors are 2^29 times smaller than theirs; f64 as several float64 a sum,
whose errors are 2^40 times smaller (`kernels.emit.doubles`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import frexp

import numpy as np
import numpy.typing as npt

from kernels.plan import Stop, Storage, Unit
from kernels.problem import ConvProblem
from kernels.reference import REFERENCE
from verify.evaluate import evaluate, gradients
from verify.layout import along_channels

__all__ = ["Sums", "sums_of", "unit_sums"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sums:
    """Exact sums, as `high` + `low` where the dtype is f64, and the root of the sum of the squared products."""

    high: Array
    low: Array | None
    spread: Array


def unit_sums(problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], stop: Stop) -> Sums:
    """Return the sums of one unit of the reference kernel."""
    if problem.dtype == "f64":
        return _f64_sums(problem, unit, inputs, stop)
    high = REFERENCE.values(problem, unit, inputs, stop)
    squares = REFERENCE.values(problem, unit, inputs, stop, change=_square)
    assert high is not None
    assert squares is not None
    return Sums(high, None, np.sqrt(squares, out=squares))


def sums_of(problem: ConvProblem, inputs: Sequence[Storage], stop: Stop) -> Sums:
    """Return the sums of a whole problem that is not f64."""
    changes = (None, _square)
    if problem.computes == "diff_weights":
        high, squares = gradients(problem, inputs, stop, changes)
    else:
        high, squares = (evaluate(problem, inputs, stop, change) for change in changes)
    return Sums(high, None, np.sqrt(squares))


def _square(values: Array, place: int) -> Array:  # noqa: ARG001
    """Square the values of an input; a `Change` of the reference kernel."""
    with np.errstate(over="ignore"):
        return np.square(values, out=values)


def _f64_sums(problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], stop: Stop) -> Sums:
    """Return the sums of a unit in f64, and their spread, scaled so that no square is too large."""
    scales = [_exponent(tensor) for tensor in inputs]
    if problem.op == "BiasAdd":  # two terms, on one scale
        scales = [max(scales)] * 2
    bias = problem.bias and problem.op != "BiasAdd"
    products = replace(problem, bias=False) if bias else problem
    tensors = inputs[:-1] if bias else inputs
    scale = max(scales) if len(tensors) == 1 or problem.op == "BiasAdd" else sum(scales[: len(tensors)])

    def squared(values: Array, place: int) -> Array:
        return _square(np.ldexp(values, -scales[place]), place)

    exact = REFERENCE.exact(problem, unit, inputs, stop)
    squares = REFERENCE.values(products, unit, tensors, stop, change=squared)
    assert exact is not None
    assert squares is not None
    with np.errstate(all="ignore"):
        spread = np.ldexp(np.sqrt(squares, out=squares), scale)
        if bias:
            spread = np.hypot(spread, along_channels(problem, inputs[-1]))
    return Sums(*exact, spread)


def _exponent(tensor: Storage) -> int:
    """Return the exponent of the first power of two above all finite values."""
    flat, largest = tensor.reshape(-1), 0.0
    for start in range(0, flat.size, 1 << 20):
        part = np.abs(flat[start : start + (1 << 20)])
        largest = max(largest, float(part[np.isfinite(part)].max(initial=0.0)))
    return frexp(largest)[1]
