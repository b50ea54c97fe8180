"""Results of problems in float64, of inputs that may be changed first.

A forward operation is computed as the reference kernel does. Weight gradients are computed image by image, for all taps
at once, so that each value is widened and changed once: the tensor with fewer channels is laid out once for each tap,
shifted, and one matrix product with the other tensor gives all taps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kernels.chains.units import arrange
from kernels.plan import Stop, Storage, box
from kernels.problem import ConvProblem
from kernels.reference import REFERENCE, Change, channels_first, read, taps, widen

__all__ = ["CHUNK", "evaluate", "gradients", "pixel_chunks"]

Array = npt.NDArray[np.float64]
T = TypeVar("T")

CHUNK = 1 << 15
"""Values that are widened at a time: with what is computed from them, they stay in a processor's second cache."""

_LAID_OUT = 1 << 22
"""Most values of a tensor that is laid out for each tap."""


def evaluate(problem: ConvProblem, inputs: Sequence[Storage], stop: Stop, change: Change | None = None) -> Array | None:
    """Return the result of a problem in float64, of changed inputs if so; None when `stop` said so."""
    if problem.computes == "diff_weights":
        found = gradients(problem, inputs, stop, [change])
        return None if found is None else found[0]
    result = np.zeros(problem.output_shape)
    for unit in REFERENCE.units(problem, 1)[0] if result.size else ():
        if stop():
            return None
        values = REFERENCE.values(problem, unit, inputs, stop, change=change)
        if values is None:
            return None
        box(result, unit)[...] = values
    return result


class _Stopped(Exception):  # noqa: N818 - it is no error
    """`stop` said so."""


def _until(stop: Stop, items: Iterable[T]) -> Iterator[T]:
    """Yield items; raises `_Stopped`. Thousands of taps would take seconds."""
    for item in items:
        if stop():
            raise _Stopped
        yield item


def gradients(
    problem: ConvProblem, inputs: Sequence[Storage], stop: Stop, changes: Sequence[Change | None]
) -> list[Array] | None:
    """Return the weight gradients of inputs that are changed in each of these ways; None when `stop` said so."""
    try:
        return _gradients(problem, inputs, stop, changes)
    except _Stopped:
        return None


def _gradients(
    problem: ConvProblem, inputs: Sequence[Storage], stop: Stop, changes: Sequence[Change | None]
) -> list[Array]:
    dims = problem.dims
    count = prod(dims.kernel)
    totals = [np.zeros((dims.groups, count, dims.wide_channels, dims.narrow_channels)) for _ in changes]
    if totals and totals[0].size:
        for image in range(problem.n):
            some = [tensor[image : image + 1] for tensor in inputs[:2]]
            for total, change in zip(totals, changes, strict=True):
                total += _of_image(problem, some, stop, change)
    return [arrange(total, problem) for total in totals]


def _of_image(problem: ConvProblem, tensors: Sequence[Storage], stop: Stop, change: Change | None) -> Array:
    """Return the gradient of one image as (groups, taps, wide channels, narrow channels)."""
    found = _all_taps(problem, tensors, stop, change)
    if found is not None and np.isfinite(found).all():
        return found
    return _tap_by_tap(problem, tensors, stop, change)  # where no zeros are multiplied by Inf or NaN


def _all_taps(problem: ConvProblem, tensors: Sequence[Storage], stop: Stop, change: Change | None) -> Array | None:
    """Lay out the tensor with fewer channels for each tap, zeros where there is none; None if it would be too large."""
    dims = problem.dims
    wide, narrow = problem.places
    few_wide = (dims.wide_channels, prod(dims.narrow)) < (dims.narrow_channels, prod(dims.wide))
    few, many, channels, pixels = (
        (wide, narrow, dims.wide_channels, dims.narrow) if few_wide else (narrow, wide, dims.narrow_channels, dims.wide)
    )
    shape = (dims.groups, prod(dims.kernel), channels)
    if prod(shape) * prod(pixels) > _LAID_OUT:
        return None
    values = channels_first(read(tensors[few], problem.dtype, change, few), problem, dims.groups)[0]
    laid_out = np.zeros((*shape, *pixels))
    for tap, at_narrow, at_wide in _until(stop, taps(dims)):
        source, target = (at_wide, at_narrow) if few_wide else (at_narrow, at_wide)
        laid_out[:, tap][:, :, *target] = values[:, :, *source]
    rows = laid_out.reshape(dims.groups, shape[1] * channels, -1)
    found = np.zeros((dims.groups, rows.shape[1], dims.narrow_channels if few_wide else dims.wide_channels))
    with np.errstate(invalid="ignore", over="ignore"):
        for some, others in _until(stop, pixel_chunks(tensors[many], problem, change, many)):
            found += rows[:, :, some] @ others.transpose(0, 2, 1)
    by_tap = found.reshape(*shape, -1)
    return by_tap if few_wide else by_tap.transpose(0, 1, 3, 2)


def _tap_by_tap(problem: ConvProblem, tensors: Sequence[Storage], stop: Stop, change: Change | None) -> Array:
    dims = problem.dims
    found = np.zeros((dims.groups, prod(dims.kernel), dims.wide_channels, dims.narrow_channels))
    a, b = (
        channels_first(read(tensors[place], problem.dtype, change, place), problem, dims.groups)[0]
        for place in problem.places
    )
    for tap, at_narrow, at_wide in _until(stop, taps(dims)):
        a_part = a[:, :, *at_wide].reshape(dims.groups, dims.wide_channels, -1)
        b_part = b[:, :, *at_narrow].reshape(dims.groups, dims.narrow_channels, -1)
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
