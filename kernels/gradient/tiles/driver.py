"""The compiled loops of a weight gradient: pack a slab of pixels, walk it in blocks, write the sums out.

Everything is addresses, byte steps and tables (`kernels.gradient.tiles.records`) that
`kernels.gradient.tiles.schedule` and `kernels.gradient.tiles.unit` have laid out; nothing is checked here.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.brgemm import FLUSH, MICRO, Batch, Element
from kernels.emit.compiler import Rows, Vector, inlined, jit
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
    Packed,
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
from kernels.pack.panels import PANEL, Panel, Values, pack_panels, pack_planes
from kernels.target import target

__all__ = ["LINES", "NATIVE", "PLANES", "add_doubles", "add_slabs", "store"]

NATIVE, LINES, PLANES = 0, 1, 2
"""How scalars are read: where they lie, from a panel of lines, or from channel planes converted to f32."""

WIDTH = target().lanes
LINE = 4 * WIDTH
"""Bytes of a vector of f32."""

MOST_ELEMENTS = 1024
"""Elements of all taps that are visited together, or more if one tap has more: 56 KiB."""

UNBOUNDED = 1 << 62
"""Positions of a segment that is not cut."""

F32_PLACE = MICRO["f32"]

ELEMENT_BYTES = Element.dtype.itemsize

BATCH, ELEMENT, GROUP, PACKED, SHARE, VISIT = (each.dtype for each in (Batch, Element, Group, Packed, TileShare, Visit))


@jit
def _pack(share: TileShare, tensor: Source, packed: Packed, box: Box, lines: Rows[Line], targets: Rows[Panel]) -> None:
    """Pack groups of a tensor to panels, or one to planes of its channels; `targets` is scratch."""
    source, row, channels = packed.source, 0, 0
    for axis in range(4):
        source += box.first[axis] * tensor.strides[axis]
    for g in range(packed.count):
        for t in range(lines.shape[0]):
            line, panel = lines[t], targets[row]
            panel.lanes, panel.valid = line.lanes, min(line.valid, packed.left - g * WIDTH)
            panel.source, panel.unit = g * tensor.group + line.source, 4 * line.lanes
            panel.address = packed.to + g * packed.step + line.place
            row, channels = row + 1, channels + line.valid
    src = Values(share.kind, source, tensor.strides[:], tensor.lane, packed.end)
    if packed.plane > 0:
        pack_planes(src, channels, packed.to, packed.plane, box.sizes[:], 4 * tensor.steps[:])
    else:
        pack_panels(src, targets[:row], box.sizes[:], tensor.steps[:])


@jit
def _clip(
    at: Vector, share: TileShare, slab: Slab, ranges: Rows[Range], first: int, zero: int, visits: Rows[Visit]
) -> int:
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
        lines, scalars, counts = visit.lines, visit.scalars, visit.counts
        visit.line, visit.scalar = span.line - zero + at[0] * vector_moves[0], span.scalar + at[0] * scalar_moves[0]
        counts[0] = min(block[0], slab.high[0] - at[0])
        inside = True
        for axis in range(1, 4):
            low = max(at[axis], span.low[axis - 1])
            high = min(at[axis] + block[axis], slab.high[axis], span.high[axis - 1])
            inside = inside and low < high
            visit.line += low * vector_moves[axis]
            visit.scalar += low * scalar_moves[axis]
            if axis > 1 or outer == 1:
                counts[axis - 1] = high - low
        r += 1
        visit.first, visit.last, visit.row = span.first, span.last if inside else span.first, span.row
        for k in range(3):
            axis = outer if k == 0 else k + 1
            lines[k], scalars[k] = vector_moves[axis], scalar_moves[axis]
        # lines, then planes, that follow each other without a gap are one
        if lines[1] == lines[2] * counts[2] and scalars[1] == scalars[2] * counts[2]:
            counts[1], counts[2] = 1, counts[1] * counts[2]
        if counts[1] == 1 and lines[0] == lines[2] * counts[2] and scalars[0] == scalars[2] * counts[2]:
            counts[0], counts[2] = 1, counts[0] * counts[2]
    return r


@jit
def _list(visit: Visit, segment: int, line: int, elements: Rows[Element], first: int) -> None:
    """List the positions of a visit, whose panel lines have `line` bytes each, from the place `first` on.

    Sums of sums lose fewer digits than one long sum: those of a segment are added to memory. Most blocks are alike, and
    so are their lists.
    """
    counts, lines, scalars, listed, count, pending = visit.counts, visit.lines, visit.scalars, visit.listed, first, 0
    same = counts[0] == listed[0] and counts[1] == listed[1] and counts[2] == listed[2] and line == listed[3]
    if same or visit.first == visit.last:
        return
    listed[0], listed[1], listed[2], listed[3] = counts[0], counts[1], counts[2], line
    for i in range(counts[0]):
        for j in range(counts[1]):
            for done in range(0, counts[2], segment):
                element = elements[count]
                element.a = i * scalars[0] + j * scalars[1] + done * scalars[2]
                element.b = line * (i * lines[0] + j * lines[1] + done * lines[2])
                element.steps, element.case = min(segment, counts[2] - done), 0
                pending += element.steps
                element.flush = FLUSH if pending >= segment else 0
                if pending >= segment:
                    pending = 0
                count += 1
    visit.elements = count - first


@jit
def _walk(table: Vector, share: TileShare, slab: Slab, tables: WalkTables, batch: Batch, group: Group) -> None:
    """Walk the pixel blocks of one slab of one group; see the loops in `kernels.gradient.tiles.unit`.

    A tile's channels are visited for all taps in turn, so that their pixels stay in L1.
    """
    blocks, ranges, tiles, visits, elements = (
        tables.blocks, tables.ranges, tables.tiles, tables.visits, tables.elements
    )  # fmt: skip
    at, room, origin = group.at, elements.shape[0] // visits.shape[0], address_of(elements)
    zero, low, high, sizes = 0, slab.low, slab.high, share.block
    positions = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    for axis in range(4):
        zero += slab.vector.first[axis] * share.vector.steps[axis]
    zero *= LINE if share.lanewise else 1
    for at[0] in range(low[0], high[0], sizes[0]):
        for at[1] in range(low[1], high[1], sizes[1]):
            for at[2] in range(low[2], high[2], sizes[2]):
                for at[3] in range(low[3], high[3], sizes[3]):
                    following = 0
                    while following < ranges.shape[0]:
                        # all taps, or one line of the kernel where its scalars fill L1 by themselves
                        begin, first = following, following % visits.shape[0]
                        following = _clip(at[:], share, slab, ranges, begin, zero, visits)
                        last = first + following - begin
                        most, vectors, calls = 0, 0, 0
                        for i in range(first, last):
                            some = visits[i].last - visits[i].first
                            most, calls = max(most, some), calls + some
                        for b in range(blocks.shape[0] if calls > 0 else 0):
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
                            ahead, lines = 0, 0
                            if begin == 0 and share.packs.in_place and not share.lanewise:
                                # the hardware prefetcher is too late for the next block's lines
                                ahead = panel + (visits[first].line + positions) * line
                                lines = positions * line // (64 * calls) + 1
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
                                    for _ in range(lines):
                                        touch(ahead)
                                        ahead += 64
                                    call_entry(table[F32_PLACE + vectors - 1], address_of(batch))


@inlined
def _room(share: TileShare, blocks: Rows[Block], ranges: Rows[Range], tiles: Rows[Tile]) -> WalkTables:
    """Return tables with room for the visits of a block of positions, and for their elements."""
    block, segment = share.block, share.segment
    room = max(1, block[0] * block[1] * block[2] * ((block[3] + segment - 1) // segment))
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
    share, addresses = shares[0], calls[0]
    packs, tables, batch = share.packs, _room(share, blocks, ranges, tiles), stack_record(BATCH)
    batch.a_row, batch.a_step, batch.apart = share.scalar_row, share.scalar.moves[3], 1
    batch.b_vector, batch.valid = LINE, WIDTH
    if share.lanewise:
        batch.vectors, batch.c_row = share.vectors, share.acc_bytes
    vector, scalar, group = stack_record(PACKED), stack_record(PACKED), stack_record(GROUP)
    targets = np.empty(packs.groups * lines.shape[0], PANEL)
    for i in range(slabs.shape[0]):
        slab = slabs[i]
        vector.end, vector.to = addresses.vector + share.vector.nbytes, addresses.panels
        scalar.end, scalar.to = addresses.scalar + share.scalar.nbytes, addresses.scratch
        vector.step, scalar.step, vector.plane, scalar.plane = packs.panel_bytes, packs.scratch_bytes, 0, packs.plane
        for first in range(0, share.groups, packs.groups):
            vector.count = scalar.count = min(packs.groups, share.groups - first)
            left = share.lane_groups - first * WIDTH if share.lanewise else (2 + vector.count) * WIDTH
            vector.left = scalar.left = left
            vector.source = addresses.vector + share.vector.start + first * share.vector.group
            scalar.source = addresses.scalar + share.scalar.start + first * share.scalar.group
            panels, base = vector.source, scalar.source
            if not packs.in_place:
                panels = vector.to
                _pack(share, share.vector, vector, slab.vector, lines[: blocks.shape[0]], targets)
            if packs.scalars != NATIVE:
                base = scalar.to
                for axis in range(4):
                    base -= 4 * lines[blocks.shape[0]].lanes * slab.scalar.first[axis] * share.scalar.steps[axis]
                _pack(share, share.scalar, scalar, slab.scalar, lines[blocks.shape[0] :], targets)
            for g in range(vector.count):
                group.panels, group.acc = (
                    panels + g * packs.panel_bytes,
                    addresses.acc + (first + g) * share.acc_bytes,
                )
                group.scalars = base + g * (share.scalar.group if packs.scalars == NATIVE else packs.scratch_bytes)
                _walk(table, share, slab, tables, batch, group)


@jit
def _store_lines(kind: int, acc: int, rows: int, lanes: int, whole: int, out: int, lane_bytes: int) -> None:
    """Transpose the first `whole` lanes of accumulator lines into rows of the output; rows are at least 8."""
    size = stored_size(kind)
    for start in range(0, rows, 64):
        # few rows at a time, 8 lanes after 8: whole cache lines are written, though lanes may lie at powers of two
        for lane in range(0, whole, 8):
            for first in range(start, min(start + 64, rows), 8):
                row = min(first, rows - 8)
                to, line = out + size * row + lane * lane_bytes, acc + (row * lanes + lane) * 4
                untranspose(kind, to, lane_bytes, line, 1, 4 * lanes, 7)


@jit
def _store_runs(weights: Weights, acc: int, lanes: int, valid: int, out: int) -> int:
    """Write accumulators in runs if rows or lanes are adjacent in the output; return the number of lanes written."""
    kind, taps, channels, whole = weights.kind, weights.taps, weights.channels, valid // 8 * 8
    size = stored_size(kind)
    lane_bytes = size * weights.lane_step
    step, tap_step = weights.channel_step, weights.tap_step
    # accumulator rows follow each other in the output, too
    linear = weights.channel_rows * tap_step == weights.tap_rows * step and min(step, tap_step) == 1
    if linear and taps * channels >= 8:
        _store_lines(kind, acc, taps * channels, lanes, whole, out, lane_bytes)
        return whole
    if weights.lane_step != 1 and weights.channel_step == 1 and weights.channel_rows == 1 and channels >= 8:
        for tap in range(taps):
            line, to = acc + 4 * tap * weights.tap_rows * lanes, out + size * tap * weights.tap_step
            _store_lines(kind, line, channels, lanes, whole, to, lane_bytes)
        return whole
    if weights.lane_step != 1 and not (weights.tap_step == 1 and weights.tap_rows == 1 and taps >= 8):
        return 0
    for c in range(channels):
        line, to = acc + 4 * c * weights.channel_rows * lanes, out + size * c * weights.channel_step
        if weights.lane_step != 1:
            _store_lines(kind, line, taps, lanes, whole, to, lane_bytes)
            continue
        for tap in range(taps):
            target, source = to + size * tap * weights.tap_step, line + 4 * tap * weights.tap_rows * lanes
            put(kind, target, source, valid)
    return valid if weights.lane_step == 1 else whole


@jit
def store(acc: int, blocks: Rows[Block], layouts: Rows[Weights], out: int) -> None:
    """Scatter accumulators to the one layout of the weights, rounding once; `acc` and `out` are addresses."""
    weights = layouts[0]
    kind, lane_groups, size = weights.kind, weights.lane_groups, stored_size(weights.kind)
    for g in range(weights.groups):
        for b in range(blocks.shape[0]):
            block = blocks[b]
            lanes = block.vectors * WIDTH
            valid = min(block.valid, lane_groups - g * WIDTH) if lane_groups > 0 else block.valid
            base = acc + 4 * g * weights.floats + block.acc
            place = out + size * (weights.start + g * weights.group_step + block.first * weights.block_step)
            done = _store_runs(weights, base, lanes, valid, place)
            for tap in range(weights.taps if done < valid else 0):
                for c in range(weights.channels):
                    row = base + 4 * (tap * weights.tap_rows + c * weights.channel_rows) * lanes
                    to = place + size * (c * weights.channel_step + tap * weights.tap_step)
                    for lane in range(done, valid):
                        put_value(kind, to + size * lane * weights.lane_step, load(F32, row + 4 * lane))
