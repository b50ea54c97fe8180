"""The compiled loops of a forward operation by Winograd's F(2x2, 3x3): transform weights; then tiles, multiply, write.

Everything is addresses, byte steps and tables (`kernels.forward.winograd.records`, `kernels.winograd.records`) that
`kernels.forward.winograd.share` has laid out; nothing is checked here.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.brgemm import KINDS, ROWS, Batch, Element, call_batch
from kernels.emit.compiler import Rows, Vector, jit
from kernels.emit.intrinsics import address_of, all_finite, fill_zero, store_value
from kernels.emit.winograd import FACTORS, TAPS, put_outputs, transform_taps
from kernels.forward.output import write
from kernels.forward.winograd.records import Filters, Outputs
from kernels.pack.panels import PANEL, pack_panels
from kernels.target import target
from kernels.winograd.records import Channels, Side, TileSlab
from kernels.winograd.tiles import STAGED_LINE, find_window, stage_lines, transform_tiles

__all__ = ["PRODUCTS", "add_products", "transform_filters"]

WIDTH = target().lanes
VECTOR = 4 * WIDTH
PRODUCTS, KERNEL = FACTORS * FACTORS, TAPS * TAPS
F32_PLACE, ONE, TWO = KINDS["f32"], ROWS["f32"][1], ROWS["f32"][2]
BATCH = Batch.dtype


@jit
def transform_filters(filters: Rows[Filters], weights: int, low: int, high: int, room: int, to: int) -> None:
    """Transform the weights of the vectors of dst channels from `low` to `high`, counted through all groups.

    `room` is for the taps of a vector as f32, [tap][src channel][lanes].
    """
    one, panels = filters[0], np.empty(1, PANEL)
    panel, line = panels[0], one.src_channels * VECTOR
    vectors = (one.dst_channels + WIDTH - 1) // WIDTH
    counts, steps, places = np.ones(4, np.int64), np.zeros(4, np.int64), np.zeros(4, np.int64)
    by_tap = one.tap < one.src_channel  # the nearer neighbours are the run
    run, other = (3, 2) if by_tap else (2, 3)
    counts[run], steps[run], places[run] = KERNEL, one.tap, -line if one.turned else line
    counts[other], steps[other], places[other] = one.src_channels, one.src_channel, VECTOR
    for v in range(low, high):
        first = v % vectors * WIDTH
        panel.lanes, panel.valid, panel.source = WIDTH, min(WIDTH, one.dst_channels - first), 0
        panel.unit, panel.address = 1, room + (line * (KERNEL - 1) if one.turned else 0)
        for depth in range(one.depths):
            source = weights + v // vectors * one.group + first * one.dst_channel + depth * KERNEL * one.tap
            pack_panels(one.kind, panels, counts, places, source, steps, one.dst_channel, weights + one.nbytes)
            for position in range(KERNEL * one.src_channels if panel.valid < WIDTH else 0):
                for lane in range(panel.valid, WIDTH):
                    store_value(room + position * VECTOR + 4 * lane, np.float32(0))
            place = to + (v - low) * one.block + depth * line
            transform_taps(room, line, one.src_channels, place, one.depths * line)


@jit
def _multiply(
    table: Vector, slab: TileSlab, dst: Outputs, elements: Rows[Element], a: int, a_plane: int, b: int, vectors: int,
    zeros: int, totals: int, sums: int,
) -> None:  # fmt: skip
    """Sum the 16 products of a slab's tiles and one or two `vectors` of dst channels over all src channels."""
    batches = np.zeros(1, BATCH)
    batch = batches[0]
    batch.a_row, batch.b_vector, batch.c_row, batch.valid = dst.a_row, dst.b_block, STAGED_LINE, WIDTH
    batch.elements, batch.count, batch.start = address_of(elements[0]), elements.shape[0], zeros
    batch.totals = totals if elements.shape[0] > 1 else 0
    most = TWO if vectors == 2 else ONE
    frames, columns = slab.high[0] - slab.low[0], slab.high[2] - slab.low[2]
    for product in range(PRODUCTS):
        count = frames * _lines(slab, product // FACTORS) * (columns - (1 if product % 4 == 3 and slab.odd[1] else 0))
        for first in range(0, count, most):
            batch.rows = min(most, count - first)
            batch.a = a + product * a_plane + first * dst.a_row
            batch.b = b + product * dst.b_plane
            batch.c = sums + product * dst.plane + first * STAGED_LINE
            call_batch(table[F32_PLACE + vectors - 1], address_of(batch))


@jit
def _lines(slab: TileSlab, product: int) -> int:
    """Count the lines of tiles that have a vertical product: the last one of an odd image lacks the fourth.

    With several images all have it, so that tiles lie at the same places for every product.
    """
    lines: int = slab.high[1] - slab.low[1]
    return lines - 1 if product == FACTORS - 1 and slab.odd[0] and slab.high[0] - slab.low[0] == 1 else lines


@jit
def _put(
    slab: TileSlab, dst: Outputs, vectors: int, first: int, bias: int, depth: int, sums: int, outputs: int, spare: int
) -> bool:
    """Turn sums into outputs and write them, rounded once; return whether all are finite before that."""
    frames, lines, columns = slab.high[0] - slab.low[0], slab.high[1] - slab.low[1], slab.high[2] - slab.low[2]
    height, width = 2 * lines - slab.odd[0], 2 * columns - slab.odd[1]
    last = _lines(slab, FACTORS - 1)
    pixel = vectors * VECTOR
    for frame in range(frames):
        for line in range(lines):
            for column in range(columns):
                number, fourth = frame * lines + line, frame * last + line
                if slab.odd[1]:  # column after column
                    number, fourth = column * frames * lines + number, column * frames * last + fourth
                else:
                    number, fourth = number * columns + column, fourth * columns + column
                place = sums + number * STAGED_LINE
                # what the fourth product would add is left out with the line below
                fourth_place = sums + 12 * dst.plane + (fourth if line < last else 0) * STAGED_LINE
                to = outputs + ((frame * height + 2 * line) * width + 2 * column) * pixel
                beside, below = 2 * column + 1 < width, 2 * line + 1 < height
                put_outputs(
                    place, fourth_place, dst.plane, vectors, bias, to, to + pixel if beside else spare,
                    to + width * pixel if below else spare, to + (width + 1) * pixel if beside and below else spare,
                )  # fmt: skip
    values = frames * height * width * vectors * WIDTH
    fill_zero(outputs + 4 * values, 32)
    counts = np.empty(4, np.int64)
    counts[0], counts[1], counts[2], counts[3] = frames, 1, height, width
    to = dst.start + first * dst.channel + depth * dst.strides[1]
    to += slab.low[0] * dst.strides[0] + 2 * slab.low[1] * dst.strides[2] + 2 * slab.low[2] * dst.strides[3]
    valid = min(vectors * WIDTH, dst.channels - first)
    write(dst.kind, outputs, vectors * WIDTH, valid, counts, to, dst.strides[:], dst.channel, spare)
    return all_finite(outputs, (values + 7) // 8)  # type: ignore[no-any-return]


@jit
def add_products(
    table: Vector, sides: Rows[Side], channels: Rows[Channels], slabs: Rows[TileSlab], results: Rows[Outputs],
    elements: Rows[Element], depth: int, tensors: Vector, rooms: Vector,
) -> bool:  # fmt: skip
    """Compute the tiles of some slabs at one `depth` of dst; return whether all outputs are finite.

    `sides` are src for each tap in the first axis that this depth meets, `elements` what is then summed. `tensors` has
    the addresses of src, and of the unit's transformed weights and bias in this group; `rooms` those of staged lines,
    transformed tiles, sums of products, outputs, two vectors of zeros, a second set of sums, and 64 spare f32.
    """
    dst, finite = results[0], True
    stage, tiles, sums, outputs = rooms[0], rooms[1], rooms[2], rooms[3]
    zeros, totals, spare = rooms[4], rooms[5], rooms[6]
    window = np.zeros(5, np.int64)
    for s in range(slabs.shape[0]):
        slab = slabs[s]
        for tap in range(sides.shape[0]):
            side = sides[tap]
            find_window(side, slab, window)
            if side.staged:
                stage_lines(side, channels, slab, window, tensors[0], stage)
            for y in range(FACTORS):
                lines = _lines(slab, y)
                to = tiles + (PRODUCTS * tap + FACTORS * y) * side.plane
                if lines > 0:
                    transform_tiles(side, channels, slab, window, tensors[0], stage, to, zeros, y, lines)
        for first in range(0, dst.channels, 2 * WIDTH):
            vectors = min(2, (dst.channels - first + WIDTH - 1) // WIDTH)
            if sides.shape[0] > 0:
                b = tensors[1] + first // WIDTH * dst.b_block
                _multiply(table, slab, dst, elements, tiles, sides[0].plane, b, vectors, zeros, totals, sums)
            else:
                fill_zero(sums, PRODUCTS * dst.plane)
            bias = tensors[2] + 4 * first
            finite = _put(slab, dst, vectors, first, bias, depth, sums, outputs, spare) and finite
    return finite
