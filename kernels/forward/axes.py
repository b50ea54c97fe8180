"""Which taps meet which dst positions of a forward operation, axis by axis.

ConvTranspose: a dst position ``u`` meets tap ``k`` at src position ``x = (u + pad - k * dilation) / stride`` where that
is an integer and inside. Positions that agree modulo the stride are a phase: their taps are an arithmetic progression.
Convolution: a dst position ``x`` meets tap ``k`` at src position ``x * stride + k * dilation - pad`` where that is
inside; all positions are one phase. Taps are numbered so that those of a phase follow each other, and src positions
rise with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil, gcd

import numpy as np
import numpy.typing as npt

from kernels.emit.compiler import Records
from kernels.forward.records import Axis, Phase, Tables, Tap
from kernels.gradient import geometry
from kernels.problem import Dims, wrapped

__all__ = [
    "AxisTable", "Ints", "axis_tables", "chain_tables", "is_plain", "numbers_of", "plain", "tables_of", "tap_numbers",
]  # fmt: skip

Ints = npt.NDArray[np.int64]


def tap_numbers(dims: Dims, axis: int) -> Ints:
    """Number the taps of an axis."""
    taps = np.arange(dims.kernel[axis])
    if dims.gathers:
        return taps
    step = dims.strides[axis] // gcd(dims.strides[axis], dims.dilations[axis])  # to the next tap of a dst position
    numbers = np.empty(len(taps), np.int64)
    numbers[np.lexsort((-taps, taps % min(step, len(taps))))] = taps
    return numbers


def numbers_of(dims: Dims) -> Ints:
    """Return the number of each tap in the packed weights."""
    d, h, w = np.ix_(*(tap_numbers(dims, axis) for axis in range(3)))
    numbers: Ints = ((d * dims.kernel[1] + h) * dims.kernel[2] + w).reshape(-1)
    return numbers


def reached(dims: Dims, axis: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the taps that join positions, with their first narrow and wide position and the number of positions."""
    low, high = dims.tap_ranges(axis).T
    taps = np.flatnonzero(low < high)
    stride, dilation, pad = wrapped((dims.strides[axis], dims.dilations[axis], dims.pads[axis]))
    return taps, low[taps], low[taps] * stride + taps * dilation - pad, (high - low)[taps]


@dataclass(frozen=True)
class AxisTable:
    """One axis: sizes, the number of its taps, steps between positions of a phase, phases and taps.

    It is `covered` if every dst position meets a tap.
    """

    dst: int
    src: int
    kernel: int
    dst_step: int
    src_step: int
    phases: Records
    taps: Records
    covered: bool = True

    @property
    def begins(self) -> Ints:
        """The src position, inside or outside, that the first position of each tap's phase meets."""
        found: Ints = self.taps["src"] - self.taps["low"] * self.src_step
        return found

    @property
    def spread(self) -> int:
        """The number of src positions that the taps of all phases span, at dst positions side by side."""
        return int(np.ptp(self.begins)) + 1 if len(self.taps) else 0

    def sparse(self) -> tuple[AxisTable, int]:
        """Return the axis without src positions between those that its only tap meets, and the first of all."""
        taps = self.taps.copy()
        taps["src"], first = divmod(int(taps["src"][0]), self.src_step)
        return replace(self, src=ceil((self.src - first) / self.src_step), src_step=1, taps=taps), first


def axis_table(dims: Dims, axis: int) -> AxisTable:
    """Return the table of an axis."""
    taps, low, start, length = reached(dims, axis)
    wide, numbers = max(1, dims.wide[axis]), tap_numbers(dims, axis)[taps]
    stride = min(dims.strides[axis], wide)
    first, src, lanes, dst_step, src_step = low, start, np.zeros_like(low), 1, stride
    if not dims.gathers:
        lanes, first, src = start % stride, start // stride, low
        dst_step, src_step = stride, 1
    order = np.lexsort((numbers, lanes))
    table = np.empty(len(taps), Tap.dtype)
    table["number"], table["low"], table["high"], table["src"] = numbers, first, first + length, src
    table, lanes = table[order], lanes[order]
    begins = np.flatnonzero(np.diff(lanes, prepend=-1))
    phases = np.empty(len(begins), Phase.dtype)
    phases["dst"], phases["first"], phases["taps"] = lanes[begins], begins, np.diff(np.append(begins, len(taps)))
    phases["adjacent"] = 1
    size = dims.dst[axis]
    covered = len(begins) == min(dst_step, size) and all(
        _covers(table[first : first + count], -(-(size - lane) // dst_step))
        for lane, first, count, _ in phases.tolist()
    )
    return AxisTable(size, dims.src[axis], dims.kernel[axis], dst_step, src_step, phases, table, covered)


def _covers(taps: Records, count: int) -> bool:
    """Return whether every position of a phase meets a tap; the positions of taps fall."""
    low, high = taps["low"], taps["high"]
    return bool(low[-1] == 0 and high[0] >= count and (low[:-1] <= high[1:]).all())


def axis_tables(dims: Dims) -> tuple[AxisTable, ...]:
    """Return the tables of (n, d, h, w): images meet one tap, which is no other image's."""
    return plain(dims.n), *(axis_table(dims, axis) for axis in range(3))


def plain(size: int) -> AxisTable:
    """Return an axis whose positions meet one tap each, at their own."""
    taps, phases = np.zeros(1, Tap.dtype), np.zeros(1, Phase.dtype)
    taps["high"], phases["taps"], phases["adjacent"] = size, 1, 1
    return AxisTable(size, size, 1, 1, 1, phases, taps)


def is_plain(table: AxisTable) -> bool:
    """Return whether a table is one of `plain`."""
    sizes = table.dst == table.src and table.kernel == table.dst_step == table.src_step == 1
    return sizes and table.taps.tolist() == [(0, 0, table.dst, 0)]


def tables_of(tables: Sequence[AxisTable]) -> Tables:
    """Return the tables of axes, phases and taps that compiled code reads."""
    axes = np.empty(len(tables), Axis.dtype)
    phases, taps = [], []
    first, tap = 0, 0
    for row, table in zip(axes, tables, strict=True):
        row["first"], row["phases"] = first, len(table.phases)
        row["dst_step"], row["src_step"] = table.dst_step, table.src_step
        some = table.phases.copy()
        some["first"] += tap
        phases.append(some)
        taps.append(table.taps)
        first, tap = first + len(table.phases), tap + len(table.taps)
    return Tables(axes, np.concatenate(phases), np.concatenate(taps))


def chain_tables(axes: Sequence[geometry.Axis], gathers: bool) -> Tables:
    """Return the tables of (n, d, h, w) for one image, whose taps keep their numbers, which rise in each phase."""
    rows, phases, taps = [(0, 1, 1, 1)], [(0, 0, 1, 1)], [(0, 0, 1, 0)]
    for axis in axes:
        step, first, found = min(axis.stride, max(1, axis.wide)), len(phases), []
        for number, ((low, high), shift) in enumerate(zip(axis.ranges, axis.shifts, strict=True)):
            wide = low * axis.stride + shift
            if low < high and gathers:
                found.append((0, (number, low, high, wide)))
            elif low < high:
                at = wide // step
                found.append((wide % step, (number, at, at + high - low, low)))
        for dst, some in groupby(sorted(found), lambda each: each[0]):
            begin = len(taps)
            taps += [tap for _, tap in some]
            phases.append((dst, begin, len(taps) - begin, 1))
        steps = (1, *wrapped([axis.stride]).tolist()) if gathers else (step, 1)
        rows.append((first, len(phases) - first, *steps))
    return Tables(np.array(rows, Axis.dtype), np.array(phases, Phase.dtype), np.array(taps, Tap.dtype))
