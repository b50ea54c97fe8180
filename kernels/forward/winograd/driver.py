"""The compiled loops of a forward operation by Winograd's F(2x2, 3x3): transform weights; then tiles, multiply, write.

Everything is addresses, byte steps and tables (`kernels.forward.winograd.records`, `kernels.winograd.records`) that
`kernels.forward.winograd.share` has laid out; nothing is checked here.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.brgemm import MICRO, ROWS, Batch, Element
from kernels.emit.compiler import Rows, Vector, jit
from kernels.emit.intrinsics import address_of, call_entry, fill_zero, local, store_value
from kernels.emit.winograd import FACTORS, TAPS, put_outputs, transform_taps
from kernels.forward.output import write
from kernels.forward.winograd.records import Filters, Outputs
from kernels.pack.panels import PANEL, Values, pack_panels
from kernels.target import target
from kernels.winograd.records import PRODUCTS, Channels, Room, Side, TileSlab
from kernels.winograd.tiles import find_window, stage_lines, tiles_along, transform_tiles

__all__ = ["KERNEL", "VECTOR", "WIDTH", "add_products", "transform_filters"]

WIDTH = target().lanes
VECTOR = 4 * WIDTH
KERNEL = TAPS * TAPS
F32_PLACE, ONE, TWO = MICRO["f32"], ROWS["f32"][1], ROWS["f32"][2]
BATCH = Batch.dtype


@jit
def transform_filters(filters: Rows[Filters], weights: int, low: int, high: int, room: int, to: int) -> None:
    """Transform the weights of the vectors of dst channels from `low` to `high`, counted through all groups.

    `room` is for the taps of a vector as f32, [tap][src channel][lanes].
    """
    one, panels = filters[0], local(PANEL)
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
            src = Values(one.kind, source, steps, one.dst_channel, weights + one.nbytes)
            pack_panels(src, panels, counts, places)
            for position in range(KERNEL * one.src_channels if panel.valid < WIDTH else 0):
                for lane in range(panel.valid, WIDTH):
                    store_value(room + position * VECTOR + 4 * lane, np.float32(0))
            place = to + (v - low) * one.block + depth * line
            transform_taps(room, line, one.src_channels, place, one.depths * line)


@jit
def _multiply(table: Vector, slab: TileSlab, dst: Outputs, elements: Rows[Element], room: Room, a_plane: int) -> None:
    """Sum the 16 products of a slab's tiles over all src channels, for all dst channels."""
    batch = local(BATCH)[0]
    batch.a_row, batch.b_vector, batch.c_row, batch.valid = dst.steps.a_row, dst.steps.b_block, dst.steps.c_row, WIDTH
    batch.a_step, batch.b_step = 4, VECTOR
    batch.elements, batch.count, batch.start = address_of(elements[0]), elements.shape[0], room.zeros
    batch.totals = dst.totals if elements.shape[0] > 1 else 0
    frames = slab.high[0] - slab.low[0]
    for product in range(PRODUCTS):
        count = frames * tiles_along(slab, 0, product // FACTORS) * tiles_along(slab, 1, product % FACTORS)
        for vector in range(0, dst.vectors, 2):
            across = min(2, dst.vectors - vector)
            entry, most, batch.totals_row = table[F32_PLACE + across - 1], TWO if across == 2 else ONE, across * VECTOR
            parts = (count + most - 1) // most
            batch.b = dst.filters + product * dst.steps.b_plane + vector * dst.steps.b_block
            for part in range(parts):
                first = count * part // parts
                batch.rows = count * (part + 1) // parts - first
                batch.a = room.panels + product * a_plane + first * dst.steps.a_row
                batch.c = dst.sums + product * dst.steps.plane + first * dst.steps.c_row + vector * VECTOR
                batch.next = batch.c + batch.rows * dst.steps.c_row
                call_entry(entry, address_of(batch))


@jit
def _put(slab: TileSlab, dst: Outputs, vector: int, vectors: int, place: Vector) -> None:
    """Turn sums into outputs of some `vectors` of channels.

    `place` has the address of the slab's first output, and the bytes between its frames, lines and columns.
    """
    frames, lines, columns = slab.high[0] - slab.low[0], slab.high[1] - slab.low[1], slab.high[2] - slab.low[2]
    last = tiles_along(slab, 0, FACTORS - 1)
    across, fourth_across = (1, 1) if slab.odd[1] else (columns, columns)
    along, fourth_along = (frames * lines, frames * last) if slab.odd[1] else (1, 1)
    source, bias, plane, row = dst.sums + vector * VECTOR, dst.bias + vector * VECTOR, dst.steps.plane, dst.steps.c_row
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
def _write(slab: TileSlab, dst: Outputs, place: Vector) -> None:
    """Turn the sums of a slab into outputs and write them, rounded once."""
    to = dst.start + dst.depth * dst.strides[1]
    to += slab.low[0] * dst.strides[0] + 2 * slab.low[1] * dst.strides[2] + 2 * slab.low[2] * dst.strides[3]
    if dst.in_place:
        place[0], place[1], place[2], place[3] = to, dst.strides[0], dst.strides[2], dst.strides[3]
        _put(slab, dst, 0, dst.vectors, place)
        return
    counts = np.empty(4, np.int64)
    counts[0], counts[1] = slab.high[0] - slab.low[0], 1
    counts[2] = 2 * (slab.high[1] - slab.low[1]) - slab.odd[0]
    counts[3] = 2 * (slab.high[2] - slab.low[2]) - slab.odd[1]
    for vector in range(0, dst.vectors, 2):
        vectors = min(2, dst.vectors - vector)
        lanes = vectors * WIDTH
        valid = min(lanes, dst.channels - vector * WIDTH)
        place[0], place[3] = dst.staged, 4 * lanes
        place[2] = counts[3] * place[3]
        place[1] = counts[2] * place[2]
        _put(slab, dst, vector, vectors, place)
        out = Values(dst.kind, to + vector * WIDTH * dst.channel, dst.strides[:], dst.channel, 0)
        write(out, dst.staged, lanes, valid, counts, dst.buffer)


@jit
def add_products(
    table: Vector, sides: Rows[Side], rooms: Rows[Room], channels: Rows[Channels], slabs: Rows[TileSlab],
    results: Rows[Outputs], elements: Rows[Element],
) -> None:  # fmt: skip
    """Compute the tiles of some slabs at one depth of dst.

    `sides` are src for each tap in the first axis that this depth meets, all in one room; `elements` what is summed.
    """
    dst, room, place = results[0], rooms[0], np.empty(4, np.int64)
    for s in range(slabs.shape[0]):
        slab = slabs[s]
        for tap in range(sides.shape[0]):
            side = sides[tap]
            find_window(side, slab, room)
            if side.staged:
                stage_lines(side, channels, slab, room)
            for y in range(FACTORS):
                lines = tiles_along(slab, 0, y)
                if lines > 0:
                    to = room.panels + (PRODUCTS * tap + FACTORS * y) * side.plane
                    transform_tiles(side, channels, slab, room, y, lines, to)
        if sides.shape[0] > 0:
            _multiply(table, slab, dst, elements, room, sides[0].plane)
        else:
            fill_zero(dst.sums, PRODUCTS * dst.steps.plane)
        _write(slab, dst, place)
