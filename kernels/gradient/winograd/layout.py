"""How a Winograd weight gradient is laid out: lanes and scalars, slabs of tiles, and where sums lie.

Everything that decides bits depends on the problem alone, not on the lanes of the target: the same problem has the same
bits on AVX2 and AVX-512.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from math import ceil
from typing import Any

import numpy as np

from kernels.blocks import SUMS
from kernels.cache import cached
from kernels.emit.compiler import Records, Vector, values_of
from kernels.gradient.geometry import geometry
from kernels.gradient.roles import role_costs, tile_rows
from kernels.gradient.tiles.tables import firsts_of, row_tiles, split
from kernels.problem import ConvProblem
from kernels.reduction import chunks_of
from kernels.target import target
from kernels.winograd.records import GAP, PRODUCTS, Side
from kernels.winograd.slabs import channel_blocks, cut_slabs, most_positions, side_of, tiles_of
from kernels.winograd.tiles import STAGED_LINE

__all__ = ["Layout", "layout", "side_records"]


@dataclass(frozen=True)
class Layout:
    """The sum of one depth of the kernel, for each depth, in each group.

    `lanes` and `scalars` are channels of one group. Tables of `slabs` have a row for each slab of a depth; `staged`
    are floats of staged lines and `panels` those of panels, of each side.
    """

    lanes_are_wide: bool
    rows: int
    lanes: Records
    scalars: Records
    tiles: Records
    firsts: Vector
    slabs: tuple[Records, ...]
    chunks: int
    staged: tuple[int, int]
    panels: tuple[int, int]
    sides: tuple[tuple[dict[str, Any], dict[str, Any]], ...]

    @cached_property
    def sums_bytes(self) -> int:
        """Bytes of the sums of a group at one depth of the kernel."""
        return int(self.lanes["sums"][-1] + PRODUCTS * self.lanes["plane"][-1])


def _channels(count: int, rows: int, lines: int) -> tuple[Records, int]:
    """Cut channels into blocks and lay their panels out; lanes have `rows` of sums each, scalars none.

    Gives the blocks, and the bytes of a plane of panels of so many `lines`.
    """
    table = channel_blocks(count)
    table["line"] = 4 * target().lanes * table["vectors"] if rows else STAGED_LINE
    table["plane"] = table["line"] * rows + GAP * (rows > 0)
    panels = list(accumulate((table["line"] * (lines + 1)).tolist(), initial=0))
    table["panel"] = panels[:-1]
    table["sums"] = [0, *accumulate((PRODUCTS * table["plane"]).tolist())][:-1]
    return table, panels[-1] + GAP


def _chunks(tiles: int, slabs: int, rows: int, lanes: int) -> int:
    """Choose how many parts of a sum are summed by themselves: more lose fewer digits, and cost passes over sums."""
    return chunks_of(min(slabs, tiles // SUMS.winograd_chunk_tiles, SUMS.winograd_chunked_sums // (rows * lanes)))


@cached
def layout(problem: ConvProblem) -> Layout:
    """Lay the sums out for `problem`, which has broken none of the rules."""
    dims, geo = problem.dims, geometry(problem)
    costs = role_costs(problem, geo)
    lanes_are_wide = costs["wide"] < costs["narrow"]
    counts = dims.narrow_channels, dims.wide_channels
    count, rows = counts[::-1] if lanes_are_wide else counts
    spans = [dims.tap_range(0, tap) for tap in range(dims.kernel[0])]
    tiles = [(0, ceil(size / 2)) for size in dims.narrow[1:]]
    slabs = tuple(
        cut_slabs([(0, dims.n * (high - low)), *tiles], dims.narrow[1:], SUMS.winograd_tiles) for low, high in spans
    )
    most = max((int(tiles_of(table).max()) for table in slabs if len(table)), default=0)
    lanes, lane_plane = _channels(count, rows, most)
    scalars, scalar_plane = _channels(rows, 0, most)
    sides, staged = _sides(problem, spans, lanes_are_wide, (lane_plane, scalar_plane)), [0, 0]
    for side, channels in enumerate((lanes, scalars)):
        if sides[0][side]["staged"]:
            wide = 2 if sides[0][side]["wide"] else 0
            positions = max((most_positions(table, wide) for table in slabs if len(table)), default=0)
            channels["stage"] = STAGED_LINE * positions * np.arange(len(channels))
            staged[side] = STAGED_LINE // 4 * positions * len(channels)
    tables = [_tile_table(scalars, vectors) for vectors in (1, 2)]
    total = max((int(tiles_of(table).sum()) for table in slabs), default=0)
    return Layout(
        lanes_are_wide=lanes_are_wide,
        rows=rows,
        lanes=lanes,
        scalars=scalars,
        tiles=np.concatenate(tables),
        firsts=np.array([0, *np.cumsum([len(table) for table in tables])]),
        slabs=slabs,
        chunks=_chunks(total, min(map(len, slabs)), *counts),
        staged=(staged[0], staged[1]),
        panels=(lane_plane, scalar_plane),  # four planes of f32
        sides=sides,
    )


def _tile_table(scalars: Records, vectors: int) -> Records:
    """Return the tiles for one or two vectors; the scalars of a tile are channels of one panel."""
    cuts = [split(int(valid), tile_rows(int(valid), vectors)) for valid in scalars["valid"]]
    sizes = [*chain(*cuts)]
    places = np.repeat(scalars["panel"] - 4 * scalars["first"], [*map(len, cuts)])
    return row_tiles(firsts_of(sizes), sizes, places + 4 * firsts_of(sizes))


def _sides(
    problem: ConvProblem, spans: Sequence[tuple[int, int]], lanes_are_wide: bool, planes: tuple[int, int]
) -> tuple[tuple[dict[str, Any], dict[str, Any]], ...]:
    """Return the records of both sides for each depth of the kernel, those of the lanes first."""
    dims, found = problem.dims, []
    for tap, (low, high) in enumerate(spans):
        pair = []
        for wide, plane in zip((lanes_are_wide, not lanes_are_wide), planes, strict=True):
            channels, spatial = (dims.wide_channels, dims.wide) if wide else (dims.narrow_channels, dims.narrow)
            side = side_of(problem, channels, spatial, wide=wide, frames=max(1, high - low), first=low, plane=plane)
            side |= {"stride": dims.strides[0] if wide else 1, "pad": dims.pads[1:] if wide else (0, 0)}
            pair.append({**side, "shift": tap * dims.dilations[0] - dims.pads[0] if wide else 0})
        found.append((pair[0], pair[1]))
    return tuple(found)


def side_records(layout: Layout, tap: int, group: int) -> Records:
    """Return the sides of one depth of the kernel and one group."""
    pair = [{**side, "start": group * side["start"]} for side in layout.sides[tap]]
    return np.array([values_of(Side, **side) for side in pair], Side.dtype)
