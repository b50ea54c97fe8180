"""The compiled loops of a Winograd weight gradient: transform a slab of tiles, multiply, turn sums into taps.

Everything is addresses, byte steps and tables (`kernels.winograd.records`) that
`kernels.gradient.winograd.layout` has laid out; nothing is checked here.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.brgemm import FLUSH, MICRO, Batch, Element
from kernels.emit.compiler import Record, Rows, Vector, jit, numbers
from kernels.emit.intrinsics import address_of, call_entry, fill_zero, keep_alive, local
from kernels.emit.winograd import FACTORS, count_taps
from kernels.gradient.tiles.driver import store
from kernels.gradient.tiles.records import Block, Tile, Weights
from kernels.winograd.records import Channels, Room, Side, TileSlab
from kernels.winograd.tiles import STAGED_LINE, WIDTH, find_window, stage_lines, tiles_along, transform_tiles

__all__ = ["TAKEN_ROWS", "ProductRun", "add_products", "write_taps"]

TAKEN_ROWS = 64
"""Rows of sums that are turned into taps at a time."""

SEGMENT = 32
"""Tiles that are summed in registers before the sums are added to memory."""

F32_PLACE, VECTOR = MICRO["f32"], STAGED_LINE // 2
BATCH, ELEMENT = Batch.dtype, Element.dtype


class ProductRun(Record):
    """Sums of products from the address `sums` on; the first slab may begin them.

    Tiles of one vector begin at the first and those of two at the second of `firsts`, which ends with the end.
    """

    begins: bool
    firsts: Vector = numbers(3)
    sums: int


@jit
def add_products(
    table: Vector, runs: Rows[ProductRun], sides: Rows[Side], rooms: Rows[Room], lanes: Rows[Channels],
    scalars: Rows[Channels], slabs: Rows[TileSlab], tiles: Rows[Tile],
) -> None:  # fmt: skip
    """Add slabs of tiles to the sums of all products; `sides` and `rooms` are those of the lanes and of the scalars."""
    run, batch, most = runs[0], local(BATCH)[0], 0
    for s in range(slabs.shape[0]):
        most = max(
            most, (slabs[s].high[0] - slabs[s].low[0]) * tiles_along(slabs[s], 0, 0) * tiles_along(slabs[s], 1, 0)
        )
    elements = np.zeros(most // SEGMENT + 1, ELEMENT)
    batch.a_row, batch.a_step, batch.b_vector, batch.valid, batch.apart = 4, STAGED_LINE, VECTOR, WIDTH, 1
    batch.elements = address_of(elements)
    for s in range(slabs.shape[0]):
        slab, new = slabs[s], run.begins and s == 0
        for i in range(2):
            find_window(sides[i], slab, rooms[i])
            if sides[i].staged:
                stage_lines(sides[i], lanes if i == 0 else scalars, slab, rooms[i])
        frames = slab.high[0] - slab.low[0]
        for y in range(FACTORS):
            lines = tiles_along(slab, 0, y)
            for i in range(2 if lines > 0 else 0):
                transform_tiles(sides[i], lanes if i == 0 else scalars, slab, rooms[i], y, lines, rooms[i].panels)
            for x in range(FACTORS):
                count = frames * lines * tiles_along(slab, 1, x)
                batch.count = (count + SEGMENT - 1) // SEGMENT
                panel, scalar = rooms[0].panels + x * sides[0].plane, rooms[1].panels + x * sides[1].plane
                for b in range(lanes.shape[0]):
                    block = lanes[b]
                    batch.b, batch.b_step, batch.c_row = panel + block.panel, block.line, block.line
                    batch.totals_row = block.line
                    for e in range(batch.count):
                        element = elements[e]
                        element.a, element.b = e * SEGMENT * STAGED_LINE, e * SEGMENT * block.line
                        element.steps = min(SEGMENT, count - e * SEGMENT)
                        element.flush = FLUSH if element.steps == SEGMENT else 0
                    to = run.sums + block.sums + (FACTORS * y + x) * block.plane
                    for t in range(run.firsts[block.vectors - 1], run.firsts[block.vectors]):
                        tile = tiles[t]
                        place = to + tile.row * block.line
                        if new:
                            fill_zero(place, tile.rows * block.line)
                        if count > 0:
                            batch.rows, batch.a = tile.rows, scalar + tile.offsets[0]
                            batch.c = batch.next = batch.totals = place
                            call_entry(table[F32_PLACE + block.vectors - 1], address_of(batch))
    keep_alive(elements)


@jit
def write_taps(
    lanes: Rows[Channels], blocks: Rows[Block], layouts: Rows[Weights], sums: int, taps: int, out: int
) -> None:
    """Turn sums into taps and write them to the one layout of the weights, rounding once.

    `blocks` are the lanes as `kernels.gradient.tiles.driver.store` takes them, `out` is the address of the weights and
    `taps` that of scratch.
    """
    weights = layouts[0]
    start, rows = weights.start, weights.channels
    tap_major = weights.channel_rows == 1
    for b in range(lanes.shape[0]):
        block, vectors = lanes[b], lanes[b].vectors
        for first in range(0, rows, TAKEN_ROWS):
            count = min(TAKEN_ROWS, rows - first)
            row_step, tap_step = (block.line, count * block.line) if tap_major else (9 * block.line, block.line)
            place = sums + block.sums + first * block.line
            if tap_major:
                count_taps(place, block.plane, vectors * count, taps, tap_step)
            else:
                for row in range(count):
                    count_taps(place + row * block.line, block.plane, vectors, taps + row * row_step, tap_step)
            weights.start, weights.channels = start + first * weights.channel_step, count
            weights.tap_rows = count if tap_major else 1
            store(taps, blocks[b : b + 1], layouts, out)
    weights.start, weights.channels = start, rows
