"""The compiled loops of a forward operation by Winograd's F(2x2, 3x3): transform weights; then tiles, multiply, write.

Everything is addresses, byte steps and tables; nothing is checked here.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.brgemm import Batch, Element
from kernels.emit.compiler import Record, Rows, Vector, jit
from kernels.emit.intrinsics import address_of, fill_zero, stack_array, stack_record
from kernels.emit.winograd import FACTORS, TAPS, put_outputs, transform_taps
from kernels.forward.output import bring_bias, write
from kernels.forward.records import Call, Pass
from kernels.gradient.tiles.records import Block
from kernels.pack.panels import PANEL, Values, pack_panels
from kernels.winograd.tiles import PRODUCTS, VECTOR, WIDTH, Side, TileSlab, multiply, tiles_along, transform_tiles

__all__ = ["KERNEL", "Tiling", "add_products", "transform_filters"]

KERNEL = TAPS * TAPS
BATCH = Batch.dtype


class Tiling(Record):
    """The facts of a unit; sizes are in bytes.

    A group has so many src `channels`, a kernel so many planes (`depths`), whose taps are rotated by 180 degrees if
    `turned`. Outputs are written directly if `in_place`, and otherwise staged first. Sums of a tile's products have
    `c_row`, those of all tiles `c_plane` for each of the 16.
    """

    kind: int
    turned: bool
    channels: int
    depths: int
    in_place: bool
    c_row: int
    c_plane: int


@jit
def transform_filters(
    shares: Rows[Tiling], passes: Rows[Pass], calls: Rows[Call], low: int, high: int, to: int
) -> None:  # fmt: skip
    """Transform the weights of the vectors of dst channels from `low` to `high`, counted through all groups.

    Each becomes a block [product][depth][src channel][lanes]; lanes past the channels hold anything. The call's
    `panels` have room for the taps of a vector as f32, [tap][src channel][lanes].
    """
    share, one, room, panels = shares[0], passes[0], calls[0].panels, stack_array(1, PANEL)
    weights, begin, panel, line = one.weights, calls[0].weights, panels[0], share.channels * VECTOR
    vectors, block = (one.channels + WIDTH - 1) // WIDTH, PRODUCTS * share.depths * line
    counts, steps, places = np.ones(4, np.int64), stack_array(4, np.int64), stack_array(4, np.int64)
    run, other = (3, 2) if weights.tap < weights.src_channel else (2, 3)  # the nearer neighbours are the run
    counts[run], steps[run], places[run] = KERNEL, weights.tap, -line if share.turned else line
    counts[other], steps[other], places[other] = share.channels, weights.src_channel, VECTOR
    for v in range(low, high):
        first = v % vectors * WIDTH
        panel.lanes, panel.valid, panel.source = WIDTH, min(WIDTH, one.channels - first), 0
        panel.unit, panel.address = 1, room + (line * (KERNEL - 1) if share.turned else 0)
        for depth in range(share.depths):
            source = begin + v // vectors * weights.group + first * weights.dst_channel + depth * KERNEL * weights.tap
            src = Values(share.kind, source, steps, weights.dst_channel, begin + weights.nbytes)
            pack_panels(src, panels, counts, places)
            transform_taps(room, line, share.channels, to + (v - low) * block + depth * line, share.depths * line)


@jit
def _put(share: Tiling, call: Call, slab: TileSlab, vector: int, vectors: int, place: Vector) -> None:
    """Turn sums into outputs of some `vectors` of channels.

    `place` has the address of the slab's first output, and the bytes between its frames, lines and columns.
    """
    frames, lines, columns = slab.high[0] - slab.low[0], slab.high[1] - slab.low[1], slab.high[2] - slab.low[2]
    last = tiles_along(slab, 0, FACTORS - 1)
    across, fourth_across = (1, 1) if slab.odd[1] else (columns, columns)
    along, fourth_along = (frames * lines, frames * last) if slab.odd[1] else (1, 1)
    plane, row, source = share.c_plane, share.c_row, call.products + vector * VECTOR
    bias = source + PRODUCTS * plane
    for frame in range(frames):
        for line in range(lines):
            number = (frame * lines + line) * across
            # what the fourth product would add is left out with the line below
            fourth = (frame * last + line) * fourth_across if line < last else 0
            below = line + 1 < lines or slab.odd[0] == 0
            to = place[0] + frame * place[1] + 2 * line * place[2]
            for column in range(columns):
                beside = column + 1 < columns or slab.odd[1] == 0
                other = fourth + (column * fourth_along if line < last else 0)
                put_outputs(
                    source + (number + column * along) * row, source + 12 * plane + other * row, plane, vectors, bias,
                    to + 2 * column * place[3], place[3] if beside else 0, place[2] if below else 0,
                )  # fmt: skip


@jit
def _write(share: Tiling, one: Pass, call: Call, slab: TileSlab) -> None:
    """Turn the sums of a slab into outputs and write them, rounded once."""
    dst, place, counts, buffer = one.dst, stack_array(4, np.int64), stack_array(4, np.int64), stack_array(32, np.int64)
    to, strides, total = call.dst + dst.start, dst.strides, (one.channels + WIDTH - 1) // WIDTH
    to += slab.low[0] * strides[0] + 2 * slab.low[1] * strides[2] + 2 * slab.low[2] * strides[3]
    if share.in_place:
        place[0], place[1], place[2], place[3] = to, strides[0], strides[2], strides[3]
        _put(share, call, slab, 0, total, place)
        return
    counts[0], counts[1] = slab.high[0] - slab.low[0], 1
    counts[2] = 2 * (slab.high[1] - slab.low[1]) - slab.odd[0]
    counts[3] = 2 * (slab.high[2] - slab.low[2]) - slab.odd[1]
    for vector in range(0, total, 2):
        vectors = min(2, total - vector)
        lanes = vectors * WIDTH
        valid = min(lanes, one.channels - vector * WIDTH)
        place[0], place[3] = call.sums, 4 * lanes
        place[2] = counts[3] * place[3]
        place[1] = counts[2] * place[2]
        _put(share, call, slab, vector, vectors, place)
        out = Values(share.kind, to + vector * WIDTH * dst.channel, strides[:], dst.channel, 0)
        write(out, call.sums, lanes, valid, counts, address_of(buffer))


@jit
def add_products(
    table: Vector, sides: Rows[Side], blocks: Rows[Block], slabs: Rows[TileSlab], shares: Rows[Tiling],
    passes: Rows[Pass], calls: Rows[Call], elements: Rows[Element],
) -> None:  # fmt: skip
    """Compute the tiles of some slabs at one depth of dst, in one group.

    `sides` are src for each tap in the first axis that this depth meets, and `elements` what is summed of all panels.
    The call's `weights` are transformed, its `products` hold sums and the bias, its `sums` staged outputs.
    """
    share, one, call, batch, zeros = shares[0], passes[0], calls[0], stack_record(BATCH), stack_array(16, np.int64)
    b_plane, vectors = share.depths * share.channels * VECTOR, (one.channels + WIDTH - 1) // WIDTH
    batch.a_step, batch.b_step, batch.b_vector = 4, VECTOR, PRODUCTS * b_plane
    batch.c_row, batch.totals_row, batch.valid, batch.start = share.c_row, share.c_row, WIDTH, address_of(zeros)
    batch.elements, batch.count = address_of(elements), elements.shape[0]
    bring_bias(share.kind, one, call, 0, 0, vectors * WIDTH, call.products + PRODUCTS * share.c_plane)
    if sides.shape[0] == 0:
        fill_zero(call.products, PRODUCTS * share.c_plane)
    for s in range(slabs.shape[0]):
        slab, frames = slabs[s], slabs[s].high[0] - slabs[s].low[0]
        for product in range(PRODUCTS if sides.shape[0] > 0 else 0):
            y, x = product // FACTORS, product % FACTORS
            for tap in range(sides.shape[0] if x == 0 else 0):
                transform_tiles(sides[tap], blocks, slab, y)
            count = frames * tiles_along(slab, 0, y) * tiles_along(slab, 1, x)
            batch.a_row = sides[0].line
            for vector in range(0, vectors, 2):
                batch.a = sides[0].panels + x * sides[0].plane
                batch.b = call.weights + product * b_plane + vector * batch.b_vector
                batch.c = call.products + product * share.c_plane + vector * VECTOR
                batch.totals = call.products if elements.shape[0] > 1 else 0
                multiply(table, batch, count, min(2, vectors - vector))
        _write(share, one, call, slab)
