"""Where things lie: one weight gradient as four axes (n, d, h, w), with trivial axes merged.

Axes with one tap are sampled once a stride, so their stride moves into the tensor's steps; adjacent axes that are
contiguous in both tensors and have one tap become one. A 1x1 layer turns into one long axis, a 7x7 map into 49.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod

import numpy as np
import numpy.typing as npt

from kernels.problem import ConvProblem, Dims

__all__ = ["Axis", "Geometry", "Run", "Tensor", "folded", "geometry"]

FEW_TAPS = 64
"""Taps of an axis up to which their ranges are computed one by one."""

MOST_RUNS = 4096
"""Runs of channels up to which folding pays its layout."""


@dataclass(frozen=True)
class Tensor:
    """Steps in elements of one data tensor: (n, d, h, w), between channels and between groups."""

    steps: tuple[int, int, int, int]
    channel: int
    group: int
    channels: int
    origin: int = 0


@dataclass(frozen=True)
class Axis:
    """One axis: narrow positions ``0..size`` meet wide positions ``x * stride + shift`` for each tap."""

    size: int
    wide: int
    stride: int
    shifts: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def inner(self) -> tuple[int, int]:
        """The narrow positions for which every tap is inside."""
        return max(low for low, _ in self.ranges), min(high for _, high in self.ranges)

    @cached_property
    def _spans(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """Shifts and ranges as tables, where there are many and 64 bits hold what is computed from them."""
        most = max(abs(self.shifts[0]), abs(self.shifts[-1])) + (self.size + 1) * self.stride
        if len(self.shifts) <= FEW_TAPS or most >= 1 << 62:
            return None
        return np.array(self.shifts), np.fromiter(chain.from_iterable(self.ranges), np.int64).reshape(-1, 2)

    def window(self, low: int, high: int) -> tuple[int, int]:
        """Give the span of wide positions that narrow positions ``low..high`` really meet."""
        if self._spans is not None:
            shifts, ranges = self._spans
            starts, stops = np.maximum(low, ranges[:, 0]), np.minimum(high, ranges[:, 1])
            meets = starts < stops
            begin, end = starts * self.stride + shifts, (stops - 1) * self.stride + shifts
            return (int(begin[meets].min()), int(end[meets].max()) + 1) if meets.any() else (0, 0)
        ends = []
        for shift, (first, last) in zip(self.shifts, self.ranges, strict=True):
            start, stop = max(low, first), min(high, last)
            if start < stop:
                ends += [start * self.stride + shift, (stop - 1) * self.stride + shift]
        return (min(ends), max(ends) + 1) if ends else (0, 0)


@dataclass(frozen=True)
class Geometry:
    """The two tensors and their common axes (n, d, h, w)."""

    wide: Tensor
    narrow: Tensor
    axes: tuple[Axis, Axis, Axis, Axis]


def _tensor(problem: ConvProblem, channels: int, spatial: tuple[int, int, int]) -> Tensor:
    d, h, w = spatial
    total = channels * problem.groups
    if problem.data_format == "NCX":
        return Tensor((total * d * h * w, h * w, w, 1), d * h * w, channels * d * h * w, channels)
    return Tensor((total * d * h * w, h * w * total, w * total, total), 1, channels, channels)


def geometry(problem: ConvProblem) -> Geometry:
    """Derive the merged axes and the tensors' steps from a problem."""
    dims = problem.dims
    wide = _tensor(problem, dims.wide_channels, dims.wide)
    narrow = _tensor(problem, dims.narrow_channels, dims.narrow)
    steps, origin = list(wide.steps), 0
    axes = [Axis(dims.n, dims.n, 1, (0,), ((0, dims.n),))]
    for a in range(3):
        stride, size, pad = dims.strides[a], dims.narrow[a], dims.pads[a]
        ranges = _ranges(dims, a)
        if dims.kernel[a] == 1:
            origin -= pad * steps[a + 1]
            steps[a + 1] *= stride
            axes.append(Axis(size, size, 1, (0,), ranges))
        else:
            shifts = tuple(range(-pad, dims.kernel[a] * dims.dilations[a] - pad, dims.dilations[a]))
            axes.append(Axis(size, dims.wide[a], stride, shifts, ranges))
    wide = Tensor((steps[0], steps[1], steps[2], steps[3]), wide.channel, wide.group, wide.channels, origin)
    return _merge(wide, narrow, axes)


def _ranges(dims: Dims, axis: int) -> tuple[tuple[int, int], ...]:
    """Give `Dims.tap_range` of every tap of an axis: one by one where they are few, or 64 bits too small."""
    taps, stride, dilation, pad = dims.kernel[axis], dims.strides[axis], dims.dilations[axis], dims.pads[axis]
    if taps <= FEW_TAPS or max(taps * dilation, pad, stride) + dims.wide[axis] >= 1 << 62:
        return tuple(dims.tap_range(axis, tap) for tap in range(taps))
    shifts = np.arange(taps) * dilation - pad
    low = np.maximum(0, -(shifts // stride))
    high = np.maximum(low, np.minimum(dims.narrow[axis], (dims.wide[axis] - 1 - shifts) // stride + 1))
    return tuple(zip(low.tolist(), high.tolist(), strict=True))


def _plain(axis: Axis) -> bool:
    return axis.stride == 1 and axis.shifts == (0,) and axis.ranges == ((0, axis.size),) and axis.wide == axis.size


def _merge(wide: Tensor, narrow: Tensor, axes: list[Axis]) -> Geometry:
    wide_steps, narrow_steps = list(wide.steps), list(narrow.steps)
    for inner in (3, 2, 1):
        for outer in range(inner - 1, -1, -1):
            a, b = axes[outer], axes[inner]
            if a.size == 1 and _plain(a):
                continue
            contiguous = (
                wide_steps[outer] == wide_steps[inner] * b.size and narrow_steps[outer] == narrow_steps[inner] * b.size
            )
            if not (_plain(a) and _plain(b) and contiguous):
                break
            size = a.size * b.size
            axes[inner] = Axis(size, size, 1, (0,), ((0, size),))
            axes[outer] = Axis(1, 1, 1, (0,), ((0, 1),))
    # an axis of one position may have any step; the merged one keeps the inner step
    steps = (wide_steps[0], wide_steps[1], wide_steps[2], wide_steps[3])
    wide = Tensor(steps, wide.channel, wide.group, wide.channels, wide.origin)
    return Geometry(wide, narrow, (axes[0], axes[1], axes[2], axes[3]))


@dataclass(frozen=True)
class Run:
    """Channels of a folded tensor that lie at one step from each other: the first one's offset and accumulator row."""

    offset: int
    count: int
    row: int


def folded(geo: Geometry) -> tuple[Geometry, tuple[Run, ...]] | None:
    """Turn taps into channels of the wide tensor, innermost axis first, while no two taps meet the same value.

    So it is where patches do not overlap. Rows are channels inside taps where channels are adjacent in memory, else
    taps inside channels.
    """
    wide, axes = geo.wide, list(geo.axes)
    steps, origin = list(wide.steps), wide.origin
    inner, offsets, lane = 1, [0], 0
    for a in (3, 2, 1):
        axis = axes[a]
        taps = len(axis.shifts)
        if taps > 1:
            if axis.stride <= axis.shifts[-1] - axis.shifts[0] or {*axis.ranges} != {(0, axis.size)}:
                break
            shifts = [(shift - axis.shifts[0]) * steps[a] for shift in axis.shifts]
            if inner == 1:
                inner, lane = taps, shifts[1]
            else:
                offsets = [shift + offset for shift in shifts for offset in offsets]
        origin += axis.shifts[0] * steps[a]
        steps[a] *= axis.stride
        axes[a] = Axis(axis.size, axis.size, 1, (0,), ((0, axis.size),))
    taps, channels = inner * len(offsets), wide.channels
    if inner == 1 or channels * len(offsets) > MOST_RUNS:
        return None
    total = prod(len(axis.shifts) for axis in geo.axes)
    if wide.channel != 1:
        runs = [
            Run(c * wide.channel + offset, inner, c * total + i * inner)
            for c in range(channels)
            for i, offset in enumerate(offsets)
        ]
    elif lane == channels:
        lane = 1
        runs = [Run(offset, inner * channels, i * inner * channels) for i, offset in enumerate(offsets)]
    else:
        return None
    tensor = Tensor((steps[0], steps[1], steps[2], steps[3]), lane, wide.group, taps * channels, origin)
    return Geometry(tensor, geo.narrow, (axes[0], axes[1], axes[2], axes[3])), tuple(runs)
