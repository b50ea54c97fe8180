"""The compiled loops of a weight gradient: pack a slab of pixels, walk it in blocks, write the sums out.

Everything is addresses, byte steps and tables (`kernels.gradient.tiles.records`) that
`kernels.gradient.tiles.schedule` and `kernels.gradient.tiles.unit` have laid out; nothing is checked here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernels.emit.brgemm import FLUSH, MICRO, SKIPS, Batch, Element
from kernels.emit.compiler import Rows, Vector, inlined, jit, together
from kernels.emit.intrinsics import (
    F32,
    address_of,
    call_entry,
    load,
    put,
    put_value,
    stack_record,
    stored_size,
    touch,
    untranspose,
)
from kernels.gradient.tiles.records import (
    Block,
    Box,
    Group,
    Line,
    Place,
    Range,
    Slab,
    Source,
    Tile,
    TileCall,
    TileShare,
    Visit,
    WalkTables,
    Weights,
)
from kernels.pack.doubles import Operand, pack_doubles, packed
from kernels.pack.panels import PANEL, Panel, Values, pack_panels
from kernels.target import target

__all__ = ["PAGE", "add_doubles", "add_slabs", "store"]

WIDTH = target().lanes
LINE = 4 * WIDTH
"""Bytes of a vector of f32."""

MOST_ELEMENTS = 1024
"""Elements of all taps that are visited together, or more if one tap has more: 56 KiB."""

PAGE = 4096
"""Bytes of a page of memory: hardware prefetches nothing beyond its end, and looks up the place of each page."""

COLUMNS = 2 + 2 * SKIPS
"""Place of the positions of a line in the shape of a `Visit`."""

UNBOUNDED = 1 << 62
"""Positions of a segment that is not cut."""

F32_PLACE = MICRO["f32"]

ELEMENT_BYTES = Element.dtype.itemsize

BATCH, ELEMENT, GROUP, SHARE, VISIT = (each.dtype for each in (Batch, Element, Group, TileShare, Visit))


@inlined
def _together(share: TileShare, first: int) -> int:
    """Return how many groups, from the `first` on, are packed together."""
    return min(share.together, share.groups - first)


@jit
def _pack(
    share: TileShare, tensor: Source, place: Place, box: Box, first: int, lines: Rows[Line], targets: Rows[Panel]
) -> None:
    """Pack groups of a tensor, from the `first` on, to panels; `targets` is scratch."""
    source, row = place.tensor + tensor.start + first * tensor.group, 0
    for axis in range(4):
        source += box.first[axis] * tensor.strides[axis]
    for g in range(_together(share, first)):
        for t in range(lines.shape[0]):
            line, panel = lines[t], targets[row]
            left = share.lane_groups - (first + g) * WIDTH if share.lanewise else line.valid
            panel.lanes, panel.valid = line.lanes, min(line.valid, left)
            panel.source, panel.unit = g * tensor.group + line.source, 4 * line.lanes
            panel.address = place.panels + g * tensor.panels + line.place
            row += 1
    src = Values(share.kind, source, tensor.strides[:], tensor.lane, place.tensor + tensor.nbytes)
    pack_panels(src, targets[:row], box.sizes[:], tensor.steps[:])


@jit
def _clip(
    at: Vector, share: TileShare, slab: Slab, ranges: Rows[Range], tiles: Rows[Tile], first: int, zero: int,
    visits: Rows[Visit],
) -> int:  # fmt: skip
    """Clip ranges of one walk, from the `first` on, to the block at (n, d, h, w), as many as there is room for.

    Gives the number of the next range. A range has its visit at the same place for each block; one that is outside has
    no tiles. `zero` is the place in the slab's panel at which position 0 would be, in the unit of its moves.
    """
    base = first - first % visits.shape[0]
    r, end = first, min(base + visits.shape[0], ranges.shape[0])
    block, vector_moves, scalar_moves = share.block, share.vector.moves, share.scalar.moves
    outer = 1 if block[1] > 1 else 0
    while r < end and ranges[r].walk == ranges[first].walk:
        span, visit = ranges[r], visits[r - base]
        lines, scalars, shape = visit.lines, visit.scalars, visit.shape
        visit.line, visit.scalar = span.line - zero + at[0] * vector_moves[0], span.scalar + at[0] * scalar_moves[0]
        shape[0] = min(block[0], slab.high[0] - at[0])
        inside, low, high = True, 0, 0
        for axis in range(1, 4):
            low = max(at[axis], span.low[axis - 1])
            high = min(at[axis] + block[axis], slab.high[axis], span.high[axis - 1])
            inside = inside and low < high
            visit.line += low * vector_moves[axis]
            visit.scalar += low * scalar_moves[axis]
            if axis == 2 or (axis == 1 and outer == 1):
                shape[axis - 1] = high - low
        heads, tails = tiles[span.first].heads, tiles[span.first].tails
        for k in range(SKIPS):
            shape[2 + k] = min(max(span.low[2] + heads[SKIPS - 1 - k], low), high) - low
            shape[COLUMNS - SKIPS + k] = min(max(span.high[2] - tails[k], low), high) - low
        shape[COLUMNS] = high - low
        r += 1
        visit.first, visit.last, visit.row = span.first, span.last if inside else span.first, span.row
        for k in range(3):
            axis = outer if k == 0 else k + 1
            lines[k], scalars[k] = vector_moves[axis], scalar_moves[axis]
        # lines, then planes, that follow each other without a gap are one
        whole = shape[1 + SKIPS] == 0 and shape[2 + SKIPS] == shape[COLUMNS]
        for k in range(1, -1, -1):
            count = shape[COLUMNS]
            if whole and lines[k] == lines[2] * count and scalars[k] == scalars[2] * count:
                for piece in range(2 + SKIPS, COLUMNS + 1):
                    shape[piece] = count * shape[k]
                shape[k] = 1
            whole &= shape[k] == 1
    return r


@jit
def _list(visit: Visit, segment: int, line: int, elements: Rows[Element], first: int) -> None:
    """List the positions of a visit, whose panel lines have `line` bytes each, from the place `first` on.

    Sums of sums lose fewer digits than one long sum: those of a segment are added to memory. Most blocks are alike, and
    so are their lists.
    """
    shape, lines, scalars, listed, count, pending = visit.shape, visit.lines, visit.scalars, visit.listed, first, 0
    same = line == listed[COLUMNS + 1]
    for k in range(COLUMNS + 1):
        same &= shape[k] == listed[k]
    if same or visit.first == visit.last:
        return
    listed[COLUMNS + 1] = line
    for k in range(COLUMNS + 1):
        listed[k] = shape[k]
    for i in range(shape[0]):
        for j in range(shape[1]):
            done = 0
            for piece in range(2 * SKIPS + 1):
                end = shape[2 + piece]
                while done < end:
                    element = elements[count]
                    element.a = i * scalars[0] + j * scalars[1] + done * scalars[2]
                    element.b = line * (i * lines[0] + j * lines[1] + done * lines[2])
                    element.steps = min(segment, end - done)
                    element.case = 2 * (piece - SKIPS) if piece >= SKIPS else 2 * (SKIPS - piece) - 1
                    pending += element.steps
                    element.flush = FLUSH if pending >= segment else 0
                    if pending >= segment:
                        pending = 0
                    count, done = count + 1, done + element.steps
    visit.elements = count - first


@jit
def _walk(table: Vector, share: TileShare, slab: Slab, tables: WalkTables, batch: Batch, group: Group) -> None:
    """Walk the pixel blocks of one slab of one group; see the loops in `kernels.gradient.tiles.unit`.

    A tile's channels are visited for all taps in turn, so that their pixels stay in L1.
    """
    blocks, ranges, tiles, visits, elements = (
        tables.blocks, tables.ranges, tables.tiles, tables.visits, tables.elements
    )  # fmt: skip
    at, low, high, sizes, ends = group.at, slab.low, slab.high, share.block, False
    zero, positions, room, origin = 0, 1, elements.shape[0] // visits.shape[0], address_of(elements)
    for axis in range(4):
        zero += slab.vector.first[axis] * share.vector.steps[axis]
        positions *= sizes[axis]
        at[axis] = low[axis]
    zero *= LINE if share.lanewise else 1
    while not ends:
        following = 0
        while following < ranges.shape[0]:
            # all taps, or one line of the kernel where its scalars fill L1 by themselves
            begin, first = following, following % visits.shape[0]
            following = _clip(at[:], share, slab, ranges, tiles, begin, zero, visits)
            last, most, vectors = first + following - begin, 0, 0
            for i in range(first, last):
                most = max(most, visits[i].last - visits[i].first)
            for b in range(blocks.shape[0] if most > 0 else 0):
                block = blocks[b]
                line = LINE * block.vectors
                move = 1 if share.lanewise else line
                if block.vectors != vectors:
                    vectors = block.vectors
                    batch.b_step = move * share.vector.moves[3]
                    for i in range(first, last):
                        _list(visits[i], share.segment, move, elements, i * room)
                if not share.lanewise:
                    batch.c_row = batch.totals_row = share.acc_step * line
                panel, sums = group.panels + block.panel, group.acc + block.acc
                if begin == 0 and share.vector.in_place and not share.lanewise:
                    # the next block's pages: hardware prefetches their lines, but not the first ones
                    place = visits[first].line + positions * share.vector.moves[3]
                    ahead = (group.panels + (place + b * positions) * line) // PAGE * PAGE
                    for page in range(0, positions * line, PAGE):
                        touch(ahead + page)
                        touch(ahead + page + 64)
                for step in range(most):
                    for i in range(first, last):
                        visit = visits[i]
                        if visit.first + step >= visit.last:
                            continue
                        tile = tiles[visit.first + step]
                        batch.elements, batch.count = origin + i * room * ELEMENT_BYTES, visit.elements
                        batch.b = panel + visit.line * move
                        batch.a, batch.c = group.scalars + visit.scalar, sums
                        batch.rows = tile.rows
                        if share.lanewise:
                            batch.indirection = address_of(tile.offsets)
                            call_entry(table[0], address_of(batch))
                            continue
                        batch.a += tile.offsets[0]
                        batch.c += (visit.row + tile.row) * line
                        batch.next = batch.totals = batch.c
                        call_entry(table[F32_PLACE + vectors - 1], address_of(batch))
        ends = _step(at[:], low[:], high[:], sizes[:])


@inlined
def _step(at: Vector, low: Vector, high: Vector, sizes: Vector) -> bool:
    """Go on to the next block of a slab, the last axis fastest; return True after the last one."""
    for axis in range(3, -1, -1):
        at[axis] += sizes[axis]
        if at[axis] < high[axis]:
            return False
        at[axis] = low[axis]
    return True


@inlined
def _room(share: TileShare, blocks: Rows[Block], ranges: Rows[Range], tiles: Rows[Tile]) -> WalkTables:
    """Return tables with room for the visits of a block of positions, and for their elements."""
    block, segment = share.block, share.segment
    pieces = (block[3] + segment - 1) // segment + 2 * SKIPS * int(share.merged)
    room = max(1, block[0] * block[1] * block[2] * pieces)
    visits = np.zeros(max(1, min(ranges.shape[0], MOST_ELEMENTS // room)), VISIT)
    return WalkTables(blocks, ranges, tiles, visits, np.empty(visits.shape[0] * room, ELEMENT))


@jit
def add_doubles(
    table: Vector, facts: Vector, operands: Rows[Operand], slabs: Rows[Slab], blocks: Rows[Block],
    ranges: Rows[Range], tiles: Rows[Tile], call: Vector,
) -> None:  # fmt: skip
    """Add what one slab of each image gives to sums of float64.

    `facts` has the values of a sum, the bytes of a group's sums, whether rows of tiles are channels of the wide tensor,
    and strides along (d, h, w). `operands` are rows and columns. `call` has the addresses of both tensors, of room for
    panels of each and for f32, and of the sums, whether the sums of an image are formed apart (otherwise they are one
    chain), and the number of images, which follow each other.
    """
    slab, rows, columns, share = slabs[0], operands[0], operands[1], stack_record(SHARE)
    batch, group, unit = stack_record(BATCH), stack_record(GROUP), 8 * rows.width
    share.acc_step, share.segment, group.scalars, group.panels = facts[0], UNBOUNDED, call[2], call[3]
    scalar, vector = share.scalar, share.vector
    for axis in range(4):
        stride = facts[2 + axis] if axis > 0 else 1
        share.block[axis] = slab.high[axis] - slab.low[axis]
        vector.steps[axis], vector.moves[axis] = columns.steps[axis], columns.steps[axis]
        scalar.moves[axis] = unit * rows.steps[axis]
        group.scalars -= slab.scalar.first[axis] * scalar.moves[axis]
        if facts[2] != 0:
            scalar.moves[axis] *= stride
        else:
            vector.moves[axis] *= stride
    batch.a_row, batch.a_step, batch.b_vector = 8, scalar.moves[3], LINE
    batch.apart = call[6]
    if rows.lanewise:
        batch.a_row *= packed(rows.positions, rows.width)
    tables = _room(share, blocks, ranges, tiles)
    for image in range(call[7]):
        from_rows, from_columns = call[0] + image * rows.nbytes, call[1] + image * columns.nbytes
        for g in range(rows.groups):
            pack_doubles(rows, from_rows, g, slab.scalar.first[:], slab.scalar.sizes[:], call[2], call[4])
            pack_doubles(columns, from_columns, g, slab.vector.first[:], slab.vector.sizes[:], group.panels, call[4])
            group.acc = call[5] + g * facts[1]
            _walk(table, share, slab, tables, batch, group)


@jit
def add_slabs(
    table: Vector, shares: Rows[TileShare], calls: Rows[TileCall], slabs: Rows[Slab], blocks: Rows[Block],
    lines: Rows[Line], ranges: Rows[Range], tiles: Rows[Tile],
) -> None:  # fmt: skip
    """Add slabs of pixels to the accumulators of the groups and lane blocks of the one share.

    `table` holds the tiles' addresses, `lines` those of the vector tensor, one for each block, then the scalars'.
    """
    share, call, count = shares[0], calls[0], blocks.shape[0]
    vector, scalar = share.vector, share.scalar
    tables, batch, group = _room(share, blocks, ranges, tiles), stack_record(BATCH), stack_record(GROUP)
    batch.a_row, batch.a_step, batch.apart = share.scalar_row, scalar.moves[3], 1
    batch.b_vector, batch.valid = LINE, WIDTH
    if share.lanewise:
        batch.vectors, batch.c_row = share.vectors, share.acc_bytes
    targets = np.empty(share.together * lines.shape[0], PANEL)
    for i in range(slabs.shape[0]):
        slab = slabs[i]
        for first in range(0, share.groups, share.together):
            panels = call.vector.tensor + vector.start + first * vector.group
            scalars = call.scalar.tensor + scalar.start + first * scalar.group
            if not vector.in_place:
                panels = call.vector.panels
                _pack(share, vector, call.vector, slab.vector, first, lines[:count], targets)
            if not scalar.in_place:
                scalars = call.scalar.panels
                for axis in range(4):
                    scalars -= 4 * lines[count].lanes * slab.scalar.first[axis] * scalar.steps[axis]
                _pack(share, scalar, call.scalar, slab.scalar, first, lines[count:], targets)
            for g in range(_together(share, first)):
                group.panels, group.scalars = panels + g * vector.panels, scalars + g * scalar.panels
                group.acc = call.acc + (first + g) * share.acc_bytes
                _walk(table, share, slab, tables, batch, group)


@together
class AccRows(NamedTuple):
    """Rows of sums: their number, the bytes between them in the accumulators, and the elements in the output."""

    rows: int
    line: int
    step: int


@jit
def _store_lines(kind: int, acc: int, line: int, rows: int, lanes: int, out: int, lane_bytes: int) -> None:
    """Transpose at least 8 `rows`, `line` bytes apart, of a multiple of 8 `lanes`; in `out` the rows are adjacent."""
    size = stored_size(kind)
    for start in range(0, rows, 64):
        # few rows at a time, 8 lanes after 8: whole cache lines are written, though lanes may lie at powers of two
        for lane in range(0, lanes, 8):
            for first in range(start, min(start + 64, rows), 8):
                row = min(first, rows - 8)
                untranspose(
                    kind, out + size * row + lane * lane_bytes, lane_bytes, acc + row * line + lane * 4, 1, line, 7
                )


@jit
def _store_block(kind: int, inner: AccRows, outer: AccRows, valid: int, acc: int, lane_step: int, out: int) -> None:
    """Write the first `valid` lanes of rows of sums; `inner` ones follow each other in the output, if any do."""
    size = stored_size(kind)
    whole = valid // 8 * 8 if inner.step == 1 and inner.rows >= 8 else 0
    for i in range(outer.rows):
        sums, to = acc + i * outer.line, out + size * i * outer.step
        if lane_step == 1:
            for row in range(inner.rows):
                put(kind, to + size * row * inner.step, sums + row * inner.line, valid)
            continue
        if whole > 0:
            _store_lines(kind, sums, inner.line, inner.rows, whole, to, size * lane_step)
        for row in range(inner.rows if whole < valid else 0):
            for lane in range(whole, valid):
                value = load(F32, sums + row * inner.line + 4 * lane)
                put_value(kind, to + size * (row * inner.step + lane * lane_step), value)


@jit
def store(acc: int, blocks: Rows[Block], layouts: Rows[Weights], out: int) -> None:
    """Scatter accumulators to the one layout of the weights, rounding once; `acc` and `out` are addresses."""
    weights = layouts[0]
    kind, lane_groups, size = weights.kind, weights.lane_groups, stored_size(weights.kind)
    for b in range(blocks.shape[0]):
        block = blocks[b]
        line = 4 * block.vectors * WIDTH
        taps = AccRows(weights.taps, weights.tap_rows * line, weights.tap_step)
        channels = AccRows(weights.channels, weights.channel_rows * line, weights.channel_step)
        inner, outer = (taps, channels) if taps.rows > 1 and taps.step < channels.step else (channels, taps)
        if outer.line == inner.line * inner.rows and outer.step == inner.step * inner.rows:
            inner, outer = AccRows(inner.rows * outer.rows, inner.line, inner.step), AccRows(1, 0, 0)
        for g in range(weights.groups):
            valid = min(block.valid, lane_groups - g * WIDTH) if lane_groups > 0 else block.valid
            place = out + size * (weights.start + g * weights.group_step + block.first * weights.block_step)
            _store_block(kind, inner, outer, valid, acc + 4 * g * weights.floats + block.acc, weights.lane_step, place)
