"""The slow, obvious kernel, which takes everything: one matrix product a tap, float64 sums, rounded once at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.arena import address, arena_address
from kernels.cache import cached
from kernels.emit.doubles import Factors, add_outer_products, room_doubles
from kernels.plan import Stop, Unit, box
from kernels.problem import ConvProblem, Dims
from kernels.target import target

__all__ = ["REFERENCE", "narrow", "widen"]

Array = npt.NDArray[np.float64]
Storage = npt.NDArray[np.float32] | npt.NDArray[np.float64] | npt.NDArray[np.uint16]
FEW = 4
"""Sums of a group up to which tiles of them would be mostly empty."""

Change = Callable[[Array, int], Array]
"""Changes values of an input before they are summed, given which input it is; may write to its argument."""


def widen(stored: Storage, dtype: str) -> Array:
    """Return the values of a stored tensor (f16 and bf16 as their bits) in float64, exactly, as a copy."""
    if dtype in ("f32", "f64"):
        return stored.astype(np.float64)
    if dtype == "f16":
        return stored.view(np.float16).astype(np.float64)
    return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def read(stored: Storage, dtype: str, change: Change | None, place: int) -> Array:
    """Return values of the input at a place in float64, changed."""
    values = widen(stored, dtype)
    return values if change is None else change(values, place)


def narrow(values: Array, dtype: str) -> Storage:
    """Round float64 values to the storage of `dtype`, to nearest even.

    f32 and f16 round once, f64 stays; NumPy has no bfloat16, so that one goes over an f32 rounded to odd, which keeps
    the second rounding exact.
    """
    if dtype == "f64":
        return values
    if dtype == "f32":
        with np.errstate(over="ignore"):
            return values.astype(np.float32)
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    return _round_bf16(values)


def _round_bf16(values: Array) -> npt.NDArray[np.uint16]:
    with np.errstate(over="ignore", invalid="ignore"):
        near = values.astype(np.float32)
        toward_zero = np.where(
            np.abs(near.astype(np.float64)) > np.abs(values), np.nextafter(near, np.float32(0)), near
        )
    bits = toward_zero.astype(np.float32).view(np.uint32)
    inexact = (toward_zero.astype(np.float64) != values) & ~np.isnan(values)
    bits = bits | inexact.astype(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    chosen: npt.NDArray[np.uint16] = np.where(np.isnan(values), quiet, rounded)
    return chosen


def sum_products(rows: Array, columns: Array) -> Array:
    """Sum over the last axis of (groups, rows, terms) and (groups, columns, terms), into (groups, rows, columns).

    The order of the sums is the same on every processor that kernels are compiled for.
    """
    groups, count, terms = rows.shape
    shape = groups, count, columns.shape[1]
    found: Array = np.zeros(shape)
    if not target().compiles:
        found = rows @ columns.transpose(0, 2, 1)
    elif terms == 1:
        found = rows * columns.transpose(0, 2, 1)
    elif count * columns.shape[1] <= FEW:
        found = np.add.reduce(rows[:, :, None] * columns[:, None], -1)
    elif found.size and terms:
        sides = np.array([(address(each), each.strides) for each in (rows, columns)], Factors.dtype)
        room = arena_address("products", 2 * room_doubles(count))
        add_outer_products(sides, np.array([*shape, terms]), address(found), room)
    return found


def channels_first(tensor: npt.NDArray[Any], problem: ConvProblem, groups: int) -> npt.NDArray[Any]:
    """View a data tensor as (N, groups, channels of a group, D, H, W)."""
    if problem.data_format == "NXC":
        tensor = np.moveaxis(tensor, -1, 1)
    n, channels, *spatial = tensor.shape
    raised = (1,) * (3 - len(spatial)) + tuple(spatial)
    return tensor.reshape(n, groups, channels // groups, *raised)


def taps(dims: Dims) -> Iterator[tuple[int, tuple[slice, ...], tuple[slice, ...]]]:
    """For every kernel position give its flat index and the slices of narrow and wide pixels that meet in it.

    Positions that lie in the padding are left out, not multiplied by zero, so Inf and NaN meet only real data.
    """
    for index, position in enumerate(product(*map(range, dims.kernel))):
        yield index, *tap_slices(dims, position)


def tap_slices(dims: Dims, position: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the slices of narrow and wide pixels that meet in one kernel position."""
    narrow_slices, wide_slices = [], []
    for axis, tap in enumerate(position):
        low, high = dims.tap_range(axis, tap)
        stride = dims.strides[axis]
        start = low * stride + tap * dims.dilations[axis] - dims.pads[axis]
        narrow_slices.append(slice(low, high))
        wide_slices.append(slice(start, start + (high - low - 1) * stride + 1, stride) if high > low else slice(0, 0))
    return tuple(narrow_slices), tuple(wide_slices)


def tap_gradient(
    problem: ConvProblem,
    inputs: Sequence[Storage],
    position: tuple[tuple[slice, ...], tuple[slice, ...]],
    stop: Stop,
    change: Change | None,
) -> Array | None:
    """Compute diff_weights of one kernel position as (groups, wide channels, narrow channels) in float64.

    One image at a time, so that the float64 copies stay small; None when `stop` said so before one of them.
    """
    dims = problem.dims
    places = (1, 0) if problem.op.startswith("ConvT") else (0, 1)
    total = np.zeros((dims.groups, dims.wide_channels, dims.narrow_channels))
    for image in range(dims.n):
        if stop():
            return None
        a, b = (
            channels_first(read(inputs[place][image : image + 1], problem.dtype, change, place), problem, dims.groups)
            for place in places
        )
        a_part = a[0][(slice(None), slice(None), *position[1])].reshape(dims.groups, dims.wide_channels, -1)
        b_part = b[0][(slice(None), slice(None), *position[0])].reshape(dims.groups, dims.narrow_channels, -1)
        with np.errstate(invalid="ignore", over="ignore"):
            total += sum_products(a_part, b_part)
    return total


def forward(
    problem: ConvProblem, inputs: Sequence[Storage], image: int, stop: Stop, change: Change | None
) -> Array | None:
    """Compute dst of a forward operation for one image as (groups, O/groups, D, H, W) in float64, bias added.

    None when `stop` said so before a kernel position.
    """
    dims = problem.dims
    src = channels_first(read(inputs[0][image : image + 1], problem.dtype, change, 0), problem, dims.groups)[0]
    if problem.op == "BiasAdd":
        out: Array | None = src
    else:
        out = _convolved(problem, src, read(inputs[1], problem.dtype, change, 1), stop)
    if problem.bias and out is not None:
        bias = read(inputs[-1], problem.dtype, change, len(inputs) - 1)
        with np.errstate(invalid="ignore", over="ignore"):
            out = out + bias.reshape(dims.groups, -1, 1, 1, 1)
    return out


def _convolved(problem: ConvProblem, src: Array, weights: Array, stop: Stop) -> Array | None:
    """Compute ConvTranspose or Convolution of one image, without a bias; None when `stop` said so."""
    dims, weights = problem.dims, weights.reshape(-1)
    group, wide_step, narrow_step, tap_step = problem.weights_strides
    out = np.zeros((dims.groups, dims.dst_channels, *dims.dst))
    channel_steps = (narrow_step, wide_step) if dims.gathers else (wide_step, narrow_step)
    for index, at_narrow, at_wide in taps(dims):
        if stop():
            return None
        at_src, at_dst = (at_wide, at_narrow) if dims.gathers else (at_narrow, at_wide)
        w = np.lib.stride_tricks.as_strided(
            weights[index * tap_step :],
            (dims.groups, dims.dst_channels, dims.src_channels),
            (group * 8, channel_steps[0] * 8, channel_steps[1] * 8),
        )
        part = src[(slice(None), slice(None), *at_src)]
        with np.errstate(invalid="ignore", over="ignore"):
            product_ = sum_products(w, part.reshape(dims.groups, dims.src_channels, -1).transpose(0, 2, 1))
            out[(slice(None), slice(None), *at_dst)] += product_.reshape(
                dims.groups, dims.dst_channels, *part.shape[2:]
            )
    return out


def bias_gradient(problem: ConvProblem, diff_dst: Storage, stop: Stop, change: Change | None) -> Array | None:
    """Compute diff_bias in float64, image by image; None when `stop` said so."""
    total = np.zeros(problem.dst_channels)
    for image in range(problem.n):
        if stop():
            return None
        with np.errstate(invalid="ignore", over="ignore"):
            values = channels_first(read(diff_dst[image : image + 1], problem.dtype, change, 0), problem, 1)
            total += values.sum((0, 1, 3, 4, 5))
    return total


@cached
def _units(problem: ConvProblem) -> list[Unit]:
    if problem.computes == "diff_bias":
        return [Unit(0, 0, (0,), problem.output_shape, problem.macs, ())]
    if problem.forward:
        shape = (1, *problem.output_shape[1:])
        offsets = [(image, *(0,) * (len(shape) - 1)) for image in range(problem.n)] or [(0,) * len(shape)]
        if problem.n == 0:
            shape = problem.output_shape
    else:
        x = problem.weights_format.index("X")
        ones = (1,) * problem.rank
        full = problem.weights_shape
        shape = (*full[:x], *ones, *full[x + problem.rank :])
        offsets = [(*(0,) * x, *map(int, position), *(0,) * (2 - x)) for position in np.ndindex(*problem.kernel)]
    macs = problem.macs // max(1, len(offsets))
    return [Unit(i, 0, offset, shape, macs, (i,)) for i, offset in enumerate(offsets)]


class ReferenceKernel:
    """Sums in float64, in one order on all processors, and rounds once; takes every problem."""

    name = "reference_f64"

    def refuse(self, problem: ConvProblem) -> str | None:
        """Refuse nothing."""
        return None

    def units(self, problem: ConvProblem, workers: int) -> tuple[list[Unit], int]:
        """Cut a weight gradient by kernel positions and a forward operation by images."""
        return _units(problem), 0

    def run(
        self,
        problem: ConvProblem,
        unit: Unit,
        inputs: Sequence[Storage],
        output: Storage,
        scratch: Storage | None,
        stop: Stop,
    ) -> bool:
        """Compute one kernel position, one image, or the gradient of a bias."""
        if stop():
            return False
        if output.size == 0:
            return True
        values = self.values(problem, unit, inputs, stop)
        if values is not None:
            values[np.isnan(values)] = np.nan  # processors give their own NaN different signs
            box(output, unit)[...] = narrow(values, problem.dtype)
        return values is not None

    def values(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], stop: Stop, *, change: Change | None = None
    ) -> Array | None:
        """Compute a unit's box in float64; with `change` from inputs whose values are changed.

        None when `stop` said so.
        """
        if problem.computes == "diff_bias":
            return bias_gradient(problem, inputs[0], stop, change)
        assert unit.shape is not None
        if problem.forward:
            result = forward(problem, inputs, unit.part[0], stop, change)
            if result is None:
                return None
            channels = result.reshape(problem.dst_channels, *problem.dst_spatial)
            return (np.moveaxis(channels, 0, -1) if problem.data_format == "NXC" else channels)[None]
        position = [int(at) for at in np.unravel_index(unit.part[0], problem.dims.kernel)]
        gradient = tap_gradient(problem, inputs, tap_slices(problem.dims, position), stop, change)
        return None if gradient is None else arrange(gradient, problem).reshape(unit.shape)

    def terms(self, problem: ConvProblem) -> Array:
        """Return how many products each element of the result sums, in a shape that broadcasts to it."""
        dims = problem.dims
        if problem.computes == "diff_bias":
            return np.full(1, float(problem.n * prod(problem.dst_spatial)))
        rank = problem.rank
        if problem.op == "BiasAdd":
            return np.full((1,) * (rank + 2), 2.0)
        counts = np.ones(())
        for axis in range(3 - rank, 3):
            if problem.forward:
                meeting = _meeting_taps(dims, axis)
            else:
                low, high = dims.tap_ranges(axis).reshape(-1, 2).T
                meeting = np.maximum(0, high - low).astype(np.float64)
            counts = np.multiply.outer(counts, meeting)
        if not problem.forward:
            x = problem.weights_format.index("X")
            return (problem.n * counts).reshape((1,) * x + problem.kernel + (1,) * (2 - x))
        counts = dims.src_channels * counts + problem.bias
        return counts[None, None] if problem.data_format == "NCX" else counts[None, ..., None]


def _meeting_taps(dims: Dims, axis: int) -> Array:
    """Count the taps that meet each dst position of an axis."""
    counts = np.zeros(dims.dst[axis])
    for tap, (low, high) in enumerate(dims.tap_ranges(axis).tolist()):
        if dims.gathers:
            counts[low:high] += 1
        else:
            start = low * dims.strides[axis] + tap * dims.dilations[axis] - dims.pads[axis]
            counts[start : start + max(0, high - low - 1) * dims.strides[axis] + 1 : dims.strides[axis]] += high > low
    return counts


def arrange(gradient: Array, problem: ConvProblem) -> Array:
    """Bring (groups, wide, narrow) of one kernel position into the order of the weight letters."""
    wide, narrow = ("O", "I") if problem.op.startswith("ConvT") else ("I", "O")
    # the axis that groups do not divide holds the channels of all groups one after another
    if problem.groups_axis == wide:
        rows = {wide: gradient.shape[1], narrow: prod(gradient.shape[::2])}
        matrix = gradient.transpose(1, 0, 2).reshape(rows[wide], rows[narrow])
    else:
        matrix = gradient.reshape(-1, gradient.shape[2])
    letters = problem.weights_format.replace("X", "")
    return matrix if letters == wide + narrow else matrix.T


REFERENCE = ReferenceKernel()
