"""How the reference cuts a problem into units."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.cache import cached
from kernels.emit.doubles import LANES
from kernels.plan import Unit
from kernels.problem import ConvProblem, Span

__all__ = ["Part", "arrange", "units_of"]

Array = npt.NDArray[np.float64]

_PIXELS = 1 << 9
"""Pixels of dst that are worth packing all weights for."""

_LEAST_WORK, _MOST_WORK, _MOST_SUMS = 4_000_000, 1 << 30, 1 << 21
"""Multiply-adds worth a unit of weight gradients; the most of one, some ten milliseconds, in which the units of
another call wait; and its most sums, a few times as many where tiles are not full."""

_EXACT_WORK = 16
"""Multiply-adds that take as long as one whose sum is exact."""


class Part(NamedTuple):
    """What a unit has of a problem: groups, and channels of a group in the wide and in the narrow tensor.

    `Unit.part` has the ends of these.
    """

    groups: Span
    wide: Span
    narrow: Span


@cached
def units_of(problem: ConvProblem, workers: int) -> list[Unit]:
    """Cut a weight gradient by channels and a forward operation by images."""
    if problem.computes == "diff_bias":
        # its part is that of the weight gradient of a src of ones
        return [Unit(0, 0, (0,), problem.output_shape, problem.macs, (0, 1, 0, 1, 0, problem.dst_channels))]
    if problem.forward:
        return _image_units(problem, workers)
    units: list[Unit] = []
    for part in _parts(problem, workers):
        macs = problem.macs * prod(high - low for low, high in part) // max(1, _weights(problem))
        units.append(Unit(len(units), 0, *problem.weights_box(*part), macs, sum(part, ())))
    return units


def _image_units(problem: ConvProblem, workers: int) -> list[Unit]:
    """Cut a forward operation by images, of which those with few pixels share the packed weights."""
    n, inside = problem.n, problem.output_shape[1:]
    step = max(1, min(_PIXELS // max(1, prod(problem.dst_spatial)), n // (2 * workers)))
    units: list[Unit] = []
    for low in range(0, max(1, n), step):
        offset, shape = (low, *(0,) * len(inside)), (min(step, n - low), *inside)
        macs = problem.macs * shape[0] // max(1, n)
        units.append(Unit(len(units), 0, offset, shape, macs, (low, low + shape[0])))
    return units


def _weights(problem: ConvProblem) -> int:
    """Count pairs of channels."""
    dims = problem.dims
    return dims.groups * dims.wide_channels * dims.narrow_channels


def _parts(problem: ConvProblem, workers: int) -> Iterator[Part]:
    """Cut a weight gradient by groups, or by the more numerous channels, for some workers and their memory."""
    dims = problem.dims
    wide, narrow = dims.wide_channels, dims.narrow_channels
    work = problem.macs * (_EXACT_WORK if problem.dtype == "f64" else 1)
    pieces = 1 if workers == 1 else min(2 * workers, ceil(work / _LEAST_WORK))
    sums = _weights(problem) * prod(dims.kernel)
    pieces = max(1, pieces, ceil(sums / _MOST_SUMS), ceil(work / _MOST_WORK))
    if dims.groups > 1:
        for groups in _even(dims.groups, pieces, 1):
            yield Part(groups, (0, wide), (0, narrow))
    else:
        for some in _even(max(wide, narrow), pieces, LANES):
            yield Part((0, 1), some if wide > narrow else (0, wide), (0, narrow) if wide > narrow else some)


def _even(count: int, pieces: int, multiple: int) -> Iterator[Span]:
    """Cut a range into at most so many pieces, whose length is such a multiple."""
    step = max(1, ceil(ceil(count / pieces) / multiple)) * multiple
    return ((low, min(count, low + step)) for low in range(0, max(1, count), step))


def arrange(gradient: Array, problem: ConvProblem) -> Array:
    """Bring (.., groups, taps, wide, narrow) into the order of the weights."""
    *more, groups, _, wide, narrow = gradient.shape
    letters, whole, first = problem.letters, problem.whole_axis, len(more)
    axes = {"X": [first + 1], letters[0]: [first + 2], letters[1]: [first + 3]}
    axes[whole].insert(0, first)
    order = [axis for letter in problem.weights_format for axis in axes[letter]]
    sizes = {"X": problem.kernel, letters[0]: (wide,), letters[1]: (narrow,)}
    sizes[whole] = (groups * sizes[whole][0],)
    shape = [size for letter in problem.weights_format for size in sizes[letter]]
    return gradient.transpose(*range(first), *order).reshape(*more, *shape)
