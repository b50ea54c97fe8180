"""Weight gradients of the reference on the nest of `kernels.gradient.tiles`: all positions of an image are one chain.

Rows of tiles are channels of one tensor, lanes those of the other one, or groups where these have few channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.arena import address
from kernels.cache import cached
from kernels.chains.boxes import Array, Stored, box_of, cut, groups_of, room, steps_of, up
from kernels.chains.units import Part
from kernels.emit.doubles import CHAINS, EXACT, LANES, PARTS, SHAPES, WIDE, chain_table
from kernels.gradient.geometry import Axis, trivial
from kernels.gradient.tiles.driver import walk_doubles
from kernels.gradient.tiles.records import Block, Group, Slab, TileShare
from kernels.gradient.tiles.tables import Rows, split, tap_tables
from kernels.plan import Stop
from kernels.problem import ConvProblem

__all__ = ["gradient_sums"]

Values = npt.NDArray[Any]

_WIDE_COST = 1.5
"""What a sum of a wide tile costs, which loads all factors, of one that takes each for all lanes."""

_BLOCK = 256
"""Positions of a block: a panel of them takes as much as L1, and an image of 14 x 14 is one block."""

_PAD = 8
"""Values that keep positions from lying at powers of two, where they meet in few sets of L1."""


@cached
class _Gradient:
    """Tables for a part of weight gradients."""

    def __init__(self, problem: ConvProblem, part: Part, parts: int) -> None:
        self.problem, self.part, self.parts, shape = problem, part, parts, EXACT if parts == PARTS else CHAINS
        wide, narrow, many = (high - low for low, high in (part.wide, part.narrow, part.groups))
        lanes = self.lanes = LANES * SHAPES[shape][1]
        costs = {
            (False, True): many * wide * up(narrow, lanes),
            (False, False): many * narrow * up(wide, lanes),
            (True, True): _WIDE_COST * wide * narrow * up(many, lanes),
        }
        if parts == PARTS or many == 1:
            del costs[True, True]
        self.by_group, self.lines_wide = min(costs, key=lambda each: costs[each])
        self.lines, columns = (wide, narrow) if self.lines_wide else (narrow, wide)
        shape = WIDE if self.by_group else shape
        self.outer, self.across = (columns, many) if self.by_group else (many, columns)
        self.panels, self.table, limit = ceil(self.across / lanes), chain_table(shape), SHAPES[shape][0]
        row = self.panels * lanes if self.by_group else 1
        self.pitch = self.lines * (row if self.by_group else many) + _PAD
        axes, taps = self._axes(), prod(problem.kernel)
        self._cut(axes, many * wide * narrow * taps)
        self.share, points, line = np.zeros(1, TileShare.dtype), self._points(), 8 * lanes
        share = self.share[0]
        share["block"], share["segment"] = self._block(), 1 << 62
        share["acc_step"], share["scalar_row"] = parts, 8 * row
        for name, of_wide, unit in (("vector", not self.lines_wide, 1), ("scalar", self.lines_wide, 8 * self.pitch)):
            share[name]["steps"] = share[name]["moves"] = steps_of(unit, self.room[of_wide])
            if of_wide:
                share[name]["moves"] *= (1, *(axis.stride for axis in axes))
        rows = Rows(parts * self.lines, parts, 8 * row * np.arange(self.lines), limit)
        sizes, steps = split(self.lines, limit), share["scalar" if self.lines_wide else "vector"]["steps"][1:].tolist()
        self.ranges, self.tiles = tap_tables(rows, axes, steps, [(0, sizes)], not self.lines_wide, len(sizes))
        self.shape = (self.panels, self.outer) if self.by_group else (self.outer, self.panels)
        self.sums = *self.shape, taps, self.lines, parts, lanes
        panel = np.array([1, self.panels] if self.by_group else [self.panels, 1]) * line * points
        self.groups, self.blocks = np.zeros(self.shape[0], Group.dtype), np.zeros(self.shape[1], Block.dtype)
        for table, step, sums in ((self.groups, panel[0], self.sums[1:]), (self.blocks, panel[1], self.sums[2:])):
            number = np.arange(len(table))
            table["panels" if table is self.groups else "panel"], table["acc"] = step * number, 8 * prod(sums) * number
        self.groups["scalars"] = np.arange(self.shape[0]) * 8 * (lanes if self.by_group else self.lines)
        self.blocks["vectors"] = SHAPES[shape][1]

    def _axes(self) -> list[Axis]:
        """Return the axes (d, h, w), all as one if they have one tap each, and note which positions they count."""
        dims, axes = self.problem.dims, []
        self.read: dict[bool, list[slice]] = {True: [], False: []}
        for axis, (size, stride, pad) in enumerate(zip(dims.narrow, dims.strides, dims.pads, strict=True)):
            spans = dims.tap_ranges(axis)
            low, high = spans[0].tolist()
            if dims.kernel[axis] == 1 and low < high:
                wide, narrow = slice(low * stride - pad, (high - 1) * stride - pad + 1, stride), slice(low, high)
                axes.append(trivial(high - low))
            else:
                wide, narrow = slice(None), slice(None)
                shifts = range(-pad, dims.kernel[axis] * dims.dilations[axis] - pad, dims.dilations[axis])
                axes.append(Axis(size, dims.wide[axis], stride, shifts, spans))
            self.read[True].append(wide)
            self.read[False].append(narrow)
        self.flat = all(len(axis.shifts) == 1 and axis.whole for axis in axes)
        return [trivial(1), trivial(1), trivial(prod(axis.size for axis in axes))] if self.flat else axes

    def _cut(self, axes: Sequence[Axis], macs: int) -> None:
        """Cut the narrow positions into boxes, and note the slab of each with its boxes of lines and columns."""
        sizes, groups = [axis.size for axis in axes], self.panels if self.by_group else self.outer
        density = max(1, prod(axis.wide for axis in axes) // max(1, prod(sizes)))
        columns, lines = self.lanes * self.panels * self.outer, self.pitch
        whole = 8 * (columns + density * lines if self.lines_wide else density * columns + lines)
        self.boxes, self.room = [], {True: [1, 1, 1], False: [1, 1, 1]}
        for low, high in cut(sizes, whole // groups, whole, macs):
            narrow = list(zip(low, high, strict=True))
            spans = {True: [axis.window(*span) for axis, span in zip(axes, narrow, strict=True)], False: narrow}
            if any(first == end for first, end in spans[True]):
                continue
            slab = np.zeros(1, Slab.dtype)
            slab["low"], slab["high"] = [0, *low], [1, *high]
            for name, wide in (("scalar", self.lines_wide), ("vector", not self.lines_wide)):
                slab[name]["first"] = [0, *(first for first, _ in spans[wide])]
                slab[name]["sizes"] = [1, *(end - first for first, end in spans[wide])]
                sizes_here = slab[name]["sizes"][0, 1:].tolist()
                self.room[wide] = [*map(max, self.room[wide], sizes_here)]
            self.boxes.append(slab)

    def _block(self) -> tuple[int, int, int, int]:
        """Return the positions of a block: some of a line, some lines, or some planes, so that they follow in order."""
        depth, height, width = self.room[False]
        lines = max(1, _BLOCK // width)
        planes = max(1, _BLOCK // (width * height)) if lines >= height else 1
        return 1, min(depth, planes), min(height, lines), ceil(width / ceil(width / _BLOCK))

    def _points(self) -> int:
        """Return the positions of a panel, an odd number: panels at powers of two would meet in few sets of L1."""
        return prod(self.room[not self.lines_wide]) | 1

    def _view(self, stored: Stored, image: int, *, wide: bool) -> Values:
        """View an image of a tensor as (d, h, w, groups, channels): those of the part, and the positions that meet."""
        some = self.part.wide if wide else self.part.narrow
        found = groups_of(stored(self.problem.places[0 if wide else 1], image), self.problem)
        found = found[*self.read[wide], slice(*self.part.groups), slice(*some)]
        return found.reshape(1, 1, -1, *found.shape[3:]) if self.flat else found

    def _pack_lines(self, box: Values) -> Array:
        """Pack all channels of a position, group by group, or all groups, channel by channel."""
        packed, sizes = room("lines", *self.room[self.lines_wide], self.pitch), box.shape[:3]
        found = packed[tuple(map(slice, sizes))][..., : self.pitch - _PAD]
        if self.by_group:
            found = found.reshape(*sizes, self.lines, -1)
            found[..., : self.across], found[..., self.across :] = box.swapaxes(-1, -2), 0
        else:
            found.reshape(*sizes, *box.shape[3:])[...] = box
        return packed

    def _pack_columns(self, box: Values) -> Array:
        """Pack panels of all positions for each group, or each channel."""
        if self.problem.data_format == "NXC":  # panels would read a few bytes of each position in turn
            box = box.copy()
        sizes, whole = self.room[not self.lines_wide], self.across // self.lanes
        packed = room("panels", self.outer, self.panels, self._points(), self.lanes)
        box = np.moveaxis(box, -1 if self.by_group else -2, 0)
        panels = packed[:, :, : prod(sizes)].reshape(self.outer, self.panels, *sizes, self.lanes)
        (_, depth, height, width), some = box.shape[:4], box[..., : whole * self.lanes]
        panels = panels[:, :, :depth, :height, :width]
        panels[:, :whole] = np.moveaxis(some.reshape(*box.shape[:-1], whole, self.lanes), -2, 1)
        if whole < self.panels:
            rest = self.across - whole * self.lanes
            panels[:, whole, ..., :rest], panels[:, whole, ..., rest:] = box[..., whole * self.lanes :], 0
        return packed

    def run(self, stored: Stored, n: int, stop: Stop) -> Array | None:
        totals, exact = np.zeros(self.sums), self.parts == PARTS
        apart = not exact and len(self.boxes) == 1 and prod(self.room[False]) <= _BLOCK  # all are one block
        chains = totals if exact or apart else np.zeros(self.sums)
        steps = self.share[0]["scalar"]["steps"]
        for image in range(n):
            lines, columns = (self._view(stored, image, wide=wide) for wide in (self.lines_wide, not self.lines_wide))
            for slab in self.boxes:
                if stop():
                    return None
                packed = self._pack_lines(box_of(lines, slab["scalar"]))
                panels = self._pack_columns(box_of(columns, slab["vector"]))
                groups = self.groups.copy()
                groups["scalars"] += address(packed) - int(slab["scalar"]["first"][0] @ steps)
                groups["panels"] += address(panels)
                groups["acc"] += address(chains)
                walk_doubles(self.table, self.share, slab, self.blocks, self.ranges, self.tiles, groups, int(apart))
            if chains is not totals:
                with np.errstate(invalid="ignore", over="ignore"):
                    totals += chains
                chains.fill(0)
        if self.by_group:  # (panel, column, tap, line, part, lane)
            found = totals.transpose(4, 0, 5, 2, 3, 1).reshape(self.parts, -1, *totals.shape[2:4], self.outer)
            found = found[:, : self.across]
        else:
            found = totals.transpose(4, 0, 2, 3, 1, 5).reshape(self.parts, self.outer, *totals.shape[2:4], -1)
            found = found[..., : self.across]
        return found if self.lines_wide else found.swapaxes(3, 4)


def gradient_sums(problem: ConvProblem, part: Part, stored: Stored, stop: Stop, parts: int) -> Array | None:
    """Return a part of weight gradients as (parts, groups, taps, wide, narrow channels); None when `stop` said so."""
    return _Gradient(problem, part, parts).run(stored, problem.n, stop)
