"""Where things lie: one weight gradient as four axes (n, d, h, w), with trivial axes merged.

Axes with one tap are sampled once a stride, so their stride moves into the tensor's steps; adjacent axes that are
contiguous in both tensors and have one tap become one. A 1x1 layer turns into one long axis, a 7x7 map into 49.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np
import numpy.typing as npt

from kernels.problem import FEW_TAPS, ConvProblem, data_steps, wrapped

__all__ = ["Axis", "Geometry", "Tensor", "combined", "cut", "geometry"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tensor:
    """Steps in elements of one data tensor: (n, d, h, w), between channels and between groups."""

    steps: tuple[int, int, int, int]
    channel: int
    group: int
    channels: int
    origin: int = 0


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis: narrow positions ``0..size`` meet wide positions ``x * stride + shift`` for each tap.

    `spans` has a row for each tap, the narrow positions low..high for which it is inside. Both fall as shifts rise.
    """

    size: int
    wide: int
    stride: int
    shifts: Sequence[int]
    spans: Ints

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The spans as pairs, for those who look at a few taps one by one."""
        return tuple((low, high) for low, high in self.spans.tolist())

    @property
    def whole(self) -> bool:
        """Whether every tap is inside everywhere."""
        return bool((self.spans == (0, self.size)).all())

    @property
    def inner(self) -> tuple[int, int]:
        """The narrow positions for which every tap is inside."""
        return int(self.spans[:, 0].max()), int(self.spans[:, 1].min())

    def window(self, low: int, high: int) -> tuple[int, int]:
        """Return the span of wide positions that narrow positions ``low..high`` really meet."""
        if len(self.shifts) > FEW_TAPS:
            begin, end = self.windows(np.array([low]), np.array([high]))
            return int(begin[0]), int(end[0])
        ends = []
        for shift, (first, last) in zip(self.shifts, self.ranges, strict=True):
            start, stop = max(low, first), min(high, last)
            if start < stop:
                ends += [start * self.stride + shift, (stop - 1) * self.stride + shift]
        return (min(ends), max(ends) + 1) if ends else (0, 0)

    def windows(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Return `window` for many spans; if they are adjacent, this takes as many steps as there are spans and taps.

        Of the taps that are inside at `low`, the first reaches the lowest position; each tap that enters later reaches
        its own first position. Ends are found in the same way. What is not a position of the wide tensor may wrap.
        """
        taps, (stride,), shifts = len(self.shifts), wrapped([self.stride]), wrapped(self.shifts)
        first, last = self.spans.T
        live = first < last
        begins = np.where(live, first * stride + shifts, _FAR)
        ends = np.where(live, (last - 1) * stride + shifts, -1)
        rising = first[::-1], last[::-1]
        begun, early = taps - rising[0].searchsorted(low, "right"), taps - rising[0].searchsorted(high, "left")
        over, late = taps - rising[1].searchsorted(low, "right"), taps - rising[1].searchsorted(high, "left")
        begin = np.where(begun < over, low * stride + shifts.take(begun, mode="clip"), _FAR)
        begin = np.minimum(begin, _reduce(np.minimum, begins, early, begun, _FAR))
        end = np.where(early < late, (high - 1) * stride + shifts.take(late - 1, mode="clip"), -1)
        end = np.maximum(end, _reduce(np.maximum, ends, late, over, -1))
        none = end < 0
        return np.where(none, 0, begin), np.where(none, 0, end + 1)


_FAR = np.iinfo(np.int64).max


def _reduce(operation: np.ufunc, values: Ints, first: Ints, last: Ints, nothing: int) -> Ints:
    """Reduce ``values[first..last]`` for each pair; `nothing` for an empty one."""
    every = operation.reduceat(np.append(values, nothing), np.column_stack([first, last]).reshape(-1))[::2]
    return np.where(first < last, every, nothing)


@dataclass(frozen=True)
class Geometry:
    """The two tensors and their common axes (n, d, h, w)."""

    wide: Tensor
    narrow: Tensor
    axes: tuple[Axis, Axis, Axis, Axis]


def _tensor(problem: ConvProblem, channels: int, spatial: tuple[int, int, int]) -> Tensor:
    n, d, h, w, channel = data_steps(problem.data_format, channels * problem.groups, spatial)
    return Tensor((n, d, h, w), channel, channels * channel, channels)


def geometry(problem: ConvProblem, images: int | None = None) -> Geometry:
    """Derive the merged axes and the tensors' steps from a problem, or from so many of its images."""
    dims = problem.dims
    wide = _tensor(problem, dims.wide_channels, dims.wide)
    narrow = _tensor(problem, dims.narrow_channels, dims.narrow)
    steps, origin = list(wide.steps), 0
    axes = [_trivial(dims.n if images is None else images)]
    for a in range(3):
        stride, size, pad = dims.strides[a], dims.narrow[a], dims.pads[a]
        spans = dims.tap_ranges(a)
        if dims.kernel[a] == 1 and (dims.gathers or not problem.forward):  # elsewhere others are part of the result
            origin -= pad * steps[a + 1]
            steps[a + 1] *= stride
            axes.append(Axis(size, size, 1, (0,), spans))
        else:
            shifts = range(-pad, dims.kernel[a] * dims.dilations[a] - pad, dims.dilations[a])
            axes.append(Axis(size, dims.wide[a], stride, shifts, spans))
    wide = Tensor((steps[0], steps[1], steps[2], steps[3]), wide.channel, wide.group, wide.channels, origin)
    return _merge(wide, narrow, axes)


def _plain(axis: Axis) -> bool:
    single = axis.stride == 1 and len(axis.shifts) == 1 and axis.shifts[0] == 0
    return single and axis.wide == axis.size and axis.ranges == ((0, axis.size),)


def _trivial(size: int) -> Axis:
    """Return an axis with one tap that meets each position."""
    return Axis(size, size, 1, (0,), np.array([[0, size]], np.int64))


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
            axes[inner] = _trivial(size)
            axes[outer] = _trivial(1)
    # an axis of one position may have any step; the merged one keeps the inner step
    steps = (wide_steps[0], wide_steps[1], wide_steps[2], wide_steps[3])
    wide = Tensor(steps, wide.channel, wide.group, wide.channels, wide.origin)
    return Geometry(wide, narrow, (axes[0], axes[1], axes[2], axes[3]))


def cut(axes: Sequence[Axis], shape: Sequence[int]) -> tuple[Ints, ...]:
    """Cut each axis into equal parts of at most so many positions: rows of low and high."""
    cuts = []
    for axis, size in zip(axes, shape, strict=True):
        parts = ceil(axis.size / size) if size else 0
        edges = axis.size * np.arange(parts + 1) // max(1, parts)
        cuts.append(np.column_stack([edges[:-1], edges[1:]]))
    return tuple(cuts)


def combined(tables: Sequence[Ints]) -> list[Ints]:
    """Repeat the rows of tables so that each row of one meets each row of the others, the last one's fastest."""
    grid = np.indices([len(table) for table in tables]).reshape(len(tables), -1)
    return [table[at] for table, at in zip(tables, grid, strict=True)]
