"""Positions and tensors of a problem, as the loops of the reference see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.chains.loops import TERMS, Operand, panel_values
from kernels.dtypes import DTYPES
from kernels.emit.compiler import Records, Table, row_of
from kernels.problem import ConvProblem

__all__ = ["Geometry", "Part", "Stored", "cut", "kind_bytes", "lanes_of", "room_of", "up"]

Sizes = Sequence[int]

Stored = Callable[[int, int], npt.NDArray[Any]]
"""Returns an image of an input, given both numbers, as stored or in float64; weights are the same for each image."""

_BOX_BYTES = 1 << 19
"""What the panels of a box should take: they stay in L2."""

_LEAST_POSITIONS, _CALL_MACS = 1 << 6, 1 << 28
"""Positions of a box at least, multiply-adds at most: a unit checks every few milliseconds if it was cancelled."""


@dataclass(frozen=True)
class Part:
    """What a unit has of a problem: groups, and channels of a group in the wide and in the narrow tensor."""

    groups: tuple[int, int]
    wide: tuple[int, int]
    narrow: tuple[int, int]

    @classmethod
    def of(cls, part: tuple[int, ...]) -> Part:
        """Return the part of a unit of weight gradients."""
        a, b, c, d, e, f = part
        return cls((a, b), (c, d), (e, f))


class Geometry:
    """Positions of a problem: of an axis whose kernel is 1 those that are read, all such axes as one."""

    def __init__(self, problem: ConvProblem) -> None:
        dims = problem.dims
        self.wide, self.narrow, self.strides = list(dims.wide), list(dims.narrow), list(dims.strides)
        self.steps = [[prod(sizes[axis + 1 :]) for axis in range(3)] for sizes in (dims.wide, dims.narrow)]
        ones = [count == 1 and pad == 0 for count, pad in zip(dims.kernel, dims.pads, strict=True)]
        for axis in range(3):
            reads = dims.gathers or not problem.forward  # elsewhere the others are part of the result
            if ones[axis] and reads and (self.narrow[axis] - 1) * self.strides[axis] < self.wide[axis]:
                self.wide[axis] = self.narrow[axis]
                self.steps[0][axis] *= self.strides[axis]
                self.strides[axis] = 1
        dense = all(stride == 1 or size == 1 for stride, size in zip(self.strides, self.narrow, strict=True))
        if all(ones) and dense and self.wide == self.narrow and self.steps[0] == self.steps[1]:
            count = prod(self.narrow)
            self.wide, self.narrow, self.steps = [1, 1, count], [1, 1, count], [[count, count, 1]] * 2
            self.strides = [1, 1, 1]
        ranges = []
        for axis in range(3):
            rows = np.zeros((dims.kernel[axis], 3), np.int64)
            if ones[axis]:
                rows[:, 1] = min(self.narrow[axis], ceil(self.wide[axis] / self.strides[axis]))
            else:
                rows[:, :2] = dims.tap_ranges(axis)
                rows[:, 2] = dims.wide_at(axis, np.arange(dims.kernel[axis]), 0)
            ranges.append(rows)
        self.shifts = [(int(rows[0, 2]), int(rows[-1, 2])) for rows in ranges]
        places = np.indices(dims.kernel).reshape(3, -1)
        self.taps: Table = np.stack([ranges[axis][places[axis], i] for i in range(3) for axis in range(3)], 1)

    def reached(self, low: Sizes, counts: Sizes) -> list[int]:
        """Return the box of wide positions that a box of narrow ones meets."""
        return _box(
            (begin * stride + first, (begin + count - 1) * stride + last + 1, size)
            for begin, count, size, stride, (first, last) in zip(
                low, counts, self.wide, self.strides, self.shifts, strict=True
            )
        )

    def reaching(self, low: Sizes, counts: Sizes) -> list[int]:
        """Return the box of narrow positions that meet a box of wide ones."""
        return _box(
            (-((last - begin) // stride), (begin + count - 1 - first) // stride + 1, size)
            for begin, count, size, stride, (first, last) in zip(
                low, counts, self.narrow, self.strides, self.shifts, strict=True
            )
        )

    def side(
        self, problem: ConvProblem, kind: int, *, wide: bool, some: tuple[int, int], width: int, group: int = 0,
        lanes: int = 0,
    ) -> Records:  # fmt: skip
        """Return the operand of one tensor: a range of channels of each group, or of `lanes` groups side by side."""
        dims, size = problem.dims, kind_bytes(kind)
        inside, sizes = (dims.wide_channels, dims.wide) if wide else (dims.narrow_channels, dims.narrow)
        whole, (first, end) = inside * dims.groups, some
        channel, position = (prod(sizes), 1) if problem.data_format == "NCX" else (1, whole)
        values = {
            "kind": kind,
            "start": size * channel * (group * inside + first),
            "nbytes": size * whole * prod(sizes),
            "strides": [size * position * step for step in self.steps[0 if wide else 1]],
        }
        return row_of(Operand, **values, **lanes_of(size * channel, size * channel * inside, end - first, width, lanes))


def _box(axes: Iterable[tuple[int, int, int]]) -> list[int]:
    """Clip spans to their axes, each given as low, high and size; return the first positions, then the counts."""
    spans = [(max(0, low), min(size, high)) for low, high, size in axes]
    return [low for low, _ in spans] + [max(0, high - low) for low, high in spans]


def lanes_of(
    channel: int, group: int, channels: int, width: int, groups: int, *, turned: bool = False
) -> dict[str, Any]:
    """Return the steps and counts of an operand's panels, whose lanes are channels of a group, or `groups` if not 0."""
    if groups:
        names = {"group": width * group, "channel": group, "channels": groups, "panel": channel, "panels": channels}
    else:
        panels = ceil(channels / width)
        names = {"group": group, "channel": channel, "channels": channels, "panel": width * channel, "panels": panels}
    return {**names, "width": width, "lanewise": groups > 0, "turned": turned}


def room_of(operand: Records, positions: int) -> int:
    """Return how many values the panels of an operand take for that number of positions."""
    return int(operand["panels"][0]) * panel_values(positions, int(operand["width"][0]))


def kind_bytes(kind: int) -> int:
    """Return the bytes of a value."""
    return list(DTYPES.values())[kind].size


def cut(sizes: Sizes, position_bytes: int, position_macs: int) -> Iterator[tuple[list[int], list[int]]]:
    """Cut a box into boxes that a cache and a call should hold, whose positions follow each other in order."""
    most = max(_LEAST_POSITIONS, min(max(TERMS, _BOX_BYTES // position_bytes), _CALL_MACS // max(1, position_macs)))
    axis = next(axis for axis in range(3) if axis == 2 or prod(sizes[axis + 1 :]) <= most)
    step = max(1, most // max(1, prod(sizes[axis + 1 :])))
    step = ceil(sizes[axis] / max(1, ceil(sizes[axis] / step)))  # as equal as they can be
    for place in np.ndindex(*sizes[:axis], ceil(sizes[axis] / max(1, step))):
        low = [*place[:axis], place[axis] * step, *[0] * (2 - axis)]
        counts = [*[1] * axis, min(step, sizes[axis] - place[axis] * step), *sizes[axis + 1 :]]
        yield low, counts


def up(count: int, step: int) -> int:
    """Round up to a multiple of a step."""
    return ceil(count / step) * step
