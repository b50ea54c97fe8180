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

    1. groups, whose src is packed as [position][channel]; or some groups, which are lanes
    2. kernel positions, and the dst positions that meet each
    3. vectors of dst channels, or dst channels; tiles of dst positions
"""

from __future__ import annotations

import numpy as np

from kernels.dtypes import KINDS
from kernels.emit.compiler import Record, Rows, Table, Vector, inlined, jit, numbers
from kernels.emit.doubles import ChainLine, ChainRun, ChainTile, move, round_lines, widen_run
from kernels.emit.intrinsics import call_entry, fill_zero
from kernels.forward.output import write
from kernels.pack.panels import Panel, Values, pack_panels

__all__ = [
    "F64", "TERMS", "Gradient", "Operand", "Pixels", "pack_side", "panel_values", "sum_gradients", "sum_pixels",
]  # fmt: skip

F64 = KINDS["f64"]

_GAP = 8
"""Values after a panel that packing may write."""

TERMS = 256
"""Terms after which sums are put aside: their columns take 32 KiB, or 64 where tiles are broad."""

_PANEL, _RUN, _LINE, _TILE = (each.dtype for each in (Panel, ChainRun, ChainLine, ChainTile))


class Operand(Record):
    """A tensor of the dtype `kind` and its layout; `group`, `channel`, `panel` and `strides` are distances in bytes.

    Panels of `width` channels are packed, until all `channels` of a group are. In a `lanewise` operand the lanes of a
    panel are groups: then `channels` is the number of groups, `group` the distance between blocks of `width` groups,
    and each of the `panels` has another channel of its groups. A `turned` operand is packed with its last two axes
    transposed.
    """

    kind: int
    start: int
    nbytes: int
    group: int
    channel: int
    strides: Vector = numbers(3)
    channels: int
    width: int
    panel: int
    panels: int
    lanewise: bool
    turned: bool


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

    A sum has so many `terms` for each kernel position. A line has so many (`across`) tiles. The result is stored as
    `kind`; `steps` are its bytes from part to part, from group to group, from tile to tile, from lane to lane and along
    the axes. With `by_lines` sums of all kernel positions stay in registers.
    """

    src: Operand
    weights: Operand
    bias: Operand
    kind: int
    gathers: bool
    groups: int
    taps: int
    terms: int
    across: int
    strides: Vector = numbers(3)
    steps: Vector = numbers(7)
    tile: int
    tall: int
    parts: int
    by_lines: bool


def panel_values(positions: int, width: int) -> int:
    """Return the values between the beginnings of two panels."""
    return positions * width + _GAP


_span = inlined(panel_values)


@inlined
def _place(box: Vector, d: int, h: int, w: int) -> int:
    """Return the number of a position in a box (see `_pack`)."""
    place: int = ((d - box[0]) * box[4] + h - box[1]) * box[5] + w - box[2]
    return place


@inlined
def _far_place(box: Vector, taps: Table, t: int, strides: Vector, d: int, h: int, w: int) -> int:
    """Return the number in a box of the wide position that a narrow one meets in a tap (see `sum_gradients`)."""
    return _place(box, d * strides[0] + taps[t, 6], h * strides[1] + taps[t, 7], w * strides[2] + taps[t, 8])


@jit
def _pack(side: Operand, base: int, group: int, box: Vector, to: int, spare: int) -> None:
    """Pack a box of positions, of which `box` has the first along each axis and their counts, as float64 panels.

    Lanes past the last channel hold anything.
    """
    values, count = _span(box[3] * box[4] * box[5], side.width), side.panels
    source = base + side.start + group * side.group
    for axis in range(3):
        source += box[axis] * side.strides[axis]
    if side.kind == F64:
        for p in range(count):
            valid = min(side.width, side.channels - (group if side.lanewise else p) * side.width)
            if valid < side.width:
                fill_zero(to + 8 * p * values, 8 * values)
            for c in range(valid):
                place = to + 8 * (p * values + c)
                for d in range(box[3]):
                    for h in range(box[4]):
                        line = source + p * side.panel + c * side.channel + d * side.strides[0] + h * side.strides[1]
                        to_line = place + 8 * side.width * (h if side.turned else h * box[5])
                        step = 8 * side.width * (box[4] if side.turned else 1)
                        for w in range(box[5]):
                            move(line + w * side.strides[2], to_line + w * step)
                    place += 8 * side.width * box[4] * box[5]
        return
    panels, sizes = np.empty(count, _PANEL), np.ones(4, np.int64)
    steps, strides = np.zeros(4, np.int64), np.zeros(4, np.int64)
    step = 4 * side.width
    for axis in range(2, -1, -1):
        sizes[axis + 1], steps[axis + 1], strides[axis + 1] = box[3 + axis], step, side.strides[axis]
        step *= box[3 + axis]
    for place in range(count):
        panel = panels[place]
        first = (group if side.lanewise else place) * side.width
        panel.lanes, panel.valid = side.width, min(side.width, side.channels - first)
        panel.source, panel.address, panel.unit = place * side.panel, spare + 4 * place * values, 1
    pack_panels(Values(side.kind, source, strides, side.channel, base + side.nbytes), panels, sizes, steps)
    if not side.turned:
        widen_run(to, spare, count * values)
        return
    for p in range(count):
        for d in range(box[3]):
            first = p * values + d * box[4] * box[5] * side.width
            for h in range(box[4]):
                for w in range(box[5]):
                    place = to + 8 * (first + (w * box[4] + h) * side.width)
                    widen_run(place, spare + 4 * (first + (h * box[5] + w) * side.width), side.width)


@jit
def pack_side(sides: Rows[Operand], groups: int, base: int, box: Vector, to: int, spare: int) -> None:
    """Pack a box of positions of all groups as panels, those of each group after the other's."""
    side = sides[0]
    for g in range(groups):
        place = to + 8 * g * side.panels * _span(box[3] * box[4] * box[5], side.width)
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
    rows, columns, tall, broad, lanewise = job.lines, job.columns, job.tall, job.columns.width, job.columns.lanewise
    down, across = ((rows.panels + tall - 1) // tall if lanewise else rows.panels), columns.panels
    size = 8 * down * tall * across * broad
    row_values = _span(boxes[0, 3] * boxes[0, 4] * boxes[0, 5], rows.width)
    column_values = _span(boxes[1, 3] * boxes[1, 4] * boxes[1, 5], broad)
    row_panels, column_panels = call[2], call[2] + 8 * rows.panels * row_values
    wide, narrow = (boxes[0], boxes[1]) if job.lines_wide else (boxes[1], boxes[0])
    strides = job.strides[:]
    lines, runs, tiles = np.empty(tall, _LINE), np.empty(TERMS, _RUN), np.empty(1, _TILE)
    begin, end = np.zeros(3, np.int64), np.zeros(3, np.int64)
    tile = tiles[0]
    tile.part = size
    tile.row_step, tile.column_step = 8 * rows.width, 8 * broad
    if job.lines_wide:
        tile.row_step *= strides[2]
    else:
        tile.column_step *= strides[2]
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
                d, h, run = begin[0] + line // high, begin[1] + line % high, runs[count]
                far, near = _far_place(wide, taps, t, strides, d, h, x), _place(narrow, d, h, x)
                run.row = 8 * rows.width * (far if job.lines_wide else near)
                run.column = 8 * broad * (near if job.lines_wide else far)
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
                                if lanewise:
                                    each.row = row_panels + 8 * row_values * min(r * tall + m, rows.panels - 1)
                                each.sums = chains + 8 * broad * ((c * down + r) * tall + m)
                            tile.lines, tile.runs = lines.ctypes.data, runs.ctypes.data
                            call_entry(job.tile, tiles.ctypes.data)
                    terms = count = tile.begins = 0


@jit
def _sum_lines(job: Pixels, taps: Table, borders: Vector, boxes: Table, call: Vector, weights: int, panel: int) -> None:
    """Sum a box line by line, of which stretches between `borders` meet the same kernel positions."""
    source, target, strides, broad, pixel = boxes[0], boxes[1], job.strides[:], job.weights.width, 8 * job.src.width
    positions = target[3] * target[4] * target[5]
    block = 8 * broad * (positions + 1)
    lines, runs, tiles = np.empty(job.tall, _LINE), np.empty(taps.shape[0], _RUN), np.empty(1, _TILE)
    tile = tiles[0]
    tile.begins, tile.ends, tile.part, tile.total = 1, 0, block, 0
    tile.row_step, tile.column_step = 8, 8 * broad
    for line in range(target[3] * target[4]):
        d, h = target[0] + line // target[4], target[1] + line % target[4]
        for border in range(borders.shape[0] - 1):
            first, end = max(borders[border], target[2]), min(borders[border + 1], target[2] + target[5])
            if first >= end:
                continue
            count = 0
            for t in range(taps.shape[0]):
                if taps[t, 0] <= d < taps[t, 3] and taps[t, 1] <= h < taps[t, 4] and taps[t, 2] <= first < taps[t, 5]:
                    run = runs[count]
                    run.row = call[2] + pixel * _far_place(source, taps, t, strides, d, h, first)
                    run.column, run.steps = weights + 8 * broad * job.terms * t, job.terms
                    count += 1
            if count == 0:
                continue
            tile.count = count
            for c in range(job.across):
                sums = call[4] + c * block
                place = sums + 8 * broad * (line * target[5] + first - target[2])
                for at in range(0, end - first, job.tall):
                    for m in range(job.tall):
                        each, x = lines[m], min(at + m, end - first - 1)
                        each.row = pixel * strides[2] * x
                        each.sums = place + 8 * broad * x if at + m < end - first else sums + 8 * broad * positions
                    tile.lines, tile.runs = lines.ctypes.data, runs.ctypes.data
                    call_entry(job.tile, tiles.ctypes.data)
                for i in range(count):
                    moved = runs[i]
                    moved.column += panel


@jit
def sum_pixels(jobs: Rows[Pixels], taps: Table, borders: Vector, boxes: Table, call: Vector) -> None:
    """Compute a box of dst of one image, to which a bias is added if the result is not float64.

    `taps` are those of `sum_gradients`, `boxes` those of src and dst (see `_pack`), `call` the addresses of src, packed
    weights, room for the src, for f32, for sums, of the packed bias and of the result.
    """
    job = jobs[0]
    pixel, broad, tall = 8 * job.src.width, job.weights.width, job.tall
    across, source, target, lanewise = job.across, boxes[0], boxes[1], job.weights.lanewise
    gathers, strides = job.gathers, job.strides[:]
    near_box, far_box = (target, source) if gathers else (source, target)
    step = pixel * (strides[2] if gathers else 1)
    to_step = 8 * broad * (1 if gathers else strides[2])
    panel = 8 * broad * job.taps * job.terms if lanewise else 8 * _span(job.taps * job.terms, broad)
    group = 8 * _span(across * job.taps * job.terms, broad) if lanewise else across * panel
    positions = target[3] * target[4] * target[5]
    part = 8 * broad * (positions + 1)  # sums of what fills the last tile are not read
    block = job.parts * part
    lines, runs, tiles = np.empty(positions + tall, _LINE), np.empty(1, _RUN), np.empty(1, _TILE)
    begin, end = np.zeros(3, np.int64), np.zeros(3, np.int64)
    tile, run = tiles[0], runs[0]
    tile.count, tile.begins, tile.ends, tile.part = 1, 1, 1, part
    tile.row_step = 8 * _span(source[3] * source[4] * source[5], broad) if lanewise else 8
    tile.column_step = 8 * broad
    run.row, run.steps = 0, job.terms
    spare, counts = np.empty(64, np.float32), np.ones(4, np.int64)
    counts[1], counts[2], counts[3] = target[3], target[4], target[5]
    for g in range(job.groups):
        _pack(job.src, call[0], g, source, call[2], call[3])
        fill_zero(call[4], across * block)
        weights = call[1] + g * group
        if job.by_lines:
            _sum_lines(job, taps, borders, boxes, call, weights, panel)
        for t in range(0 if job.by_lines else taps.shape[0]):
            for axis in range(3):
                low, high, stride = target[axis], target[axis] + target[3 + axis], strides[axis]
                if not gathers:
                    low, high = -((taps[t, 6 + axis] - low) // stride), -((taps[t, 6 + axis] - high) // stride)
                begin[axis], end[axis] = max(taps[t, axis], low), min(taps[t, 3 + axis], high)
            count = 0
            for d in range(begin[0], end[0]):
                for h in range(begin[1], end[1]):
                    near, far = _place(near_box, d, h, begin[2]), _far_place(far_box, taps, t, strides, d, h, begin[2])
                    place = call[2] + pixel * (far if gathers else near)
                    sums = call[4] + 8 * broad * (near if gathers else far)
                    for w in range(end[2] - begin[2]):
                        line = lines[count]
                        line.row, line.sums = place + w * step, sums + w * to_step
                        count += 1
            while count % tall:
                line = lines[count]
                line.row, line.sums = call[2], call[4] + 8 * broad * positions
                count += 1
            for c in range(across):
                run.column = weights + c * panel + 8 * broad * job.terms * t
                tile.total = c * block
                for first in range(0, count, tall):
                    tile.lines, tile.runs = lines.ctypes.data + 16 * first, runs.ctypes.data
                    call_entry(job.tile, tiles.ctypes.data)
        result = call[6] + g * job.steps[1]
        for axis in range(3):
            result += target[axis] * job.steps[4 + axis]
        for c in range(across):
            valid = min(broad, job.weights.channels - (g if lanewise else c) * broad)
            sums, place = call[4] + c * block, result + c * job.steps[2]
            if job.kind != F64:
                bias = call[5] + 8 * (g * across + c) * _span(1, broad)
                round_lines(job.kind, call[3], sums, bias, positions)
                out = Values(job.kind, place, job.steps[3:], job.steps[3], 0)
                write(out, call[3], broad, valid, counts, spare.ctypes.data)
                continue
            for p in range(job.parts):
                for d in range(target[3]):
                    for h in range(target[4]):
                        to = place + p * job.steps[0] + d * job.steps[4] + h * job.steps[5]
                        line_sums = sums + p * part + 8 * broad * (d * target[4] + h) * target[5]
                        if job.steps[3] == 8:
                            for w in range(target[5]):
                                for lane in range(valid):
                                    move(line_sums + 8 * (w * broad + lane), to + w * job.steps[6] + 8 * lane)
                        else:
                            for lane in range(valid):
                                for w in range(target[5]):
                                    move(
                                        line_sums + 8 * (w * broad + lane), to + w * job.steps[6] + lane * job.steps[3]
                                    )
