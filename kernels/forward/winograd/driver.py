"""The compiled loops of a forward operation by Winograd's F(2x2, 3x3): transform weights; then tiles, multiply, write.

Everything is addresses, byte steps and tables; nothing is checked here.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.brgemm import Batch, Element
from kernels.emit.compiler import Record, Rows, Vector, jit, numbers
from kernels.emit.intrinsics import address_of, fill_zero, stack_array, stack_record
from kernels.emit.winograd import FACTORS, TAPS, put_outputs, transform_taps
from kernels.forward.output import write
from kernels.gradient.tiles.records import Block
from kernels.pack.panels import PANEL, Values, pack_panels
from kernels.winograd.tiles import PRODUCTS, VECTOR, WIDTH, Side, TileSlab, multiply, tiles_along, transform_tiles

__all__ = ["KERNEL", "Filters", "Outputs", "add_products", "transform_filters"]

KERNEL = TAPS * TAPS
BATCH = Batch.dtype


class Filters(Record):
    """The weights and how they are transformed; sizes and strides are in bytes.

    The taps of a plane are rotated by 180 degrees if `turned`. A group has `src_channels` and `dst_channels`, and a
    kernel `depths` planes. A block of bytes holds the transformed weights of one vector of dst channels,
    [product][depth][src channel][lanes]; each group begins with a new block.
    """

    kind: int
    nbytes: int
    group: int
    dst_channel: int
    src_channel: int
    tap: int
    turned: bool
    src_channels: int
    dst_channels: int
    depths: int


class Outputs(Record):
    """The part of dst that a unit computes of one group; strides and sizes are in bytes.

    `start` is the address of the first position of its first channel. Its `channels` are written directly if
    `in_place`, and otherwise staged first. `strides` are between positions (n, d, h, w) and `channel` between channels.

    Sums of a tile's products have `c_row` bytes, those of all tiles `c_plane` for each of the 16, and transformed
    weights `b_plane`. Then there are addresses: of the group's transformed weights and bias, of sums of products, and
    of staged outputs.
    """

    kind: int
    in_place: bool
    start: int
    strides: Vector = numbers(4)
    channel: int
    channels: int
    c_row: int
    c_plane: int
    b_plane: int
    filters: int
    bias: int
    sums: int
    staged: int


@jit
def transform_filters(filters: Rows[Filters], weights: int, low: int, high: int, room: int, to: int) -> None:
    """Transform the weights of the vectors of dst channels from `low` to `high`, counted through all groups.

    `room` is for the taps of a vector as f32, [tap][src channel][lanes]; lanes past the channels hold anything.
    """
    one, panels = filters[0], stack_array(1, PANEL)
    panel, line = panels[0], one.src_channels * VECTOR
    vectors = (one.dst_channels + WIDTH - 1) // WIDTH
    counts, steps, places = np.ones(4, np.int64), stack_array(4, np.int64), stack_array(4, np.int64)
    by_tap = one.tap < one.src_channel  # the nearer neighbours are the run
    run, other = (3, 2) if by_tap else (2, 3)
    counts[run], steps[run], places[run] = KERNEL, one.tap, -line if one.turned else line
    counts[other], steps[other], places[other] = one.src_channels, one.src_channel, VECTOR
    for v in range(low, high):
        first, block = v % vectors * WIDTH, PRODUCTS * one.depths * line
        panel.lanes, panel.valid, panel.source = WIDTH, min(WIDTH, one.dst_channels - first), 0
        panel.unit, panel.address = 1, room + (line * (KERNEL - 1) if one.turned else 0)
        for depth in range(one.depths):
            source = weights + v // vectors * one.group + first * one.dst_channel + depth * KERNEL * one.tap
            src = Values(one.kind, source, steps, one.dst_channel, weights + one.nbytes)
            pack_panels(src, panels, counts, places)
            transform_taps(room, line, one.src_channels, to + (v - low) * block + depth * line, one.depths * line)


@jit
def _put(slab: TileSlab, dst: Outputs, vector: int, vectors: int, place: Vector) -> None:
    """Turn sums into outputs of some `vectors` of channels.

    `place` has the address of the slab's first output, and the bytes between its frames, lines and columns.
    """
    frames, lines, columns = slab.high[0] - slab.low[0], slab.high[1] - slab.low[1], slab.high[2] - slab.low[2]
    last = tiles_along(slab, 0, FACTORS - 1)
    across, fourth_across = (1, 1) if slab.odd[1] else (columns, columns)
    along, fourth_along = (frames * lines, frames * last) if slab.odd[1] else (1, 1)
    source, bias, plane, row = dst.sums + vector * VECTOR, dst.bias + vector * VECTOR, dst.c_plane, dst.c_row
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
def _write(slab: TileSlab, dst: Outputs) -> None:
    """Turn the sums of a slab into outputs and write them, rounded once."""
    place, counts, buffer = stack_array(4, np.int64), stack_array(4, np.int64), stack_array(32, np.int64)
    to, total = dst.start, (dst.channels + WIDTH - 1) // WIDTH
    to += slab.low[0] * dst.strides[0] + 2 * slab.low[1] * dst.strides[2] + 2 * slab.low[2] * dst.strides[3]
    if dst.in_place:
        place[0], place[1], place[2], place[3] = to, dst.strides[0], dst.strides[2], dst.strides[3]
        _put(slab, dst, 0, total, place)
        return
    counts[0], counts[1] = slab.high[0] - slab.low[0], 1
    counts[2] = 2 * (slab.high[1] - slab.low[1]) - slab.odd[0]
    counts[3] = 2 * (slab.high[2] - slab.low[2]) - slab.odd[1]
    for vector in range(0, total, 2):
        vectors = min(2, total - vector)
        lanes = vectors * WIDTH
        valid = min(lanes, dst.channels - vector * WIDTH)
        place[0], place[3] = dst.staged, 4 * lanes
        place[2] = counts[3] * place[3]
        place[1] = counts[2] * place[2]
        _put(slab, dst, vector, vectors, place)
        out = Values(dst.kind, to + vector * WIDTH * dst.channel, dst.strides[:], dst.channel, 0)
        write(out, dst.staged, lanes, valid, counts, address_of(buffer))


@jit
def add_products(
    table: Vector, sides: Rows[Side], blocks: Rows[Block], slabs: Rows[TileSlab], results: Rows[Outputs],
    elements: Rows[Element],
) -> None:  # fmt: skip
    """Compute the tiles of some slabs at one depth of dst.

    `sides` are src for each tap in the first axis that this depth meets, and `elements` what is summed of all panels.
    """
    dst, batch, zeros = results[0], stack_record(BATCH), stack_array(16, np.int64)
    batch.a_step, batch.b_step, batch.b_vector = 4, VECTOR, PRODUCTS * dst.b_plane
    batch.c_row, batch.totals_row, batch.valid, batch.start = dst.c_row, dst.c_row, WIDTH, address_of(zeros)
    batch.elements, batch.count = address_of(elements), elements.shape[0]
    vectors = (dst.channels + WIDTH - 1) // WIDTH
    if sides.shape[0] == 0:
        fill_zero(dst.sums, PRODUCTS * dst.c_plane)
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
                batch.b = dst.filters + product * dst.b_plane + vector * batch.b_vector
                batch.c = dst.sums + product * dst.c_plane + vector * VECTOR
                batch.totals = dst.sums if elements.shape[0] > 1 else 0
                multiply(table, batch, count, min(2, vectors - vector))
        _write(slab, dst)
