"""Weight gradients of the reference: boxes, panels and addresses for the loops."""

from __future__ import annotations

from math import ceil, prod

import numpy as np
import numpy.typing as npt

from kernels.arena import address, arena_address
from kernels.cache import cached
from kernels.chains.geometry import Geometry, Part, Stored, cut, room_of, up
from kernels.chains.loops import Gradient, sum_gradients
from kernels.emit.compiler import row_of
from kernels.emit.doubles import BROAD, EXACT, LANES, LANEWISE, PARTS, SHAPES, TALL, tile_address
from kernels.plan import Stop
from kernels.problem import ConvProblem

__all__ = ["gradient_sums"]

Array = npt.NDArray[np.float64]

_LANEWISE_COST = 1.5
"""What a sum of a lanewise tile costs, which loads all factors, of one that takes each for all lanes."""


@cached
class _Gradient:
    """The loops' view of a part of weight gradients."""

    def __init__(self, problem: ConvProblem, part: Part, kind: int, parts: int) -> None:
        geometry = Geometry(problem)
        wide, narrow = (high - low for low, high in (part.wide, part.narrow))
        self.groups, self.parts = part.groups[1] - part.groups[0], parts
        many, exact = self.groups, parts == PARTS
        choices = []
        for shape in (EXACT,) if exact else (TALL, BROAD, LANEWISE) if many > 1 else (TALL, BROAD):
            tall, broad = SHAPES[shape][0], SHAPES[shape][1] * LANES
            for lines, columns, lines_wide in ((wide, narrow, True), (narrow, wide, False)):
                cost = many * up(lines, tall) * up(columns, broad)
                if shape == LANEWISE:
                    cost = ceil(_LANEWISE_COST * up(many, broad) * up(lines, tall) * columns)
                choices.append((cost, not lines_wide, shape))
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
            lines=sides[self.lines_wide][0],
            columns=sides[not self.lines_wide][0],
            lines_wide=self.lines_wide,
            groups=self.groups,
            strides=geometry.strides,
            tile=tile_address(shape),
            tall=tall,
            parts=parts,
        )
        self.places = problem.places[:: 1 if self.lines_wide else -1]
        density = prod(ceil(a / max(1, b)) for a, b in zip(geometry.wide, geometry.narrow, strict=True))
        widths = {is_wide: int(side["panels"][0] * side["width"][0]) for is_wide, side in sides.items()}
        each = 8 * (widths[True] * density + widths[False])
        self.boxes, self.values, self.spare = [], 0, 0
        for low, counts in cut(geometry.narrow, each, many * wide * narrow * len(self.taps)):
            reached = geometry.reached(low, counts)
            if prod(reached[3:]) == 0:
                continue
            boxes = [reached, [*low, *counts]]
            self.boxes.append(np.array(boxes if self.lines_wide else boxes[::-1], np.int64))
            room = room_of(sides[True], prod(reached[3:])), room_of(sides[False], prod(counts))
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


def gradient_sums(problem: ConvProblem, part: Part, kind: int, stored: Stored, stop: Stop, parts: int) -> Array | None:
    """Return a part of weight gradients as (parts, groups, taps, wide, narrow channels); None when `stop` said so."""
    return _Gradient(problem, part, kind, parts).run(stored, problem.n, stop)
