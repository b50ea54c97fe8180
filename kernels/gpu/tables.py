"""What the kernels on a GPU are told of a problem: integers in the places that they name."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.forward.axes import AxisTable, axis_table, reached, tap_numbers
from kernels.problem import ConvProblem, data_steps

__all__ = ["bias_problem", "magic", "phases_of", "pixels_of", "spans_of", "sums_of"]

Ints = npt.NDArray[np.int64]

_MOST_PHASES = 64
_FAR = 1 << 24
"""Sizes and steps in positions up to which sums of a few fit into 32 bits."""


def bias_problem(problem: ConvProblem) -> ConvProblem:
    """Return BiasAdd with one spatial axis, or BiasAddBackward as the weight gradient for a src of ones."""
    pixels = (prod(problem.dst_spatial),)
    found = replace(
        problem, src_spatial=pixels, dst_spatial=pixels, kernel=(1,), strides=(1,), dilations=(1,), pads_begin=(0,)
    )
    if problem.op == "BiasAdd":
        return found
    return replace(found, op="ConvolutionBackwardWeights", src_channels=1, groups=1)


def addresses_of(problem: ConvProblem) -> type[np.int32 | np.int64]:
    """Return the dtype of addresses, and of sizes a block beyond them."""
    shapes = problem.src_shape, problem.dst_shape, problem.weights_shape
    return np.int32 if max(map(prod, shapes)) < 1 << 30 else np.int64


def sums_of(problem: ConvProblem) -> npt.NDArray[Any]:
    """Return the table of `kernels.gpu.sums`; those of BiasAdd have no weights."""
    dims = problem.dims
    steps = [
        data_steps(problem.data_format, channels * dims.groups, sizes)
        for channels, sizes in ((dims.wide_channels, dims.wide), (dims.narrow_channels, dims.narrow))
    ]
    strides = [min(stride, max(1, size)) for stride, size in zip(dims.strides, dims.wide, strict=True)]
    channels = dims.wide_channels, dims.narrow_channels
    rows = dims.n * prod(dims.dst)
    weights = (0, 0, 0, 0) if problem.op == "BiasAdd" else problem.weights_strides
    values = dims.n, dims.groups, rows, *channels, *dims.narrow, *strides, *dims.kernel, *steps[0], *steps[1]
    return np.array([*values, *weights, *dims.dst], addresses_of(problem))


def spans_of(problem: ConvProblem) -> npt.NDArray[Any]:
    """Return low, high and start of each tap of each axis; those that meet nothing have none."""
    spans = np.zeros((sum(problem.dims.kernel), 3), addresses_of(problem))
    first = 0
    for axis, taps in enumerate(problem.dims.kernel):
        found, low, start, count = reached(problem.dims, axis)
        spans[first + found] = np.stack([low, low + count, start], 1)
        first += taps
    return spans


def phases_of(problem: ConvProblem) -> npt.NDArray[np.int32] | None:
    """Return the table of `multiply_dst`, a row for each phase of dst; None where it has too many, or large numbers."""
    dims = problem.dims
    axes = []
    for axis in range(3):
        table = axis_table(dims, axis)
        if min(table.dst_step, table.dst) > _MOST_PHASES:
            return None
        order = np.argsort(tap_numbers(dims, axis))
        sizes = table.src, table.src_step, table.dst_step, table.dst, table.kernel
        axes.append([(*_phase(table, lane, order), *sizes) for lane in range(min(table.dst_step, table.dst))])
    rows = np.array([sum(row, ()) for row in product(*axes)], np.int64).reshape(-1, 36)
    positions = dims.n * rows[:, [0, 12, 24]].prod(1)
    if len(rows) > _MOST_PHASES or np.abs(rows).max(initial=0) >= _FAR or positions.max(initial=0) >= 1 << 30:
        return None
    work = np.argsort(-(rows[:, 3] * rows[:, 15] * rows[:, 27]), kind="stable")  # the longest sums first
    return np.column_stack([rows, positions])[work].astype(np.int32)


def _phase(table: AxisTable, lane: int, order: Ints) -> tuple[int, ...]:
    """Return positions of a phase of an axis, its lane, where src begins, its taps, the first, and the steps."""
    count = -(-(table.dst - lane) // table.dst_step)
    for dst, first, taps, _ in table.phases.tolist():
        if dst == lane:
            found = table.taps[first : first + taps]
            shifts = (found["src"] - found["low"] * table.src_step).tolist()
            numbers = order[found["number"]].tolist()
            src_step, tap_step = (values[1] - values[0] if taps > 1 else 1 for values in (shifts, numbers))
            return count, lane, shifts[0], taps, numbers[0], src_step, tap_step
    return count, lane, 0, 0, 0, 1, 1


def pixels_of(problem: ConvProblem, chunk: int) -> npt.NDArray[np.int32] | None:
    """Return the table of `multiply_weights`, for chunks of `chunk` pixels; None if 32 bits are too few."""
    dims = problem.dims
    pixels = dims.n * prod(dims.narrow)
    axes = zip(dims.wide, dims.narrow, dims.strides, dims.kernel, dims.dilations, dims.pads, strict=True)
    far = max(
        max(wide, narrow * stride, kernel * dilation, pad) for wide, narrow, stride, kernel, dilation, pad in axes
    )
    if max(far, *dims.strides, *dims.dilations) >= _FAR or pixels >= (1 << 31) - 2 * chunk:
        return None
    sizes = [value for size in dims.narrow for value in (size, *magic(size))]
    steps = *dims.wide, *dims.strides, *dims.dilations, *dims.pads, *dims.kernel
    return np.array([*steps, *sizes, pixels, chunk], np.int32)


def magic(divisor: int) -> tuple[int, int]:
    """Return the factor, as a signed integer of 32 bits, and the shift by which `divide` divides."""
    shift = (divisor - 1).bit_length()
    factor = (2**32 * (2**shift - divisor)) // divisor + 1
    return factor - 2**32 if factor >= 2**31 else factor, shift
