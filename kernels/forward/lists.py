"""Batches for the micro-kernels: which taps a tile of dst pixels sums, and where their src lies.

Along three axes positions that meet the same taps share a batch (a class). Along the fourth, the rows of a tile, taps
that the first or last rows do not meet leave these rows out, up to `SKIPS` of them; otherwise the tile is shorter. So
the positions of the padding are never multiplied, and no tile is cut for the sake of the bits.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.brgemm import FLUSH, FLUSH_FIRST, MICRO, Batch, Element
from kernels.emit.compiler import Rows, inlined, jit
from kernels.emit.intrinsics import address_of, call_entry
from kernels.forward.records import GatherShare, Lists, Phase, Piece, Tables, Tap, Work
from kernels.target import target

__all__ = ["list_class", "list_room", "list_rows", "sum_lines", "sum_lists"]

WIDTH, PAIRS = target().lanes, MICRO["pairs"]
ELEMENT, PIECE = Element.dtype, Piece.dtype


@inlined
def list_room(tables: Tables, parts: int) -> Lists:
    """Return room for the list of a tile, in which each tap has up to `parts` elements."""
    axes, most, elements = tables.axes, 1, parts
    for axis in range(4):
        taps = 1
        for number in range(axes[axis].first, axes[axis].first + axes[axis].phases):
            taps = max(taps, tables.phases[number].taps)
        most, elements = max(most, taps), elements * taps
    return Lists(np.empty(4 * most, PIECE), np.empty(elements, ELEMENT))


@jit
def list_class(taps: Rows[Tap], phase: Phase, src_step: int, at: int, end: int, pieces: Rows[Piece]) -> tuple[int, int]:
    """List the taps that position `at` of a phase meets.

    Give their number, and where the positions end that meet the same ones, `end` at the latest.
    """
    count = 0
    for place in range(phase.first, phase.first + phase.taps):
        tap = taps[place]
        if at < tap.low:
            end = min(end, tap.low)
        elif at < tap.high:
            piece = pieces[count]
            piece.number, piece.src, piece.case = tap.number, tap.src + (at - tap.low) * src_step, 0
            end = min(end, tap.high)
            count += 1
    return count, end


@jit
def list_rows(
    taps: Rows[Tap], phase: Phase, src_step: int, at: int, end: int, limit: int, skips: int, pieces: Rows[Piece]
) -> tuple[int, int, int]:
    """Cut a tile from the positions `at` to `end` of a phase; list its taps, each of which may skip `skips` rows.

    Give its rows, the number of tiles of these rows and taps that follow each other, and the number of taps, 0 for rows
    that meet none. Rows up to the end differ by one where nothing else cuts them.
    """
    tiles = (end - at + limit - 1) // limit
    rows = (end - at + tiles - 1) // tiles
    most, same, meets = rows, end, False
    for place in range(phase.first, phase.first + phase.taps):
        low, high = taps[place].low, taps[place].high
        if high <= at:
            continue
        if low > at:
            same = min(same, low)
            if low - at > skips:
                most = min(most, low - at)
        else:
            same, meets = min(same, high), True
        if high < at + rows:
            most = min(most, high - at + (0 if low > at else skips))
    if not meets:
        return same - at, 1, 0
    repeat = max(1, min(end - at - tiles * (rows - 1), (same - at) // rows)) if most == rows else 1
    rows, count = most, 0
    for place in range(phase.first, phase.first + phase.taps):
        tap = taps[place]
        if tap.high <= at or tap.low >= at + rows:
            continue
        piece = pieces[count]
        piece.number, piece.src, piece.case = tap.number, tap.src + (at - tap.low) * src_step, 0
        if tap.low > at:
            piece.case = 2 * (tap.low - at) - 1
        elif tap.high < at + rows:
            piece.case = 2 * (at + rows - tap.high)
        count += 1
    return rows, repeat, count


@jit
def _sum_tiles(entry: int, share: GatherShare, tables: Tables, work: Work, batch: Batch, begun: bool) -> None:
    """Add the batch to the tiles at hand."""
    axes, loops, part, tile, panel = tables.axes, share.loops, work.part, work.tile, share.panel
    at, end, src, dst = part.at, part.end, work.src, work.dst
    one, two, three, row = loops[0], loops[1], loops[2], loops[3]
    a_row, c_row = axes[row].src_step * src[row], axes[row].dst_step * dst[row]
    batch.a_row, batch.c_row = src[row] if work.line.taps > 1 else a_row, c_row
    a_one, c_one = axes[one].src_step * src[one], axes[one].dst_step * dst[one]
    a_two, c_two = axes[two].src_step * src[two], axes[two].dst_step * dst[two]
    a_three, c_three = axes[three].src_step * src[three], axes[three].dst_step * dst[three]
    place, b, start = work.place, batch.b, batch.start
    for axis in range(4):
        place += (tables.phases[part.phase[axis]].dst + at[axis] * axes[axis].dst_step) * dst[axis]
    for i in range(end[one] - at[one]):
        for j in range(end[two] - at[two]):
            for k in range(end[three] - at[three]):
                a, c = work.start + i * a_one + j * a_two + k * a_three, place + i * c_one + j * c_two + k * c_three
                for block in range(tile.blocks):
                    final = block == tile.blocks - 1
                    call, batch.valid = (tile.last, tile.valid) if final else (entry, WIDTH)
                    batch.a, batch.b, batch.c = a, b + 2 * block * panel.block_bytes, c + block * tile.pair
                    batch.start = start + 2 * block * panel.line
                    for _ in range(part.repeat):
                        if begun:
                            batch.start, batch.start_row = batch.c, c_row
                        batch.next = batch.c + batch.rows * c_row
                        call_entry(call, address_of(batch))
                        batch.a += batch.rows * a_row
                        batch.c = batch.next
    batch.b, batch.start = b, start


@jit
def sum_lines(share: GatherShare, tables: Tables, work: Work, lists: Lists, batch: Batch) -> None:
    """Sum the tiles at hand line of taps by line of taps; the rows' axis is the last one with several taps."""
    axes, taps, pieces, elements = tables.axes, tables.taps, lists.pieces, lists.elements
    src, counts, per_axis, loops, order = work.src, work.part.counts, pieces.shape[0] // 4, share.loops, share.sums
    two, three, row = loops[1], loops[2], loops[3]
    phase, step, kernel = tables.phases[work.part.phase[row]], axes[row].src_step, share.panel.kernel
    at, width = work.part.at, share.lines.width
    one, count, last = phase.adjacent, 0, 0
    for place in range(phase.first, phase.first + phase.taps, one):
        begin = taps[place].src + (at[row] - taps[place].low) * step
        if begin <= -one or begin + (batch.rows - 1) * step >= width:
            one = 1  # a pixel meets no tap of this part of a line
            break
    column_step, columns = (step, batch.rows) if one == 1 else (1, (batch.rows - 1) * step + one)
    line = work.line
    line.taps, line.stride, line.steps = one, 1 if one == 1 else step, share.panel.words
    batch.elements, batch.indirection = address_of(elements), address_of(line)
    for i in range(counts[two]):
        outer = pieces[two * per_axis + i]
        for j in range(counts[three]):
            inner = pieces[three * per_axis + j]
            base = pieces[0].src * src[0] + outer.src * src[two] + inner.src * src[three]
            number = (outer.number * kernel[three - 1] + inner.number) * kernel[row - 1]
            for place in range(phase.first, phase.first + phase.taps, one):
                tap, element = taps[place], elements[count]
                begin = tap.src + (at[row] - tap.low) * step
                first = (column_step - 1 - begin) // column_step if begin < 0 else 0
                left = width - begin
                if column_step > 1:
                    left = (left + column_step - 1) // column_step
                element.steps = min(columns, left) - first
                element.a, element.b = base + begin * src[row], (number + tap.number) * share.panel.tap_bytes
                element.case, element.flush = first, 0
                if element.steps <= 0:
                    continue
                mark = (number + tap.number if order.within_line else number // kernel[row - 1]) // order.group
                if order.flushes and count > 0 and mark != last:
                    elements[count - 1].flush = FLUSH
                count, last = count + 1, mark
    batch.count = count
    if share.lines.ahead:
        line.ahead, line.ahead_row, line.ahead_lines = elements[count - 1].a + src[2], src[2], axes[2].src_step
    work.tile.last = share.lines.pairs if work.tile.micro == PAIRS else share.lines.kernel
    _sum_tiles(work.tile.last, share, tables, work, batch, False)


@jit
def sum_lists(entry: int, share: GatherShare, tables: Tables, work: Work, lists: Lists, batch: Batch) -> None:
    """Sum the tiles at hand over all combinations of their taps, which are `pieces` of each axis in turn.

    Sums begin with the batch's `start`. A batch has a limit of steps; the next one goes on with the sums so far.
    """
    pieces, elements = lists.pieces, lists.elements
    src, counts, per_axis, panel, order = work.src, work.part.counts, pieces.shape[0] // 4, share.panel, share.sums
    words, kernel, group = panel.words, panel.kernel, order.group
    count, last, begun, start, totals, listed = 0, -1, False, batch.start, batch.totals, 0
    batch.totals = 0
    image = pieces[0]
    batch.elements = address_of(elements)
    for i in range(counts[1]):
        plane = pieces[per_axis + i]
        for j in range(counts[2]):
            across = pieces[2 * per_axis + j]
            number = plane.number * kernel[1] + across.number
            base = image.src * src[0] + plane.src * src[1] + across.src * src[2]
            k = 0
            while k < counts[3]:
                column, run = pieces[3 * per_axis + k], 1
                while share.src.joined and k + run < counts[3]:
                    following = pieces[3 * per_axis + k + run]
                    if following.case != column.case or following.src != column.src + run:
                        break
                    if order.within_line and following.number // group != column.number // group:
                        break
                    run += 1
                k += run
                mark = number * kernel[2] + column.number // group if order.within_line else number // group
                every = run * words
                chunk = order.chunk if words > order.chunk else every
                for done in range(0, every, chunk):
                    if count > 0 and (mark != last or done > 0 or words > order.chunk):
                        if order.flushes:
                            elements[count - 1].flush = FLUSH if batch.totals != 0 else FLUSH_FIRST
                            batch.totals = totals
                        if order.most > 0 and listed + min(chunk, every - done) > order.most:
                            batch.count = count
                            _sum_tiles(entry, share, tables, work, batch, begun)
                            count, begun, listed = 0, True, 0
                    last = mark
                    element = elements[count]
                    element.a = base + column.src * src[3] + done * share.src.word
                    element.b = (number * kernel[2] + column.number) * panel.tap_bytes + done * panel.line
                    element.steps, element.flush = min(chunk, every - done), 0
                    element.case = image.case | plane.case | across.case | column.case
                    listed += element.steps
                    count += 1
    batch.count = count
    _sum_tiles(entry, share, tables, work, batch, begun)
    batch.start, batch.start_row, batch.totals = start, 0, totals
