"""The compiled loops of the reference: products of tensors as matrices, each sum one chain of float64.

Both tensors are widened to float64 as they are packed, once for all kernel positions, and the micro-kernels of
`kernels.emit.doubles` read them at offsets. Only positions that meet are multiplied, so Inf and NaN stay where they
belong. No size here decides bits.

`sum_gradients` has one image, or a box of its narrow positions:

    1. groups, whose channels are packed as panels [position][channels of a tile] of both sides
    2. kernel positions
    3. runs of positions that fill half of L1 with columns
    4. tiles of columns, tiles of lines

`sum_pixels` has one image's dst, or a box of it:

    1. groups, whose src is packed as [position][channel]
    2. kernel positions, and the dst positions that meet each
    3. vectors of dst channels, tiles of dst positions
"""

from __future__ import annotations

import numpy as np

from kernels.emit.brgemm import call_batch
from kernels.emit.compiler import Record, Rows, Table, Vector, jit, numbers
from kernels.emit.doubles import ChainLine, ChainRun, ChainTile, move, widen_run
from kernels.emit.intrinsics import fill_zero
from kernels.pack.panels import Panel, pack_panels

__all__ = ["F64", "Gradient", "Pixels", "Operand", "pack_side", "panel_values", "sum_gradients", "sum_pixels"]

F64 = 3
"""A kind of values besides those of `kernels.pack.panels.KINDS`."""

_GAP = 8
"""Values after a panel that packing may write."""

TERMS = 256
"""Terms after which sums are put aside: their columns take 32 KiB, or 64 where tiles are broad."""

_PANEL, _RUN, _LINE, _TILE = (each.dtype for each in (Panel, ChainRun, ChainLine, ChainTile))


class Operand(Record):
    """A tensor whose values are stored as `kind`: bytes to its first value, all of it, and to the next of each kind.

    Of a group so many `channels` are packed, `width` side by side.
    """

    kind: int
    start: int
    nbytes: int
    group: int
    channel: int
    strides: Vector = numbers(3)
    channels: int
    width: int


class Gradient(Record):
    """Weight gradients: lines of sums are channels of one tensor, columns those of the other one.

    `lines_wide` says that lines belong to the wide tensor (see `kernels.problem.Dims`).
    """

    lines: Operand
    columns: Operand
    lines_wide: bool
    groups: int
    strides: Vector = numbers(3)
    tile: int
    tall: int
    parts: int


class Pixels(Record):
    """A forward operation: lines of sums are dst positions, columns dst channels, whose weights are packed.

    `steps` are the bytes of the result from part to part, from group to group, channel to channel and along the axes.
    """

    src: Operand
    weights: Operand
    gathers: bool
    groups: int
    taps: int
    strides: Vector = numbers(3)
    steps: Vector = numbers(6)
    tile: int
    tall: int
    parts: int


def panel_values(positions: int, width: int) -> int:
    """Return the values between the beginnings of two panels."""
    return positions * width + _GAP


_span = jit(panel_values)


@jit
def _pack(side: Operand, base: int, group: int, box: Vector, to: int, spare: int) -> None:
    """Pack a box of positions, of which `box` has the first along each axis and their counts, as float64 panels.

    Lanes past the last channel hold anything.
    """
    positions, count = box[3] * box[4] * box[5], (side.channels + side.width - 1) // side.width
    values = _span(positions, side.width)
    source = base + side.start + group * side.group
    for axis in range(3):
        source += box[axis] * side.strides[axis]
    if side.kind == F64:
        if side.channels % side.width:
            fill_zero(to + 8 * (count - 1) * values, 8 * values)
        for c in range(side.channels):
            place = to + 8 * (c // side.width * values + c % side.width)
            for d in range(box[3]):
                for h in range(box[4]):
                    line = source + c * side.channel + d * side.strides[0] + h * side.strides[1]
                    for w in range(box[5]):
                        move(line + w * side.strides[2], place)
                        place += 8 * side.width
        return
    panels, sizes = np.empty(count, _PANEL), np.ones(4, np.int64)
    steps, strides = np.zeros(4, np.int64), np.zeros(4, np.int64)
    step = 4 * side.width
    for axis in range(2, -1, -1):
        sizes[axis + 1], steps[axis + 1], strides[axis + 1] = box[3 + axis], step, side.strides[axis]
        step *= box[3 + axis]
    for place in range(count):
        panel = panels[place]
        panel.lanes, panel.valid = side.width, min(side.width, side.channels - place * side.width)
        panel.source, panel.address, panel.unit = place * side.width * side.channel, spare + 4 * place * values, 1
    pack_panels(side.kind, panels, sizes, steps, source, strides, side.channel, base + side.nbytes)
    widen_run(to, spare, count * values)


@jit
def pack_side(sides: Rows[Operand], groups: int, base: int, box: Vector, to: int, spare: int) -> None:
    """Pack a box of positions of all groups as panels, those of each group after the other's."""
    side = sides[0]
    count = (side.channels + side.width - 1) // side.width
    for g in range(groups):
        place = to + 8 * g * count * _span(box[3] * box[4] * box[5], side.width)
        _pack(side, base, g, box, place, spare)


@jit
def sum_gradients(jobs: Rows[Gradient], taps: Table, boxes: Table, call: Vector) -> None:
    """Add to the gradients what a box of an image gives.

    `taps` has for each kernel position the first narrow position that meets it along each axis, the one after the last
    one, and the first position of all in the wide tensor. `boxes` are those of lines and columns (see `_pack`), `call`
    the addresses of lines, columns, panels, of room for f32, of chains and of totals, and whether the box is not the
    whole image: then chains go on, otherwise they are added to the totals, by (group, tap, part, column panel, line).
    """
    job = jobs[0]
    rows, columns, tall, broad = job.lines, job.columns, job.tall, job.columns.width
    down, across = (rows.channels + tall - 1) // tall, (columns.channels + broad - 1) // broad
    size = 8 * down * tall * across * broad
    row_values = _span(boxes[0, 3] * boxes[0, 4] * boxes[0, 5], tall)
    column_values = _span(boxes[1, 3] * boxes[1, 4] * boxes[1, 5], broad)
    row_panels, column_panels = call[2], call[2] + 8 * down * row_values
    wide, narrow = (boxes[0], boxes[1]) if job.lines_wide else (boxes[1], boxes[0])
    lines, runs, tiles = np.empty(tall, _LINE), np.empty(TERMS, _RUN), np.empty(1, _TILE)
    begin, end = np.zeros(3, np.int64), np.zeros(3, np.int64)
    tile = tiles[0]
    tile.part = size
    tile.row_step, tile.column_step = 8 * tall, 8 * broad
    if job.lines_wide:
        tile.row_step *= job.strides[2]
    else:
        tile.column_step *= job.strides[2]
    for g in range(job.groups):
        _pack(rows, call[0], g, boxes[0], row_panels, call[3])
        _pack(columns, call[1], g, boxes[1], column_panels, call[3])
        for t in range(taps.shape[0]):
            for axis in range(3):
                begin[axis] = max(taps[t, axis], narrow[axis])
                end[axis] = min(taps[t, 3 + axis], narrow[axis] + narrow[3 + axis])
            if begin[0] >= end[0] or begin[1] >= end[1] or begin[2] >= end[2]:
                continue
            high, length = end[1] - begin[1], end[2] - begin[2]
            pieces = (length + TERMS - 1) // TERMS
            total = job.parts * size * (g * taps.shape[0] + t)
            chains = call[4] + total * call[6]
            tile.total = call[5] + total - chains
            last = (end[0] - begin[0]) * high * pieces - 1
            terms = count = 0
            tile.begins = 1 - call[6]
            for piece in range(last + 1):
                line, first = piece // pieces, piece % pieces * TERMS
                x = begin[2] + first
                steps = min(TERMS, length - first)
                place = ((begin[0] + line // high) * job.strides[0] + taps[t, 6] - wide[0]) * wide[4]
                place = (place + (begin[1] + line % high) * job.strides[1] + taps[t, 7] - wide[1]) * wide[5]
                place += x * job.strides[2] + taps[t, 8] - wide[2]
                other = (begin[0] + line // high - narrow[0]) * narrow[4] + begin[1] + line % high - narrow[1]
                other = other * narrow[5] + x - narrow[2]
                run = runs[count]
                run.row = 8 * tall * (place if job.lines_wide else other)
                run.column = 8 * broad * (other if job.lines_wide else place)
                run.steps = steps
                count += 1
                terms += steps
                if piece == last or count == TERMS or terms + min(TERMS, length) > TERMS:
                    tile.ends = 1 if piece == last and call[6] == 0 else 0
                    tile.count = count
                    for c in range(across):
                        for i in range(count):
                            moved = runs[i]
                            moved.column += column_panels if c == 0 else 8 * column_values
                        for r in range(down):
                            for m in range(tall):
                                each = lines[m]
                                each.row = row_panels + 8 * (r * row_values + m)
                                each.sums = chains + 8 * broad * ((c * down + r) * tall + m)
                            tile.lines, tile.runs = lines.ctypes.data, runs.ctypes.data
                            call_batch(job.tile, tiles.ctypes.data)
                    terms = count = tile.begins = 0


@jit
def sum_pixels(jobs: Rows[Pixels], taps: Table, boxes: Table, call: Vector) -> None:
    """Compute a box of dst of one image, without a bias.

    `taps` are those of `sum_gradients`, `boxes` those of src and dst (see `_pack`), `call` the addresses of src, packed
    weights, room for the src, for f32, for sums, and of the result.
    """
    job = jobs[0]
    pixel, broad, tall = 8 * job.src.width, job.weights.width, job.tall
    across, source, target = (job.weights.channels + broad - 1) // broad, boxes[0], boxes[1]
    panel = 8 * _span(job.taps * job.src.channels, broad)
    positions = target[3] * target[4] * target[5]
    part = 8 * broad * (positions + 1)  # sums of what fills the last tile are not read
    block = job.parts * part
    lines, runs, tiles = np.empty(positions + tall, _LINE), np.empty(1, _RUN), np.empty(1, _TILE)
    begin, end = np.zeros(3, np.int64), np.zeros(3, np.int64)
    tile, run = tiles[0], runs[0]
    tile.count, tile.begins, tile.ends, tile.part = 1, 1, 1, part
    tile.row_step, tile.column_step = 8, 8 * broad
    run.row, run.steps = 0, job.src.channels
    for g in range(job.groups):
        _pack(job.src, call[0], g, source, call[2], call[3])
        fill_zero(call[4], across * block)
        for t in range(taps.shape[0]):
            for axis in range(3):
                low, high, stride = target[axis], target[axis] + target[3 + axis], job.strides[axis]
                if not job.gathers:
                    low, high = -((taps[t, 6 + axis] - low) // stride), -((taps[t, 6 + axis] - high) // stride)
                begin[axis], end[axis] = max(taps[t, axis], low), min(taps[t, 3 + axis], high)
            count = 0
            for d in range(begin[0], end[0]):
                far = d * job.strides[0] + taps[t, 6]
                from_d, to_d = ((far if job.gathers else d) - source[0]), ((d if job.gathers else far) - target[0])
                for h in range(begin[1], end[1]):
                    far = h * job.strides[1] + taps[t, 7]
                    from_h = from_d * source[4] + (far if job.gathers else h) - source[1]
                    to_h = to_d * target[4] + (h if job.gathers else far) - target[1]
                    far = begin[2] * job.strides[2] + taps[t, 8]
                    place = call[2] + pixel * (from_h * source[5] + (far if job.gathers else begin[2]) - source[2])
                    sums = call[4] + 8 * broad * (to_h * target[5] + (begin[2] if job.gathers else far) - target[2])
                    step = pixel * (job.strides[2] if job.gathers else 1)
                    to_step = 8 * broad * (1 if job.gathers else job.strides[2])
                    for w in range(end[2] - begin[2]):
                        line = lines[count]
                        line.row, line.sums = place + w * step, sums + w * to_step
                        count += 1
            while count % tall:
                line = lines[count]
                line.row, line.sums = call[2], call[4] + 8 * broad * positions
                count += 1
            for c in range(across):
                run.column = call[1] + (g * across + c) * panel + 8 * broad * job.src.channels * t
                tile.total = c * block
                for first in range(0, count, tall):
                    tile.lines, tile.runs = lines.ctypes.data + 16 * first, runs.ctypes.data
                    call_batch(job.tile, tiles.ctypes.data)
        for p in range(job.parts):
            for c in range(job.weights.channels):
                place = call[4] + c // broad * block + p * part + 8 * (c % broad)
                for d in range(target[3]):
                    for h in range(target[4]):
                        to = call[5] + p * job.steps[0] + g * job.steps[1] + c * job.steps[2]
                        to += (target[0] + d) * job.steps[3] + (target[1] + h) * job.steps[4] + target[2] * job.steps[5]
                        for w in range(target[5]):
                            move(place, to + w * job.steps[5])
                            place += 8 * broad
