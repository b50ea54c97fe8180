"""Results of problems in float64, of inputs that may be changed first.

A forward operation is computed as the reference kernel does. Weight gradients are computed image by image, or for many
small images at once, and for all taps together, so that each value is widened and changed once: the tensor with fewer
channels is laid out once for each tap, shifted, and one matrix product with the other tensor gives all taps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil, prod

import numpy as np
import numpy.typing as npt

from kernels.chains.units import arrange
from kernels.plan import Stop, Storage, box
from kernels.problem import ConvProblem, Dims
from kernels.reference import REFERENCE, Change, channels_first, read, taps, widen
from verify.stopping import until

__all__ = ["CHUNK", "evaluate", "evaluation_work", "gradients", "pixel_chunks"]

Array = npt.NDArray[np.float64]

CHUNK = 1 << 15
"""Values that are widened at a time: with what is computed from them, they stay in a processor's second cache."""

_LAID_OUT = 1 << 22
"""Most values of a tensor that is laid out for each tap."""

_CALL, _COPY = 1 << 16, 16
"""Multiply-adds that take as long as the calls for one tap, some ten microseconds, and as laying out a value."""


def evaluate(problem: ConvProblem, inputs: Sequence[Storage], stop: Stop, change: Change | None = None) -> Array:
    """Return the result of a problem in float64, of changed inputs if so."""
    if problem.computes == "diff_weights":
        return gradients(problem, inputs, stop, [change])[0]
    result = np.zeros(problem.output_shape)
    for unit in until(stop, REFERENCE.units(problem, 1)[0] if result.size else ()):
        box(result, unit)[...] = REFERENCE.values(problem, unit, inputs, stop, change=change)
    return result


def gradients(
    problem: ConvProblem, inputs: Sequence[Storage], stop: Stop, changes: Sequence[Change | None]
) -> list[Array]:
    """Return the weight gradients of inputs that are changed in each of these ways."""
    dims, step = problem.dims, _images_at_once(problem)
    count = prod(dims.kernel)
    totals = [np.zeros((dims.groups, count, dims.wide_channels, dims.narrow_channels)) for _ in changes]
    if totals and totals[0].size:
        for first in range(0, problem.n, step):
            some = [tensor[first : first + step] for tensor in inputs[:2]]
            for total, change in zip(totals, changes, strict=True):
                total += _of_images(problem, some, stop, change)
    return [arrange(total, problem) for total in totals]


def _few_wide(dims: Dims) -> bool:
    """Whether the wide tensor has fewer channels, and is the one that is laid out for each tap."""
    return (dims.wide_channels, prod(dims.narrow)) < (dims.narrow_channels, prod(dims.wide))


def _laid_out(dims: Dims) -> int:
    """Return how many values one image takes that is laid out for each tap."""
    channels, pixels = (
        (dims.wide_channels, dims.narrow) if _few_wide(dims) else (dims.narrow_channels, dims.wide)
    )  # fmt: skip
    return dims.groups * _met(dims) * channels * prod(pixels)


def _images_at_once(problem: ConvProblem) -> int:
    """Return how many images are small enough to be computed together: one of them takes thousands of calls."""
    dims = problem.dims
    size = dims.groups * max(dims.wide_channels * prod(dims.wide), dims.narrow_channels * prod(dims.narrow))
    return max(1, min(problem.n, CHUNK // max(1, size), _LAID_OUT // max(1, _laid_out(dims))))


def evaluation_work(problem: ConvProblem) -> int:
    """Return the multiply-adds that take as long as `evaluate`, with the calls of NumPy around them."""
    dims = problem.dims
    if problem.computes != "diff_weights":
        return problem.macs + _CALL * (problem.n + _met(dims))
    laid_out, calls = _laid_out(dims), ceil(problem.n / _images_at_once(problem)) * _met(dims)
    many = dims.narrow_channels if _few_wide(dims) else dims.wide_channels
    macs = problem.n * laid_out * (many + _COPY) if laid_out <= _LAID_OUT else problem.macs
    return macs + _CALL * calls


def _met(dims: Dims) -> int:
    """Count the taps in which pixels meet."""
    return prod([int((dims.meetings(axis) > 0).sum()) for axis in range(3)])


def _of_images(problem: ConvProblem, tensors: Sequence[Storage], stop: Stop, change: Change | None) -> Array:
    """Return the gradient of some images as (groups, taps, wide channels, narrow channels)."""
    found = _all_taps(problem, tensors, stop, change)
    if found is not None and np.isfinite(found).all():
        return found
    return _tap_by_tap(problem, tensors, stop, change)  # where no zeros are multiplied by Inf or NaN


def _all_taps(problem: ConvProblem, tensors: Sequence[Storage], stop: Stop, change: Change | None) -> Array | None:
    """Lay out the tensor with fewer channels for each tap, zeros where there is none; None if it would be too large."""
    dims, few_wide = problem.dims, _few_wide(problem.dims)
    wide, narrow = problem.places
    few, many = (wide, narrow) if few_wide else (narrow, wide)
    if _laid_out(dims) > _LAID_OUT:
        return None
    values = _by_channel(read(tensors[few], problem.dtype, change, few), problem)
    places, met = [], _met(dims)
    laid_out = np.zeros((*values.shape[:1], met, *values.shape[1:3], *(dims.narrow if few_wide else dims.wide)))
    for row, (tap, at_narrow, at_wide) in enumerate(until(stop, taps(dims))):
        source, target = (at_wide, at_narrow) if few_wide else (at_narrow, at_wide)
        laid_out[:, row][:, :, :, *target] = values[:, :, :, *source]
        places.append(tap)
    rows = laid_out.reshape(dims.groups, met * values.shape[1], prod(laid_out.shape[3:]))
    found = np.zeros((dims.groups, rows.shape[1], dims.narrow_channels if few_wide else dims.wide_channels))
    with np.errstate(invalid="ignore", over="ignore"):
        for some, others in until(stop, _chunks(problem, tensors[many], change, many)):
            found += rows[:, :, some] @ others.transpose(0, 2, 1)
    by_tap = found.reshape(dims.groups, met, values.shape[1], found.shape[2])
    total = np.zeros((dims.groups, prod(dims.kernel), dims.wide_channels, dims.narrow_channels))
    total[:, places] = by_tap if few_wide else by_tap.transpose(0, 1, 3, 2)
    return total


def _by_channel(tensor: Array, problem: ConvProblem) -> Array:
    """View a data tensor as (groups, channels of a group, images, D, H, W)."""
    return np.moveaxis(channels_first(tensor, problem, problem.dims.groups), 0, 2)


def _chunks(problem: ConvProblem, tensor: Storage, change: Change | None, place: int) -> Iterable[tuple[slice, Array]]:
    """Yield some pixels of one image at a time, or all of several small images at once."""
    if len(tensor) == 1:
        return pixel_chunks(tensor, problem, change, place)
    values = _by_channel(read(tensor, problem.dtype, change, place), problem)
    return [(slice(None), values.reshape(*values.shape[:2], -1))]


def _tap_by_tap(problem: ConvProblem, tensors: Sequence[Storage], stop: Stop, change: Change | None) -> Array:
    dims = problem.dims
    found = np.zeros((dims.groups, prod(dims.kernel), dims.wide_channels, dims.narrow_channels))
    a, b = (_by_channel(read(tensors[place], problem.dtype, change, place), problem) for place in problem.places)
    for tap, at_narrow, at_wide in until(stop, taps(dims)):
        a_part = a[:, :, :, *at_wide].reshape(dims.groups, dims.wide_channels, -1)
        b_part = b[:, :, :, *at_narrow].reshape(dims.groups, dims.narrow_channels, -1)
        with np.errstate(invalid="ignore", over="ignore"):
            found[:, tap] = a_part @ b_part.transpose(0, 2, 1)
    return found


def pixel_chunks(
    image: Storage, problem: ConvProblem, change: Change | None = None, place: int = 0
) -> Iterator[tuple[slice, Array]]:
    """Yield some pixels of one image at a time, and their values as (groups, channels of a group, pixels)."""
    channels_last = problem.data_format == "NXC"
    flat = image.reshape(-1, image.shape[-1]) if channels_last else image.reshape(image.shape[1], -1)
    pixels, channels = flat.shape if channels_last else flat.shape[::-1]
    step = max(64, CHUNK // max(1, channels))
    for start in range(0, pixels, step):
        some = slice(start, start + step)
        values = widen(flat[some], problem.dtype).T if channels_last else widen(flat[:, some], problem.dtype)
        if change is not None:
            values = change(values, place)
        yield some, values.reshape(problem.groups, channels // problem.groups, -1)
