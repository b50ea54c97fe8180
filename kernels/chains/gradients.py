"""Weight gradients of the reference on the nest of `kernels.gradient.tiles`: all positions of an image are one chain.

Rows of tiles are channels of one tensor, lanes those of the other one, or groups where these have few channels.
"""

from __future__ import annotations

from math import ceil, prod

import numpy as np

from kernels.arena import address, arena_address
from kernels.cache import cached
from kernels.chains.boxes import Array, Stored, cut, operand, room_of, together, up
from kernels.chains.units import Part
from kernels.emit.doubles import CHAINS, EXACT, LANES, PARTS, SHAPES, WIDE, chain_table
from kernels.gradient.geometry import geometry
from kernels.gradient.tiles.driver import add_doubles
from kernels.gradient.tiles.records import Block, Slab
from kernels.gradient.tiles.tables import row_tiles, tap_ranges
from kernels.pack.doubles import packed_values
from kernels.plan import Stop
from kernels.problem import ConvProblem, wrapped

__all__ = ["gradient_sums"]

_WIDE_COST = 1.5
"""What a sum of a wide tile costs, which loads all factors, of one that takes each for all lanes."""

_LEAST_ROWS = 4
"""Rows that a tile takes as long as: its multiply-adds wait for each other."""

_ALONE = 1 << 62
"""Values of an image that shares a call with no other."""


@cached
class _Gradient:
    """Tables for a part of weight gradients."""

    def __init__(self, problem: ConvProblem, part: Part, kind: int, parts: int) -> None:
        geo = geometry(problem, images=1)
        axes, self.parts, shape = geo.axes[1:], parts, EXACT if parts == PARTS else CHAINS
        wide, narrow, many = (high - low for low, high in (part.wide, part.narrow, part.groups))
        broad, letters = LANES * SHAPES[shape][1], problem.letters
        rows_last = problem.weights_format.index(letters[0]) > problem.weights_format.index(letters[1])
        choices = [
            (cost, lines_wide == rows_last, lines_wide, lanewise)
            for lines, columns, lines_wide in ((wide, narrow, True), (narrow, wide, False))
            for lanewise, cost in (
                (False, many * max(_LEAST_ROWS, lines) * up(columns, broad)),
                (True, ceil(_WIDE_COST * up(many, broad) * max(_LEAST_ROWS, lines) * columns)),
            )
            if not lanewise or (many > 1 and parts != PARTS)
        ]
        _, _, self.lines_wide, lanewise = min(choices)
        shape, self.many = WIDE if lanewise else shape, many if lanewise else 0
        self.lines, self.columns = (wide, narrow) if self.lines_wide else (narrow, wide)
        self.table, tall = chain_table(shape), SHAPES[shape][0]
        rows = ceil(self.lines / ceil(self.lines / tall))
        density = prod(ceil(axis.wide / max(1, axis.size)) for axis in axes)
        each, slabs, room = 8 * (density * up(wide, broad) + up(narrow, broad)), [], {True: [1] * 3, False: [1] * 3}
        for low, high in cut([axis.size for axis in axes], each, many * wide * narrow * prod(problem.kernel)):
            windows = [axis.window(*span) for axis, span in zip(axes, zip(low, high, strict=True), strict=True)]
            boxes = {
                True: ([0, *(first for first, _ in windows)], [1, *(end - first for first, end in windows)]),
                False: ([0, *low], [1, *(end - first for first, end in zip(low, high, strict=True))]),
            }
            if prod(boxes[True][1]) == 0:
                continue
            room = {is_wide: [*map(max, room[is_wide], boxes[is_wide][1][1:])] for is_wide in room}
            slabs.append(([0, *low], [1, *high], boxes[not self.lines_wide], boxes[self.lines_wide]))
        self.slabs = [np.array([tuple(map(tuple, each))], Slab.dtype) for each in slabs]
        sides = []
        for is_wide in (self.lines_wide, not self.lines_wide):
            tensor, some = (geo.wide, part.wide) if is_wide else (geo.narrow, part.narrow)
            count = prod((problem.src_shape if is_wide != problem.transposed else problem.dst_shape)[1:])
            width = rows if is_wide == self.lines_wide and not lanewise else broad
            sides.append(operand(tensor, kind, count, (part.groups, some), width, room[is_wide], lanewise=lanewise))
        self.operands = np.concatenate(sides)
        lines, columns = self.operands
        self.places = problem.places[:: 1 if self.lines_wide else -1]
        rooms = [*map(room_of, self.operands)]
        self.rooms, self.staging = (0, rooms[0], sum(rooms)), max(rooms)
        unit, side, moved = (8 * int(lines["width"]), lines, "scalar") if self.lines_wide else (1, columns, "line")
        self.ranges = tap_ranges(axes, [unit * step for step in side["steps"][1:].tolist()], moved)
        across = range(columns["panels"])
        self.shape = int(lines["groups"]), len(self.ranges), len(across), self.lines | 1, parts, broad
        self.facts = wrapped([parts, 8 * prod(self.shape[1:]), self.lines_wide, *(axis.stride for axis in axes)])
        firsts = np.arange(0, self.lines, rows)
        offsets = 8 * packed_values(lines["positions"], lines["width"]) * (firsts if lanewise else firsts // rows)
        self.tiles = row_tiles(parts * firsts, np.minimum(rows, self.lines - firsts), offsets)
        self.ranges["last"], self.ranges["row"] = len(firsts), np.arange(len(self.ranges)) * prod(self.shape[2:5])
        panel, sums = 8 * packed_values(columns["positions"], broad), 8 * prod(self.shape[3:])
        self.blocks = np.array([(0, 0, SHAPES[shape][1], 0, sums * c, panel * c) for c in across], Block.dtype)
        self.image_sums = parts == 1 and len(slabs) == 1
        values = prod(problem.src_shape[1:]) + prod(problem.dst_shape[1:])
        macs = many * wide * narrow * len(self.ranges) * prod(axis.size for axis in axes)
        self.image = _ALONE if len(slabs) > 1 else values, macs

    def run(self, stored: Stored, n: int, stop: Stop) -> Array | None:
        totals = np.zeros(self.shape)
        adds = self.parts == 1 and not self.image_sums  # each image is summed by itself, unless sums are exact
        chains = np.zeros(self.shape) if adds else totals
        room = arena_address("panels", 2 * self.rooms[2] + self.staging)
        for images in together(range(n), *self.image):
            sides = [stored(place, images) for place in self.places]  # rows and columns
            rooms, count = (room + 8 * at for at in self.rooms), images.stop - images.start
            call = np.array([*map(address, sides), *rooms, address(chains), self.image_sums, count])
            for slab in self.slabs:
                if stop():
                    return None
                add_doubles(self.table, self.facts, self.operands, slab, self.blocks, self.ranges, self.tiles, call)
            if adds:
                with np.errstate(invalid="ignore", over="ignore"):
                    totals += chains
                chains.fill(0)
        found = totals[:, :, :, : self.lines].transpose(4, 0, 1, 3, 2, 5)  # (part, group, tap, line, panel, lane)
        if self.many:
            found = found.transpose(0, 1, 5, 2, 3, 4).reshape(self.parts, -1, *found.shape[2:5])[:, : self.many]
        else:
            found = found.reshape(*found.shape[:4], -1)[..., : self.columns]
        return found if self.lines_wide else found.swapaxes(3, 4)


def gradient_sums(problem: ConvProblem, part: Part, kind: int, stored: Stored, stop: Stop, parts: int) -> Array | None:
    """Return a part of weight gradients as (parts, groups, taps, wide, narrow channels); None when `stop` said so."""
    return _Gradient(problem, part, kind, parts).run(stored, problem.n, stop)
