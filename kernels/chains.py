"""Sums of float64 by compiled code, for the reference: boxes, panels and addresses for the loops of `kernels.products`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.arena import address, arena_address
from kernels.cache import cached
from kernels.emit.compiler import Table, row_of, values_of
from kernels.emit.doubles import BROAD, EXACT, LANES, PARTS, SHAPES, TALL, tile_address
from kernels.expansion import add
from kernels.pack.panels import KINDS
from kernels.plan import Stop
from kernels.problem import ConvProblem
from kernels.products import F64, TERMS, Gradient, Pixels, Operand, pack_side, panel_values, sum_gradients, sum_pixels

__all__ = ["Part", "Stored", "gradient_sums", "pixel_sums"]

Array = npt.NDArray[np.float64]
Ints = tuple[int, ...]
Row = tuple[Any, ...]
Sizes = Sequence[int]

Stored = Callable[[int, int], npt.NDArray[Any]]
"""Gives image so and so of an input, as it is stored or in float64; or the weights, whatever image is asked for."""

_BOX_BYTES = 1 << 19
"""What the panels of a box should take: they stay in L2."""

_WEIGHTS_BYTES = 1 << 24
"""What packed weights should take at a time."""


@dataclass(frozen=True)
class Part:
    """What a unit has of a problem: groups, and channels of a group in the wide and in the narrow tensor."""

    groups: tuple[int, int]
    wide: tuple[int, int]
    narrow: tuple[int, int]


class _Geometry:
    """Positions of a problem, where an axis whose kernel is 1 has only those that are read, and all such axes are one."""

    def __init__(self, problem: ConvProblem) -> None:
        dims = problem.dims
        self.wide, self.narrow, self.strides = list(dims.wide), list(dims.narrow), list(dims.strides)
        self.steps = [[prod(sizes[axis + 1 :]) for axis in range(3)] for sizes in (dims.wide, dims.narrow)]
        ones = [count == 1 and pad == 0 for count, pad in zip(dims.kernel, dims.pads, strict=True)]
        for axis in range(3):
            if ones[axis] and (self.narrow[axis] - 1) * self.strides[axis] < self.wide[axis]:
                self.wide[axis] = self.narrow[axis]
                self.steps[0][axis] *= self.strides[axis]
                self.strides[axis] = 1
        if all(ones) and self.wide == self.narrow and self.steps[0] == self.steps[1]:
            count = prod(self.narrow)
            self.wide, self.narrow, self.steps = [1, 1, count], [1, 1, count], [[count, count, 1]] * 2
        ranges = []
        for axis in range(3):
            rows = np.zeros((dims.kernel[axis], 3), np.int64)
            if ones[axis]:
                rows[:, 1] = min(self.narrow[axis], ceil(self.wide[axis] / self.strides[axis]))
            else:
                rows[:, :2] = dims.tap_ranges(axis)
                rows[:, 2] = np.arange(dims.kernel[axis]) * dims.dilations[axis] - dims.pads[axis]
            ranges.append(rows)
        self.shifts = [(int(rows[0, 2]), int(rows[-1, 2])) for rows in ranges]
        places = np.indices(dims.kernel).reshape(3, -1)
        self.taps: Table = np.stack([ranges[axis][places[axis], i] for i in range(3) for axis in range(3)], 1)

    def reached(self, low: Sizes, counts: Sizes) -> list[int]:
        """Return the box of wide positions that a box of narrow ones meets."""
        first, sizes = [], []
        for axis, (begin, count) in enumerate(zip(low, counts, strict=True)):
            start = max(0, begin * self.strides[axis] + self.shifts[axis][0])
            end = min(self.wide[axis], (begin + count - 1) * self.strides[axis] + self.shifts[axis][1] + 1)
            first.append(start)
            sizes.append(max(0, end - start))
        return [*first, *sizes]

    def reaching(self, low: Sizes, counts: Sizes) -> list[int]:
        """Return the box of narrow positions that meet a box of wide ones."""
        first, sizes = [], []
        for axis, (begin, count) in enumerate(zip(low, counts, strict=True)):
            start = max(0, -((self.shifts[axis][1] - begin) // self.strides[axis]))
            end = min(self.narrow[axis], (begin + count - 1 - self.shifts[axis][0]) // self.strides[axis] + 1)
            first.append(start)
            sizes.append(max(0, end - start))
        return [*first, *sizes]

    def side(
        self, problem: ConvProblem, kind: int, *, wide: bool, first: int, channels: int, width: int, group: int = 0
    ) -> Row:
        """Return one of both tensors, from a channel of a group on."""
        dims, size = problem.dims, _size(kind)
        inside, sizes = (dims.wide_channels, dims.wide) if wide else (dims.narrow_channels, dims.narrow)
        whole = inside * dims.groups
        channel, position = (prod(sizes), 1) if problem.data_format == "NCX" else (1, whole)
        return values_of(
            Operand,
            kind=kind,
            start=size * channel * (group * inside + first),
            nbytes=size * whole * prod(sizes),
            group=size * channel * inside,
            channel=size * channel,
            strides=[size * position * step for step in self.steps[0 if wide else 1]],
            channels=channels,
            width=width,
        )


def _size(kind: int) -> int:
    return 8 if kind == F64 else 4 if kind == KINDS["f32"] else 2


def _cut(sizes: Sizes, most: int) -> Iterator[tuple[list[int], list[int]]]:
    """Cut a box into boxes of at most so many positions or one, whose positions follow each other in order."""
    axis = next(axis for axis in range(3) if axis == 2 or prod(sizes[axis + 1 :]) <= most)
    step = max(1, most // max(1, prod(sizes[axis + 1 :])))
    step = ceil(sizes[axis] / max(1, ceil(sizes[axis] / step)))  # as equal as they can be
    for place in np.ndindex(*sizes[:axis], ceil(sizes[axis] / max(1, step))):
        low = [*place[:axis], place[axis] * step, *[0] * (2 - axis)]
        counts = [*[1] * axis, min(step, sizes[axis] - place[axis] * step), *sizes[axis + 1 :]]
        yield low, counts


def _up(count: int, step: int) -> int:
    return ceil(count / step) * step


class _Gradient:
    """The loops' view of a part of weight gradients."""

    def __init__(self, problem: ConvProblem, part: Part, kind: int, parts: int) -> None:
        geometry = _Geometry(problem)
        wide, narrow = (high - low for low, high in (part.wide, part.narrow))
        self.groups, self.parts = part.groups[1] - part.groups[0], parts
        choices = [
            (_up(lines, SHAPES[shape][0]) * _up(columns, SHAPES[shape][1] * LANES), shape, lines_wide)
            for shape in ((EXACT,) if parts == PARTS else (TALL, BROAD))
            for lines, columns, lines_wide in ((wide, narrow, True), (narrow, wide, False))
        ]
        _, shape, self.lines_wide = min(choices)
        tall, broad = SHAPES[shape][0], SHAPES[shape][1] * LANES
        self.lines, self.columns = (wide, narrow) if self.lines_wide else (narrow, wide)
        self.down, self.across = _up(self.lines, tall), ceil(self.columns / broad)
        self.broad, self.taps = broad, geometry.taps
        sides = {
            is_wide: geometry.side(
                problem, kind, wide=is_wide, group=part.groups[0], first=first, channels=high - first,
                width=tall if is_wide == self.lines_wide else broad,
            )
            for is_wide, (first, high) in ((True, part.wide), (False, part.narrow))
        }  # fmt: skip
        self.job = row_of(
            Gradient,
            lines=sides[self.lines_wide],
            columns=sides[not self.lines_wide],
            lines_wide=self.lines_wide,
            groups=self.groups,
            strides=geometry.strides,
            tile=tile_address(shape),
            tall=tall,
            parts=parts,
        )
        self.places = (0, 1) if self.lines_wide != problem.op.startswith("ConvT") else (1, 0)
        both = self.down, self.across * broad
        density = prod(ceil(a / max(1, b)) for a, b in zip(geometry.wide, geometry.narrow, strict=True))
        each = 8 * sum(both[0 if is_wide == self.lines_wide else 1] * (density if is_wide else 1) for is_wide in sides)
        self.boxes, self.values, self.spare = [], 0, 0
        for low, counts in _cut(geometry.narrow, max(TERMS, _BOX_BYTES // each)):
            reached = geometry.reached(low, counts)
            if prod(reached[3:]) == 0:
                continue
            boxes = [reached, [*low, *counts]]
            self.boxes.append(np.array(boxes if self.lines_wide else boxes[::-1], np.int64))
            counts = [prod(box[3:].tolist()) for box in self.boxes[-1]]
            room = [self.down // tall * panel_values(counts[0], tall), self.across * panel_values(counts[1], broad)]
            self.values, self.spare = max(self.values, sum(room)), max(self.spare, *room)

    def run(self, stored: Stored, n: int, stop: Stop) -> Array | None:
        shape = self.groups, len(self.taps), self.parts, self.across, self.down, self.broad
        totals, apart = np.zeros(shape), len(self.boxes) > 1
        chains = np.empty(shape if apart else shape[2:])
        room = arena_address("panels", 2 * self.values + self.spare)
        for image in range(n):
            chains.fill(0)
            sides = [stored(place, image) for place in self.places]  # lines and columns
            given = [*map(address, sides), room, room + 8 * self.values, address(chains), address(totals)]
            call = np.array([*given, int(apart)])
            for boxes in self.boxes:
                if stop():
                    return None
                sum_gradients(self.job, self.taps, boxes, call)
            if apart:
                with np.errstate(invalid="ignore", over="ignore"):
                    add(np.moveaxis(totals, 2, 0), np.moveaxis(chains, 2, 0))
        # (part, group, tap, line, column)
        found = totals.transpose(2, 0, 1, 4, 3, 5).reshape(self.parts, *shape[:2], self.down, -1)
        found = found[:, :, :, : self.lines, : self.columns]
        return found if self.lines_wide else found.swapaxes(3, 4)


class _Pixels:
    """The loops' view of dst of one image, all groups, some of each one's channels at a time."""

    def __init__(self, problem: ConvProblem, kind: int, parts: int) -> None:
        dims, geometry = problem.dims, _Geometry(problem)
        tall, vectors, _ = SHAPES[EXACT if parts == PARTS else TALL]
        broad, taps = vectors * LANES, len(geometry.taps)
        self.parts, self.taps, self.groups = parts, geometry.taps, dims.groups
        channels, size = dims.src_channels, _size(kind)
        group, wide, narrow, tap = problem.weights_strides
        to, of = (narrow, wide) if dims.gathers else (wide, narrow)
        spatial = prod(dims.dst)
        channel, position = (spatial, 1) if problem.data_format == "NCX" else (1, problem.dst_channels)
        steps = geometry.steps[1 if dims.gathers else 0]
        most = max(broad, _WEIGHTS_BYTES // (8 * dims.groups * taps * channels) // broad * broad)
        width = channels if channels < 8 else _up(channels, 8)  # packing writes whole vectors
        src = geometry.side(problem, kind, wide=dims.gathers, first=0, channels=channels, width=width)
        self.jobs, self.weights_box = [], np.array([0, 0, 0, 1, taps, channels])
        self.weights_values = self.spare = 0
        for first in range(0, dims.dst_channels, most):
            some = min(most, dims.dst_channels - first)
            weights = values_of(
                Operand,
                kind=kind,
                start=size * to * first,
                nbytes=size * prod(problem.weights_shape),
                group=size * group,
                channel=size * to,
                strides=[0, size * tap, size * of],
                channels=some,
                width=broad,
            )
            job = row_of(
                Pixels,
                src=src,
                weights=weights,
                gathers=dims.gathers,
                groups=dims.groups,
                taps=taps,
                strides=geometry.strides,
                steps=[8 * spatial * problem.dst_channels, 8 * channel * dims.dst_channels, 8 * channel,
                       *(8 * position * step for step in steps)],
                tile=tile_address(EXACT if parts == PARTS else TALL),
                tall=tall,
                parts=parts,
            )  # fmt: skip
            side = np.array([weights], Operand.dtype)
            self.jobs.append((job, side, 8 * channel * first))
            panels = ceil(some / broad) * panel_values(taps * channels, broad)
            self.weights_values = max(self.weights_values, dims.groups * panels)
            self.spare = max(self.spare, panels)
        src_sizes, dst_sizes = (
            (geometry.wide, geometry.narrow) if dims.gathers else (geometry.narrow, geometry.wide)
        )
        across = ceil(min(most, dims.dst_channels) / broad)
        density = max(1.0, prod(src_sizes) / max(1, prod(dst_sizes)))
        each = int(8 * (width * density + across * parts * broad))
        self.boxes, self.values, self.sums = [], 0, 0
        for low, counts in _cut(dst_sizes, max(TERMS, _BOX_BYTES // each)):
            source = (geometry.reached if dims.gathers else geometry.reaching)(low, counts)
            self.boxes.append(np.array([source, [*low, *counts]], np.int64))
            values = panel_values(prod(source[3:]), width)
            self.values, self.spare = max(self.values, values), max(self.spare, values)
            self.sums = max(self.sums, across * parts * broad * (prod(counts) + 1))
        self.shape = parts, *problem.output_shape[1:]

    def run(self, stored: Stored, image: int, stop: Stop) -> Array | None:
        result = np.zeros(self.shape)  # what no kernel position meets is not visited where that is one
        src, weights = stored(0, image), stored(1, image)
        room = arena_address("panels", 2 * (self.weights_values + self.values + self.sums) + self.spare)
        panels = room + 8 * self.weights_values
        sums = panels + 8 * self.values
        spare = sums + 8 * self.sums
        for job, side, at in self.jobs:
            pack_side(side, self.groups, address(weights), self.weights_box, room, spare)
            call = np.array([address(src), room, panels, spare, sums, address(result) + at])
            for boxes in self.boxes:
                if stop():
                    return None
                sum_pixels(job, self.taps, boxes, call)
        return result


@cached
def _gradient(problem: ConvProblem, part: Part, kind: int, parts: int) -> _Gradient:
    return _Gradient(problem, part, kind, parts)


@cached
def _pixels(problem: ConvProblem, kind: int, parts: int) -> _Pixels:
    return _Pixels(problem, kind, parts)


def gradient_sums(
    problem: ConvProblem, part: Part, kind: int, stored: Stored, stop: Stop, parts: int
) -> Array | None:
    """Return a part of weight gradients as (parts, groups, taps, wide, narrow channels); None when `stop` said so."""
    return _gradient(problem, part, kind, parts).run(stored, problem.n, stop)


def pixel_sums(problem: ConvProblem, image: int, kind: int, stored: Stored, stop: Stop, parts: int) -> Array | None:
    """Return dst of an image, without a bias, as (parts, its shape); None when `stop` said so."""
    return _pixels(problem, kind, parts).run(stored, image, stop)
