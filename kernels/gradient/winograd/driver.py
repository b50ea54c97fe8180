"""The compiled loops of a Winograd weight gradient: transform a slab of tiles, multiply, turn sums into taps.

Everything is addresses, byte steps and tables; nothing is checked here.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.brgemm import FLUSH, Batch, Element
from kernels.emit.compiler import Rows, Vector, jit
from kernels.emit.intrinsics import address_of, fill_zero, keep_alive, stack_record
from kernels.emit.winograd import FACTORS, count_taps
from kernels.gradient.tiles.driver import store
from kernels.gradient.tiles.records import Block, Weights
from kernels.winograd.tiles import VECTOR, WIDTH, Side, TileSlab, multiply, tiles_along, transform_tiles

__all__ = ["add_products", "write_taps"]

SEGMENT = 32
"""Tiles that are summed in registers before the sums are added to memory."""

BATCH, ELEMENT = Batch.dtype, Element.dtype


@jit
def add_products(
    table: Vector, sides: Rows[Side], lanes: Rows[Block], scalars: Rows[Block], slabs: Rows[TileSlab], sums: int,
    begins: bool,
) -> None:  # fmt: skip
    """Add slabs of tiles to the sums of all products; `sides` are those of the lanes and of the scalars.

    Each block of lanes has [product][scalar, and one row more][lanes] of f32. The first slab `begins` the sums, or not.
    """
    lane, scalar, batch, last = sides[0], sides[1], stack_record(BATCH), scalars[scalars.shape[0] - 1]
    batch.a_row, batch.a_step, batch.b_step, batch.b_vector = 4, scalar.line, lane.line, VECTOR
    batch.valid, batch.apart, batch.totals = WIDTH, 1, sums
    for s in range(slabs.shape[0]):
        slab, frames = slabs[s], slabs[s].high[0] - slabs[s].low[0]
        elements = np.zeros(frames * tiles_along(slab, 0, 0) * tiles_along(slab, 1, 0) // SEGMENT + 1, ELEMENT)
        batch.elements = address_of(elements)
        for product in range(FACTORS * FACTORS):
            y, x = product // FACTORS, product % FACTORS
            if x == 0:
                transform_tiles(lane, lanes, slab, y)
                transform_tiles(scalar, scalars, slab, y)
            count = frames * tiles_along(slab, 0, y) * tiles_along(slab, 1, x)
            batch.count = (count + SEGMENT - 1) // SEGMENT
            for e in range(batch.count):
                element = elements[e]
                element.a, element.b = e * SEGMENT * scalar.line, e * SEGMENT * lane.line
                element.steps = min(SEGMENT, count - e * SEGMENT)
                element.flush = FLUSH if element.steps == SEGMENT else 0
            for b in range(lanes.shape[0]):
                block = lanes[b]
                row = block.vectors * VECTOR
                batch.b, batch.c_row, batch.totals_row = lane.panels + x * lane.plane + b * lane.block, row, row
                to = sums + block.acc + product * (last.first + last.valid + 1) * row
                for r in range(scalars.shape[0]):
                    rows = scalars[r]
                    batch.a = scalar.panels + x * scalar.plane + r * scalar.block
                    batch.c = to + rows.first * row
                    if begins and s == 0:
                        fill_zero(batch.c, rows.valid * row)
                    if count > 0:
                        multiply(table, batch, rows.valid, block.vectors)
        keep_alive(elements)


@jit
def write_taps(lanes: Rows[Block], layouts: Rows[Weights], sums: int, taps: int, out: int) -> None:
    """Turn sums into taps and write them to the one layout of the weights, rounding once.

    `out` is the address of the weights, and `taps` that of scratch for one block of lanes.
    """
    weights, rows = layouts[0], layouts[0].channels
    for b in range(lanes.shape[0]):
        block, line = lanes[b], lanes[b].vectors * VECTOR
        for row in range(rows):
            place, to = sums + block.acc + row * line, taps + row * weights.channel_rows * line
            count_taps(place, (rows + 1) * line, block.vectors, to, weights.tap_rows * line)
        store(taps - block.acc, lanes[b : b + 1], layouts, out)
