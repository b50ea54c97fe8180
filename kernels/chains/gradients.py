"""Weight gradients of the reference: boxes, panels and addresses for the loops."""

from __future__ import annotations

from math import ceil, prod

import numpy as np
import numpy.typing as npt

from kernels.arena import address, arena_address
from kernels.cache import cached
from kernels.chains.geometry import FEW, Geometry, Part, Stored, cut, up
from kernels.chains.loops import F64, Gradient, panel_values, sum_gradients, sum_pairs
from kernels.emit.compiler import row_of
from kernels.emit.doubles import (
    BROAD,
    EXACT,
    LANES,
    LANEWISE,
    LEAF,
    LEAF_F32,
    LEAF_LANES,
    LEAF_TERMS,
    PARTS,
    SHAPES,
    TALL,
    tile_address,
)
from kernels.plan import Stop
from kernels.problem import ConvProblem

__all__ = ["gradient_sums", "takes_gradient"]

Array = npt.NDArray[np.float64]

_MOST_VALUES = 1 << 22
"""What an image of some groups may take whose products are summed in pairs: it is packed as a whole."""

_LANEWISE_COST = 1.5
"""What a sum of a lanewise tile costs, which loads all factors, of one that takes each for all lanes."""


class _Gradient:
    """The loops' view of a part of weight gradients."""

    def __init__(self, problem: ConvProblem, part: Part, kind: int, parts: int) -> None:
        geometry = Geometry(problem)
        wide, narrow = (high - low for low, high in (part.wide, part.narrow))
        self.groups, self.parts = part.groups[1] - part.groups[0], parts
        many, exact = self.groups, parts == PARTS
        choices = [
            (many * up(lines, SHAPES[shape][0]) * up(columns, SHAPES[shape][1] * LANES), not lines_wide, shape)
            for shape in ((EXACT,) if exact else (TALL, BROAD))
            for lines, columns, lines_wide in ((wide, narrow, True), (narrow, wide, False))
        ]
        if not exact and many > 1:
            tall, broad = SHAPES[LANEWISE][0], SHAPES[LANEWISE][1] * LANES
            for lines, columns, lines_wide in ((wide, narrow, True), (narrow, wide, False)):
                cost = ceil(_LANEWISE_COST * up(many, broad) * up(lines, tall) * columns)
                choices.append((cost, not lines_wide, LANEWISE))
        _, narrow_lines, shape = min(choices)
        self.lines_wide, self.lanes = not narrow_lines, many if shape == LANEWISE else 0
        tall, broad = SHAPES[shape][0], SHAPES[shape][1] * LANES
        if self.lanes:
            self.groups = ceil(many / broad)
        self.lines, self.columns = (wide, narrow) if self.lines_wide else (narrow, wide)
        self.down, self.across = up(self.lines, tall), self.columns if self.lanes else ceil(self.columns / broad)
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
        self.places = problem.places[:: 1 if self.lines_wide else -1]
        width = broad if self.lanes else tall
        panels = self.lines if self.lanes else self.down // tall, self.across
        both = panels[0] * width, self.across * broad
        density = prod(ceil(a / max(1, b)) for a, b in zip(geometry.wide, geometry.narrow, strict=True))
        each = 8 * sum(both[0 if is_wide == self.lines_wide else 1] * (density if is_wide else 1) for is_wide in sides)
        self.boxes, self.values, self.spare = [], 0, 0
        for low, counts in cut(geometry.narrow, each, many * wide * narrow * len(self.taps)):
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
        totals, exact = np.zeros(shape), self.parts == PARTS
        apart = exact or len(self.boxes) > 1
        chains = totals if exact else np.zeros(shape if apart else shape[2:])  # exact sums are one chain
        room = arena_address("panels", 2 * self.values + self.spare)
        for image in range(n):
            sides = [stored(place, image) for place in self.places]  # lines and columns
            given = [*map(address, sides), room, room + 8 * self.values, address(chains), address(totals)]
            call = np.array([*given, int(apart)])
            for boxes in self.boxes:
                if stop():
                    return None
                sum_gradients(self.job, self.taps, boxes, call)
            if apart and not exact:
                with np.errstate(invalid="ignore", over="ignore"):
                    totals += chains
                chains.fill(0)
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
        geometry = Geometry(problem)
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
            tile=tile_address(LEAF if kind == F64 else LEAF_F32),
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
        self.values = sum(rooms)
        self.places = problem.places

    def run(self, stored: Stored, n: int, stop: Stop) -> Array | None:
        totals = np.zeros((self.groups, len(self.taps), *self.parts, LEAF_LANES))
        waiting = LEAF_LANES * (LEAF_TERMS + 64)
        room = arena_address("panels", 2 * (self.values + waiting))
        leaf = room + 8 * self.values
        for image in range(n):
            if stop():
                return None
            sides = [stored(place, image) for place in self.places]
            call = np.array([*map(address, sides), room, room, leaf, address(totals)])
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


@cached
def _gradient(problem: ConvProblem, part: Part, kind: int, parts: int) -> _Gradient:
    return _Gradient(problem, part, kind, parts)


@cached
def _pairs(problem: ConvProblem, part: Part, kind: int) -> _Pairs:
    return _Pairs(problem, part, kind)


def _in_pairs(part: Part) -> bool:
    return prod(high - low for low, high in (part.wide, part.narrow)) <= FEW


def takes_gradient(problem: ConvProblem, part: Part, parts: int) -> bool:
    """Return whether `gradient_sums` has room for a part's images."""
    return parts == PARTS or not _in_pairs(part) or _pairs(problem, part, F64).values <= _MOST_VALUES


def gradient_sums(problem: ConvProblem, part: Part, kind: int, stored: Stored, stop: Stop, parts: int) -> Array | None:
    """Return a part of weight gradients as (parts, groups, taps, wide, narrow channels); None when `stop` said so."""
    if parts == 1 and _in_pairs(part):
        return _pairs(problem, part, kind).run(stored, problem.n, stop)
    return _gradient(problem, part, kind, parts).run(stored, problem.n, stop)
