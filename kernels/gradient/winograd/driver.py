"""The compiled loops of a Winograd weight gradient: transform a slab of tiles, multiply, turn sums into taps.

Everything is addresses, byte steps and tables (`kernels.winograd.records`) that
`kernels.gradient.winograd.layout` has laid out; nothing is checked here.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.compiler import Floats, Halves, Rows, Table, Vector, jit
from kernels.emit.intrinsics import add_run, address_of, all_finite, call_tile, fill_zero
from kernels.emit.winograd import FACTORS, TAPS, count_taps
from kernels.gradient.tiles.driver import store
from kernels.gradient.tiles.records import Block, Tile, Walk, Weights
from kernels.winograd.records import Channels, Side, TileSlab
from kernels.winograd.tiles import STAGED_LINE, find_window, stage_lines, transform_tiles

__all__ = ["PRODUCTS", "TAKEN_ROWS", "add_products", "add_sums", "write_taps"]

PRODUCTS = FACTORS * FACTORS

TAKEN_ROWS = 64
"""Rows of sums that are turned into taps at a time."""

WALK = Walk.dtype


@jit
def add_products(
    table: Table, sides: Rows[Side], lanes: Rows[Channels], scalars: Rows[Channels], slabs: Rows[TileSlab],
    tiles: Rows[Tile], firsts: Vector, begins: bool, segment: int, tensors: Vector, rooms: Vector,
    sums: int,
) -> None:  # fmt: skip
    """Add slabs of tiles to the sums of all products; the first slab `begins` them.

    `sides` are that of the lanes and that of the scalars, `tensors` their addresses. `rooms` has the addresses of
    staged lines and panels of both and of two vectors of zeros. Register tiles of one vector begin at the first and
    those of two at the second of `firsts`, which ends with the end.
    """
    windows = np.zeros((2, 5), np.int64)
    walks = np.zeros(1, WALK)
    walk = walks[0]  # the loops name the table: that keeps it
    walk.acc_step, walk.segment, walk.panel[2], walk.scalars[2] = 1, segment, 1, STAGED_LINE
    walk.counts[0], walk.counts[1] = 1, 1
    for s in range(slabs.shape[0]):
        slab, new = slabs[s], begins and s == 0
        for i in range(2):
            find_window(sides[i], slab, windows[i])
            if sides[i].staged:
                stage_lines(sides[i], lanes if i == 0 else scalars, slab, windows[i], tensors[i], rooms[i])
        frames, columns = slab.high[0] - slab.low[0], slab.high[2] - slab.low[2]
        for y in range(FACTORS):
            lines = slab.high[1] - slab.low[1] - (1 if y == 3 and slab.odd[0] else 0)
            for i in range(2 if lines > 0 else 0):
                transform_tiles(
                    sides[i], lanes if i == 0 else scalars, slab, windows[i], tensors[i], rooms[i], rooms[2 + i],
                    rooms[4], y, lines,
                )  # fmt: skip
            for x in range(FACTORS):
                walk.counts[2] = frames * lines * (columns - (1 if x == 3 and slab.odd[1] else 0))
                panel, scalar = rooms[2] + x * sides[0].plane, rooms[3] + x * sides[1].plane
                for b in range(lanes.shape[0]):
                    block = lanes[b]
                    to = sums + block.sums + (FACTORS * y + x) * block.plane
                    for t in range(firsts[block.vectors - 1], firsts[block.vectors]):
                        tile = tiles[t]
                        place = to + tile.row * block.line
                        if new:
                            fill_zero(place, tile.rows * block.line)
                        if walk.counts[2] > 0:
                            call_tile(
                                table[block.vectors, tile.rows], address_of(walks[0]), panel + block.panel, scalar,
                                address_of(tile.offsets), place,
                            )  # fmt: skip


@jit
def add_sums(total: int, part: int, count: int) -> None:
    """Add `count` partial sums to others."""
    add_run(total, part, count)


@jit
def write_taps(
    lanes: Rows[Channels], blocks: Rows[Block], layouts: Rows[Weights], sums: int, taps: Floats, out32: Floats,
    out16: Halves,
) -> bool:  # fmt: skip
    """Turn sums into taps and write them to the one layout of the weights, rounding once.

    `blocks` are the lanes as `kernels.gradient.tiles.driver.store` takes them, `taps` is scratch. Returns whether all
    are finite, before they are rounded.
    """
    weights, finite = layouts[0], True
    start, rows = weights.start, weights.channels
    tap_major = weights.channel_rows == 1
    for b in range(lanes.shape[0]):
        block, vectors = lanes[b], lanes[b].vectors
        for first in range(0, rows, TAKEN_ROWS):
            count = min(TAKEN_ROWS, rows - first)
            row_step, tap_step = (block.line, count * block.line) if tap_major else (9 * block.line, block.line)
            place, to = sums + block.sums + first * block.line, taps.ctypes.data
            if tap_major:
                count_taps(place, block.plane, vectors * count, to, tap_step)
            else:
                for row in range(count):
                    count_taps(place + row * block.line, block.plane, vectors, to + row * row_step, tap_step)
            finite = all_finite(to, TAPS * TAPS * count * block.line // 32) and finite
            weights.start, weights.channels = start + first * weights.channel_step, count
            weights.tap_rows = count if tap_major else 1
            store(taps, blocks[b : b + 1], layouts, out32, out16)
    weights.start, weights.channels = start, rows
    return finite
