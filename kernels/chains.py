"""Sums of float64 by compiled code, for the reference: boxes, panels and addresses for the loops of `kernels.products`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.arena import address, arena, arena_address
from kernels.cache import cached
from kernels.emit.compiler import Table, row_of, values_of
from kernels.emit.doubles import (
    BROAD, EXACT, LANES, LANEWISE, LEAF, LEAF_LANES, LEAF_TERMS, PARTS, SHAPES, TALL, tile_address,
)  # fmt: skip
from kernels.expansion import add
from kernels.pack.panels import KINDS
from kernels.plan import Stop, Storage
from kernels.problem import ConvProblem
from kernels.products import (
    F64,
    TERMS,
    Gradient,
    Pixels,
    Operand,
    pack_side,
    panel_values,
    sum_gradients,
    sum_pairs,
    sum_pixels,
)

__all__ = ["FEW", "Part", "Stored", "gradient_sums", "pixel_sums", "write_pixels"]

Array = npt.NDArray[np.float64]
Ints = tuple[int, ...]
Row = tuple[Any, ...]
Sizes = Sequence[int]

Stored = Callable[[int, int], npt.NDArray[Any]]
"""Gives image so and so of an input, as it is stored or in float64; or the weights, whatever image is asked for."""

FEW = 4
"""Sums of a group up to which each one's products are summed in pairs."""

_BOX_BYTES = 1 << 19
"""What the panels of a box should take: they stay in L2."""

_LANEWISE_COST = 1.5
"""What a sum of a lanewise tile costs, which loads all factors, of one that takes each for all lanes."""

_ONE = np.array([0, 0, 0, 1, 1, 1])

_WEIGHTS_BYTES = 1 << 20
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
            reads = dims.gathers or not problem.forward  # elsewhere the others are part of the result
            if ones[axis] and reads and (self.narrow[axis] - 1) * self.strides[axis] < self.wide[axis]:
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
        self, problem: ConvProblem, kind: int, *, wide: bool, some: tuple[int, int], width: int, group: int = 0,
        lanes: int = 0,
    ) -> Row:  # fmt: skip
        """Return one of both tensors: some channels of each group, from one on, or so many groups as `lanes`."""
        dims, size = problem.dims, _size(kind)
        inside, sizes = (dims.wide_channels, dims.wide) if wide else (dims.narrow_channels, dims.narrow)
        whole, (first, end) = inside * dims.groups, some
        channel, position = (prod(sizes), 1) if problem.data_format == "NCX" else (1, whole)
        values = {
            "kind": kind,
            "start": size * channel * (group * inside + first),
            "nbytes": size * whole * prod(sizes),
            "strides": [size * position * step for step in self.steps[0 if wide else 1]],
            "width": width,
        }
        return values_of(
            Operand, **values, **_lanes(size * channel, size * channel * inside, end - first, width, lanes)
        )


def _lanes(
    channel: int, group: int, channels: int, width: int, groups: int, *, turned: bool = False
) -> dict[str, Any]:
    """Say which channels are adjacent, given the bytes to the next channel and group: those of a group, or groups."""
    if groups:
        names = {"group": width * group, "channel": group, "channels": groups, "panel": channel, "panels": channels}
    else:
        panels = ceil(channels / width)
        names = {"group": group, "channel": channel, "channels": channels, "panel": width * channel, "panels": panels}
    return {**names, "lanewise": groups > 0, "turned": turned}


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
        many, exact = self.groups, parts == PARTS
        choices = [
            (many * _up(lines, SHAPES[shape][0]) * _up(columns, SHAPES[shape][1] * LANES), not lines_wide, shape)
            for shape in ((EXACT,) if exact else (TALL, BROAD))
            for lines, columns, lines_wide in ((wide, narrow, True), (narrow, wide, False))
        ]
        if not exact and many > 1:
            tall, broad = SHAPES[LANEWISE][0], SHAPES[LANEWISE][1] * LANES
            for lines, columns, lines_wide in ((wide, narrow, True), (narrow, wide, False)):
                cost = ceil(_LANEWISE_COST * _up(many, broad) * _up(lines, tall) * columns)
                choices.append((cost, not lines_wide, LANEWISE))
        _, narrow_lines, shape = min(choices)
        self.lines_wide, self.lanes = not narrow_lines, many if shape == LANEWISE else 0
        tall, broad = SHAPES[shape][0], SHAPES[shape][1] * LANES
        if self.lanes:
            self.groups = ceil(many / broad)
        self.lines, self.columns = (wide, narrow) if self.lines_wide else (narrow, wide)
        self.down, self.across = _up(self.lines, tall), self.columns if self.lanes else ceil(self.columns / broad)
        self.broad, self.taps = broad, geometry.taps
        sides = {
            is_wide: geometry.side(
                problem, kind, wide=is_wide, group=part.groups[0], some=some,
                width=tall if is_wide == self.lines_wide and not self.lanes else broad, lanes=self.lanes,
            )
            for is_wide, some in ((True, part.wide), (False, part.narrow))
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
        width = broad if self.lanes else tall
        panels = self.lines if self.lanes else self.down // tall, self.across
        both = panels[0] * width, self.across * broad
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
            room = [panels[0] * panel_values(counts[0], width), panels[1] * panel_values(counts[1], broad)]
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
        if self.lanes:  # (part, group, tap, line, column)
            found = totals.transpose(2, 0, 5, 1, 4, 3).reshape(self.parts, -1, shape[1], self.down, self.across)
            found = found[:, : self.lanes, :, : self.lines]
        else:
            found = totals.transpose(2, 0, 1, 4, 3, 5).reshape(self.parts, *shape[:2], self.down, -1)
            found = found[:, :, :, : self.lines, : self.columns]
        return found if self.lines_wide else found.swapaxes(3, 4)


class _Pairs:
    """The loops' view of weight gradients of groups with few channels."""

    def __init__(self, problem: ConvProblem, part: Part, kind: int) -> None:
        geometry = _Geometry(problem)
        (low, high), self.parts = part.groups, [span[1] - span[0] for span in (part.wide, part.narrow)]
        self.lanes, self.groups = high - low, ceil((high - low) / LEAF_LANES)
        sides = [
            geometry.side(problem, kind, wide=wide, group=low, some=some, width=LEAF_LANES, lanes=self.lanes)
            for wide, some in ((True, part.wide), (False, part.narrow))
        ]
        self.job = row_of(
            Gradient,
            lines=sides[0],
            columns=sides[1],
            lines_wide=True,
            groups=self.groups,
            strides=geometry.strides,
            tile=tile_address(LEAF),
            tall=1,
            parts=1,
        )
        counts = np.diff(geometry.taps[:, [0, 3, 1, 4, 2, 5]].reshape(-1, 3, 2))[..., 0].prod(1).tolist()
        first: dict[int, tuple[int, int]] = {}
        leaves: list[tuple[int, int]] = []
        for count in counts:
            if count not in first:
                some = _leaves(count) if count else []
                first[count] = len(leaves), len(leaves) + len(some)
                leaves += some
        self.leaves = np.array(leaves, np.int64).reshape(-1, 2)
        self.taps = np.hstack([geometry.taps, np.array([first[count] for count in counts], np.int64)])
        self.boxes = np.array([[0, 0, 0, *geometry.wide], [0, 0, 0, *geometry.narrow]], np.int64)
        values = [panel_values(prod(sizes), LEAF_LANES) for sizes in (geometry.wide, geometry.narrow)]
        rooms = [count * each for count, each in zip(self.parts, values, strict=True)]
        self.values, self.spare = sum(rooms), max(rooms)
        self.places = (1, 0) if problem.op.startswith("ConvT") else (0, 1)

    def run(self, stored: Stored, n: int, stop: Stop) -> Array | None:
        totals = np.zeros((self.groups, len(self.taps), *self.parts, LEAF_LANES))
        waiting = LEAF_LANES * (LEAF_TERMS + 64)
        room = arena_address("panels", 2 * (self.values + waiting) + self.spare)
        leaf = room + 8 * self.values
        for image in range(n):
            if stop():
                return None
            sides = [stored(place, image) for place in self.places]
            call = np.array([*map(address, sides), room, leaf + 8 * waiting, leaf, address(totals)])
            sum_pairs(self.job, self.taps, self.leaves, self.boxes, call)
        found = np.moveaxis(totals, -1, 1).reshape(-1, *totals.shape[1:-1])
        return found[None, : self.lanes]


def _leaves(terms: int) -> list[tuple[int, int]]:
    """Cut a sum as NumPy does: the terms of each piece, and how many sums of two are complete with it."""
    if terms <= LEAF_TERMS:
        return [(terms, 0)]
    half = terms // 2 // 8 * 8
    *others, (last, complete) = _leaves(terms - half)
    return [*_leaves(half), *others, (last, complete + 1)]


class _Pixels:
    """The loops' view of dst of one image, all groups, some of each one's channels at a time."""

    def __init__(self, problem: ConvProblem, images: int, kind: int, parts: int, result: int) -> None:
        dims, geometry = problem.dims, _Geometry(problem)
        channels, out, size = dims.src_channels, dims.dst_channels, _size(kind)
        broad, taps = SHAPES[EXACT if parts == PARTS else TALL][1] * LANES, len(geometry.taps)
        lanes = 0
        if parts == 1 and 2 * _up(dims.groups, broad) * out < dims.groups * _up(out, broad):
            lanes = dims.groups
        shape = EXACT if parts == PARTS else LANEWISE if lanes else TALL
        self.parts, self.taps, self.groups = parts, geometry.taps, ceil(lanes / broad) or dims.groups
        group, wide, narrow, tap = problem.weights_strides
        to, of = (narrow, wide) if dims.gathers else (wide, narrow)
        spatial = prod(dims.dst)
        channel, position = (spatial, 1) if problem.data_format == "NCX" else (1, problem.dst_channels)
        most = max(broad, _WEIGHTS_BYTES // (8 * dims.groups * taps * channels) // broad * broad)
        width = channels if channels < 8 else _up(channels, 8)  # packing writes whole vectors
        src = geometry.side(
            problem, kind, wide=dims.gathers, some=(0, channels), width=broad if lanes else width, lanes=lanes
        )
        turned = tap < of  # weights are read in the order of memory
        inner = (channels, taps) if turned else (taps, channels)
        self.jobs, self.weights_box = [], np.array([0, 0, 0, out if lanes else 1, *inner])
        self.weights_values = self.bias_values = self.spare = 0
        for first in range(0, out, out if lanes else most):
            some = out if lanes else min(most, out - first)
            weights = values_of(
                Operand,
                kind=kind,
                start=size * to * first,
                nbytes=size * prod(problem.weights_shape),
                strides=[size * to, *((size * of, size * tap) if turned else (size * tap, size * of))],
                width=broad,
                **_lanes(size * to, size * group, 1 if lanes else some, broad, lanes, turned=turned),
            )
            across = some if lanes else ceil(some / broad)
            bias = values_of(
                Operand,
                kind=kind,
                start=size * first,
                nbytes=size * problem.dst_channels,
                strides=[0, 0, 0],
                width=broad,
                **_lanes(size, size * out, some, broad, lanes),
            )
            stored = _size(result)
            inside = stored * channel * out
            job = row_of(
                Pixels,
                src=src,
                weights=weights,
                bias=bias,
                kind=result,
                gathers=dims.gathers,
                groups=self.groups,
                taps=taps,
                terms=channels,
                across=across,
                strides=geometry.strides,
                steps=[images * stored * spatial * problem.dst_channels,
                       *((broad * inside, stored * channel, inside) if lanes
                         else (inside, stored * broad * channel, stored * channel)),
                       *(stored * position * step for step in geometry.steps[1 if dims.gathers else 0])],
                tile=tile_address(shape),
                tall=SHAPES[shape][0],
                parts=parts,
            )  # fmt: skip
            sides = [np.array([each], Operand.dtype) for each in (weights, bias)]
            self.jobs.append((job, sides, stored * channel * first, self.groups * across * panel_values(1, broad)))
            self.bias_values = max(self.bias_values, self.jobs[-1][-1])
            panels = (
                panel_values(across * taps * channels, broad)
                if lanes
                else across * panel_values(taps * channels, broad)
            )
            self.weights_values = max(self.weights_values, self.groups * panels)
            self.spare = max(self.spare, panels)
        src_sizes, dst_sizes = (geometry.wide, geometry.narrow) if dims.gathers else (geometry.narrow, geometry.wide)
        across = out if lanes else ceil(min(most, out) / broad)
        if lanes:
            width = broad * channels
        density = max(1.0, prod(src_sizes) / max(1, prod(dst_sizes)))
        each = int(8 * (width * density + across * parts * broad))
        self.boxes, self.values, self.sums = [], 0, 0
        for low, counts in _cut(dst_sizes, max(TERMS, _BOX_BYTES // each)):
            source = (geometry.reached if dims.gathers else geometry.reaching)(low, counts)
            self.boxes.append(np.array([source, [*low, *counts]], np.int64))
            values = (
                channels * panel_values(prod(source[3:]), broad) if lanes else panel_values(prod(source[3:]), width)
            )
            self.values, self.spare = max(self.values, values), max(self.spare, values)
            self.sums = max(self.sums, across * parts * broad * (prod(counts) + 1))
            self.spare = max(self.spare, broad * prod(counts))
        self.shape, self.image_bytes = problem.output_shape[1:], _size(result) * prod(problem.output_shape[1:])

    def run(
        self, stored: Stored, images: range, output: Storage | None, biased: bool, stop: Stop
    ) -> Storage | None:
        result = np.empty((self.parts, len(images), *self.shape)) if output is None else output
        weights = stored(1, 0)
        sizes = self.weights_values, self.bias_values, self.values, self.sums
        room = arena("panels", 2 * sum(sizes) + self.spare)
        weights_room, bias_room, panels, sums, spare = (address(room) + 8 * sum(sizes[:place]) for place in range(5))
        for job, (side, bias), at, count in self.jobs:
            pack_side(side, self.groups, address(weights), self.weights_box, weights_room, spare)
            if biased:
                pack_side(bias, self.groups, address(stored(2, 0)), _ONE, bias_room, spare)
            else:
                room[2 * sizes[0] :][: 2 * count].fill(0)
            for place, image in enumerate(images):
                src, to = stored(0, image), address(result) + at + place * self.image_bytes
                call = np.array([address(src), weights_room, panels, spare, sums, bias_room, to])
                for boxes in self.boxes:
                    if stop():
                        return None
                    sum_pixels(job, self.taps, boxes, call)
        return result


@cached
def _gradient(problem: ConvProblem, part: Part, kind: int, parts: int) -> _Gradient:
    return _Gradient(problem, part, kind, parts)


@cached
def _pairs(problem: ConvProblem, part: Part, kind: int) -> _Pairs:
    return _Pairs(problem, part, kind)


@cached
def _pixels(problem: ConvProblem, images: int, kind: int, parts: int, result: int) -> _Pixels:
    return _Pixels(problem, images, kind, parts, result)


def gradient_sums(problem: ConvProblem, part: Part, kind: int, stored: Stored, stop: Stop, parts: int) -> Array | None:
    """Return a part of weight gradients as (parts, groups, taps, wide, narrow channels); None when `stop` said so."""
    if parts == 1 and prod(high - low for low, high in (part.wide, part.narrow)) <= FEW:
        return _pairs(problem, part, kind).run(stored, problem.n, stop)
    return _gradient(problem, part, kind, parts).run(stored, problem.n, stop)


def pixel_sums(problem: ConvProblem, images: range, kind: int, stored: Stored, stop: Stop, parts: int) -> Array | None:
    """Return dst of some images, without a bias, as (parts, images, ..); None when `stop` said so."""
    return _pixels(problem, len(images), kind, parts, F64).run(stored, images, None, False, stop)


def write_pixels(
    problem: ConvProblem, images: range, kind: int, stored: Stored, output: Storage, stop: Stop
) -> bool:
    """Write dst of some images, rounded, whose inputs are not f64; False when `stop` said so."""
    return _pixels(problem, len(images), kind, 1, kind).run(stored, images, output, problem.bias, stop) is not None
