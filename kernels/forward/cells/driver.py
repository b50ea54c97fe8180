"""Forward operations on products of bf16, tile by tile, of src pixels with the weights of each tap.

A tile of src is 16 pixels of a panel by 32 channels, one of weights 32 src channels by 16 dst channels. So nothing is
moved between packing and multiplying: pixels are rows of memory, and a tap is another first row. Values go as sums of
bf16 (`kernels.emit.dots`). The panel's zeros are multiplied; cells
of pixels for which that, or a sum of bf16, would not do are computed on register tiles: where something in src is not
finite, or values are so small that the instructions would take them, their parts, or sums of their products as zero, as
they do with subnormal numbers (of f16 none is so small: sums are multiples of 2**-48). So are dst channels whose
weights are not finite: the others keep their bits.
"""

from __future__ import annotations

import numpy as np

from kernels.blocks import SUMS
from kernels.emit.compiler import Rows, Table, Vector, jit
from kernels.emit.dots import BEGIN, BLOCKS, END, ROWS, SHAPES, STEP, TILE, Walks
from kernels.emit.intrinsics import F32, address_of, call_entry, copy_panel, fill_zero, keep_alive, load
from kernels.forward.cells.records import Cell, CellLine, CellPhase, CellShare, CellTables, Cut, Magnitudes
from kernels.forward.cells.schedule import LANES, ROW_BYTES
from kernels.forward.output import bring_bias, write
from kernels.forward.records import Call, Data, Pass
from kernels.pack.lines import split_f16
from kernels.pack.magnitudes import LEAST_BIAS, LEAST_SUM, SPECIAL, clear_lane, lane_peaks, magnitudes
from kernels.pack.pairs import PackedBox, Packing, pack_boxes
from kernels.pack.panels import Values

__all__ = ["SPARE", "bring_weights", "compute_cells"]

WALK_STEPS = SUMS.walk_steps

WHOLE, PLANES, LINES = 0, 1, 2
"""The pieces of a phase's positions: all of them, planes, lines."""

CELL, CUT, MAGNITUDES, WALKS = Cell.dtype, Cut.dtype, Magnitudes.dtype, Walks.dtype
PACKED_BOX, PACKING = PackedBox.dtype, Packing.dtype

SPARE = 64
"""Rows behind a panel that a last tile may read."""

MOST_SUM = 350
"""Sum of the exponents, as f32 stores them, of two factors that are f32: sums of 2**29 products fit."""

LEAST_BIASES = (LEAST_BIAS, np.float32(0), LEAST_BIAS * np.float32(2.0**16))
"""Smallest bias, by parts: those of f32 have 24 digits."""


@jit
def _blocks(one: Pass) -> int:
    """Count the blocks of 16 dst channels of a pass."""
    blocks: int = (one.channels + TILE - 1) // TILE
    return blocks


@jit
def _range(parts: int, panel: int, part: int, size: int, found: Magnitudes) -> None:
    """Find the magnitudes of what `parts` pieces of memory hold."""
    found.least, found.largest, found.finite = 512, 0, True
    for p in range(parts):
        least, most = magnitudes(panel + p * part, size // ROW_BYTES)
        found.least, found.largest = min(found.least, (least + 1) >> 7), max(found.largest, most >> 7)
        found.finite = found.finite and most < SPECIAL


@jit
def _small_bias(parts: int, line: int) -> bool:
    """Return whether a line of bias holds values that are too small to be added to sums of products."""
    for lane in range(LANES):
        value = abs(load(F32, line + 4 * lane))
        if 0 < value < LEAST_BIASES[parts - 1]:
            return True
    return False


@jit
def _plain(parts: int, a: Magnitudes, b: Magnitudes) -> bool:
    """Return whether two tensors may be multiplied as sums of bf16, zeros among them."""
    finite: bool = a.finite and b.finite
    if parts == 2:
        return finite
    vanish = min(a.least, b.least) < 1 or a.least + b.least < LEAST_SUM
    return finite and not vanish and (parts == 1 or a.largest + b.largest <= MOST_SUM)


@jit
def _set_axis(cell: Cell, axis: int, line: CellLine) -> None:
    """Lay a cell along one axis."""
    cell.dst[axis], cell.counts[axis] = line.dst, line.count
    cell.src[axis], cell.met[axis], cell.places[axis] = line.src, line.met, line.place


@jit
def _bring(
    share: CellShare, one: Pass, call: Call, segment: int, cells: Rows[Cell], boxes: Rows[PackedBox],
    packings: Rows[Packing],
) -> None:  # fmt: skip
    """Pack a segment of the src of the first of two cells; the other was packed there before, all zero for none.

    A step of channels is a line of a box, a pixel of a line a plane of its own.
    """
    cell, last, src, pitches, packing = cells[0], cells[1], one.src, share.pitches, packings[0]
    met, planes, to, strides = cell.met, share.depth * share.positions, packing.steps, packing.strides
    panel = call.source + segment * share.parts * planes * ROW_BYTES
    to[3] = 0
    to[2] = ROW_BYTES * pitches[2]
    to[1] = to[2] * pitches[1]
    to[0] = to[1] * pitches[0]
    strides[3], packing.channel = src.channel, src.strides[3] * share.src_strides[2]
    strides[0] = src.strides[0]
    first = call.src + src.start + cell.n * src.strides[0]
    start, same = 0, cell.images == last.images
    for axis in range(3):
        if axis < 2:
            strides[1 + axis] = src.strides[1 + axis] * share.src_strides[axis]
        first += cell.src[axis] * src.strides[1 + axis]
        start = start * pitches[axis] + cell.places[axis]
        same &= met[axis] == last.met[axis] and cell.places[axis] == last.places[axis]
    for j in range(share.depth):
        box = boxes[j]
        at = j * STEP
        box.source, box.place, sizes = first + at * src.channel, (j * share.positions + start) * ROW_BYTES, box.sizes
        sizes[0], sizes[1], sizes[2] = cell.images, met[0], met[1]
        sizes[3] = min(STEP, share.channels - at)
    if met[0] * met[1] * met[2] == 0:
        fill_zero(panel, share.parts * planes * ROW_BYTES)
        return
    packing.pairs, packing.parts, packing.channels = False, share.parts, met[2]
    packing.source, packing.target, packing.planes, packing.plane = 0, panel, planes, ROW_BYTES
    packing.scratch = call.products
    pack_boxes(packing, boxes, boxes if same else boxes[:0])
    if share.parts == 2:
        split_f16(panel, panel + planes * ROW_BYTES, planes)


@jit
def bring_weights(
    shares: Rows[CellShare], passes: Rows[Pass], calls: Rows[Call], taps: Rows[PackedBox], odd: Vector
) -> None:
    """Pack weights to [part][block][tap][steps of src channels], each a tile; say which dst channels are `odd`.

    Those hold Inf or NaN, and get zeros instead. `taps` are boxes as `kernels.pack.pairs` takes them.
    """
    share, one, call, packings = shares[0], passes[0], calls[0], np.zeros(1, PACKING)
    weights, packing = one.weights, packings[0]
    parts, blocks, block = share.parts, _blocks(one), share.block_bytes
    packing.pairs, packing.parts, packing.channels, packing.scratch = True, parts, one.channels, call.products
    packing.source, packing.channel = call.weights + weights.start, weights.dst_channel
    packing.strides[3] = weights.src_channel
    packing.target, packing.planes, packing.plane = call.panels, blocks, block
    whole = share.channels % STEP == 0 and one.channels % TILE == 0  # no place is left for zeros
    pack_boxes(packing, taps, taps if whole else taps[:0])
    keep_alive(packings)
    if parts == 2:
        part = blocks * block
        split_f16(call.panels, call.panels + part, part // ROW_BYTES)
    _clear_odd(parts, blocks, block, call.panels, odd)


@jit
def _clear_odd(parts: int, blocks: int, block_bytes: int, panels: int, odd: Vector) -> None:
    """Put zeros in place of the weights of dst channels that hold Inf or NaN, and mark these channels."""
    lanes = np.empty(TILE, np.uint16)
    for block in range(blocks):
        place = panels + block * block_bytes
        if lane_peaks(place, block_bytes // ROW_BYTES, address_of(lanes)) < SPECIAL:
            continue
        for lane in range(TILE):
            odd[TILE * block + lane] = 1 if lanes[lane] >= SPECIAL else 0
            for p in range(parts if odd[TILE * block + lane] == 1 else 0):
                clear_lane(place + p * blocks * block_bytes + 4 * lane, block_bytes // ROW_BYTES)


@jit
def _cut(share: CellShare, cell: Cell, phase: CellPhase, cut: Cut) -> bool:
    """Cut the positions of a phase into lines, planes or one row of the panel, whatever takes least tiles.

    Give whether it has any.
    """
    pitches, counts, cut.images = share.pitches, cut.counts, cell.images
    for axis in range(3):
        counts[axis] = (cell.counts[axis] - phase.first[axis] + share.strides[axis] - 1) // share.strides[axis]
        if counts[axis] <= 0:
            return False
    plane = (counts[1] - 1) * pitches[2] + counts[2]
    whole = ((cell.images - 1) * pitches[0] + counts[0] - 1) * pitches[1] * pitches[2] + plane
    lines, planes = cell.images * counts[0] * counts[1], cell.images * counts[0]
    cut.tiles, cut.kind, pieces = (whole + ROWS - 1) // ROWS, WHOLE, 1
    if planes * ((plane + ROWS - 1) // ROWS) < cut.tiles * pieces:
        cut.tiles, cut.kind, pieces = (plane + ROWS - 1) // ROWS, PLANES, planes
    if lines * ((counts[2] + ROWS - 1) // ROWS) < cut.tiles * pieces:
        cut.tiles, cut.kind = (counts[2] + ROWS - 1) // ROWS, LINES
    return True


@jit
def _sum_phase(
    table: Vector, share: CellShare, one: Pass, call: Call, phase: CellPhase, cut: Cut, offsets: Vector,
    weights: int,
) -> None:  # fmt: skip
    """Sum all taps of a phase into rows of 16 or 32 lanes, on tile registers."""
    counts, pitches, first, taps, images, across = (
        cut.counts,
        share.pitches,
        phase.tap,
        phase.taps,
        cut.images,
        cut.across,
    )
    pieces = images * (counts[0] * (counts[1] if cut.kind == LINES else 1)) if cut.kind != WHOLE else 1
    line, depth, block = ROW_BYTES * across, share.depth, share.positions * ROW_BYTES
    walks = np.zeros(4, WALKS)  # for each number of tiles down
    for down in range(1, 5):
        walk = walks[down - 1]
        walk.b_part, walk.a_part = _blocks(one) * share.block_bytes, depth * block
        walk.a_line, walk.acc_line = ROW_BYTES, line
        for k in range(1, down):
            walk.down[k - 1], walk.down[down + k - 2] = k * TILE * ROW_BYTES, k * TILE * line
    together, run = max(1, WALK_STEPS // depth), min(depth, WALK_STEPS)
    most, entry = 2 if across > 1 else 4, BLOCKS + len(SHAPES) * (share.parts - 1) + across - 1
    for tap in range(0, taps, together):
        for at in range(0, depth, run):
            steps = min(run, depth - at)
            for down in range(4):
                walk = walks[down]
                walk.count, walk.starts = min(together, taps - tap), address_of(offsets) + 8 * (first + tap)
                walk.begin = 1 if cut.begin and tap + at == 0 else 0
            b = weights + ((first + tap) * depth + at) * TILE * ROW_BYTES
            for piece in range(pieces):
                n, inside = divmod(piece, max(1, pieces // images)) if cut.kind != WHOLE else (0, 0)
                d, h = divmod(inside, counts[1]) if cut.kind == LINES else (inside, 0)
                a = call.source + at * block + ((n * pitches[0] + d) * pitches[1] + h) * pitches[2] * ROW_BYTES
                sums, tile = call.sums + piece * cut.tiles * TILE * line, 0
                while tile < cut.tiles:
                    down = min(most, cut.tiles - tile)
                    call_entry(
                        table[entry + (2 * down - 2 if down < 3 else 1 + down)], a + tile * TILE * ROW_BYTES, block, b,
                        share.block_bytes, steps, sums + tile * TILE * line, ROW_BYTES, address_of(walks[down - 1]),
                    )  # fmt: skip
                    tile += down


@jit
def _dense(share: CellShare, call: Call) -> int:
    """Return the address of the sums of a cell, which follow those of a phase."""
    address: int = call.sums + 4 * LANES * (share.rows + 2 * TILE)
    return address


@jit
def _set_out(share: CellShare, call: Call, cell: Cell, phase: CellPhase, cut: Cut, dst: Data) -> None:
    """Bring the rows of a phase to where they belong in dst, or among the sums of a cell, [n][d][h][w][lanes]."""
    counts, pitches, strides, sizes, begin = cut.counts, share.pitches, share.strides, cell.counts, phase.first
    lanes = cut.across * TILE
    run, steps, dense = np.ones(4, np.int64), np.empty(4, np.int64), _dense(share, call)
    run[3], steps[3] = counts[2], strides[2] * dst.strides[3]
    for axis in range(3):
        steps[axis] = dst.strides[axis]
    for n in range(cell.images):
        for d in range(counts[0]):
            for h in range(counts[1]):
                row, piece = ((n * pitches[0] + d) * pitches[1] + h) * pitches[2], 0
                if cut.kind == PLANES:
                    row, piece = h * pitches[2], n * counts[0] + d
                elif cut.kind == LINES:
                    row, piece = 0, (n * counts[0] + d) * counts[1] + h
                plane, high = begin[0] + d * strides[0], begin[1] + h * strides[1]
                source = call.sums + (piece * cut.tiles * ROWS + row) * 4 * lanes
                if cut.to != 0:
                    place = cut.to + n * steps[0] + plane * steps[1] + high * steps[2] + begin[2] * dst.strides[3]
                    to = Values(share.kind, place, steps, dst.channel, 0)
                    write(to, source, lanes, cut.valid, run, call.products + 4 * LANES)
                else:
                    at = ((n * sizes[0] + plane) * sizes[1] + high) * sizes[2] + begin[2]
                    copy_panel(F32, lanes, dense + 4 * at * lanes, 4 * strides[2] * lanes, source, 4 * lanes, counts[2])


@jit
def compute_cells(
    table: Vector, shares: Rows[CellShare], passes: Rows[Pass], calls: Rows[Call], tables: CellTables, first: int,
    failed: Table,
) -> None:  # fmt: skip
    """Compute some cells from the `first` on for one group, and say which pairs of blocks `failed` in which cell.

    The call's `source` holds a panel, its `sums` those of a phase and a cell.
    """
    share, one, call = shares[0], passes[0], calls[0]
    planes, lines, columns, phases = tables.planes, tables.lines, tables.columns, tables.phases
    kind, parts, dst, strides = share.kind, share.parts, one.dst, share.strides
    sizes, at = np.empty(4, np.int64), np.empty(4, np.int64)
    segments, cuts, boxes = share.segments, np.empty(1, CUT), np.empty(share.depth, PACKED_BOX)
    count = segments[0] * segments[1] * segments[2]
    cells = np.zeros(2 * count, CELL)
    packings = np.empty(1, PACKING)
    blocks, block_bytes, scratch = _blocks(one), share.block_bytes, call.products
    pairs = (blocks + 1) // 2
    mine, theirs = np.empty(1, MAGNITUDES), np.empty(pairs, MAGNITUDES)
    for p in range(pairs):
        weights = call.panels + 2 * p * block_bytes
        _range(parts, weights, blocks * block_bytes, min(2, blocks - 2 * p) * block_bytes, theirs[p])
        if parts != 2:
            bring_bias(kind, one, call, 0, LANES * p, LANES, scratch)
            theirs[p].finite = theirs[p].finite and not _small_bias(parts, scratch)
    panel = count * parts * share.depth * share.positions * ROW_BYTES
    # where all dst pixels belong to phases, whose lines lie well for writing, they need not be brought together first
    every = phases.shape[0] == strides[0] * strides[1] * strides[2]
    direct = every and (dst.channel < dst.strides[3] or (strides[2] == 1 and columns[0].count >= 8))
    for item in range(failed.shape[0]):
        rest, cell = first + item, cells[0]  # the next round names the table: that keeps it
        for axis in range(3, -1, -1):
            at[axis] = share.first[axis] + rest % share.counts[axis]
            rest //= share.counts[axis]
        for segment in range(count):
            some = cells[2 * segment : 2 * segment + 2]
            some[0].n = at[0] * share.images
            some[0].images = min(share.images, share.n - some[0].n)
            i, j, k = segment // segments[2] // segments[1], segment // segments[2] % segments[1], segment % segments[2]
            _set_axis(some[0], 0, planes[i * (planes.shape[0] // segments[0]) + at[1]])
            _set_axis(some[0], 1, lines[j * (lines.shape[0] // segments[1]) + at[2]])
            _set_axis(some[0], 2, columns[k * (columns.shape[0] // segments[2]) + at[3]])
            _bring(share, one, call, segment, some, boxes, packings)
            some[1] = some[0]
        fill_zero(call.source + panel, ROW_BYTES)  # lines of a panel need not end with it
        _range(1, call.source, 0, panel + ROW_BYTES - 1, mine[0])
        sizes[0], pixels, to = cell.images, cell.images, call.dst + dst.start + cell.n * dst.strides[0]
        for axis in range(3):
            sizes[1 + axis] = cell.counts[axis]
            pixels *= cell.counts[axis]
            to += cell.dst[axis] * dst.strides[1 + axis]
        call_entry(table[BEGIN], 0, 0, 0, 0, 0, 0, 0, 0)
        for p in range(pairs):
            failed[item, p] = 0 if _plain(parts, mine[0], theirs[p]) else 1
            if failed[item, p] == 1:
                continue
            across = min(2, blocks - 2 * p)
            lanes, valid, place = across * TILE, min(LANES, one.channels - LANES * p), to + LANES * p * dst.channel
            bring_bias(kind, one, call, 0, LANES * p, LANES, scratch)
            if not direct:
                copy_panel(F32, lanes, _dense(share, call), 4 * lanes, scratch, 0, pixels)
            for k in range(phases.shape[0]):
                cut = cuts[0]
                if not _cut(share, cells[0], phases[k], cuts[0]):
                    continue
                cut.across, cut.valid, cut.to = across, valid, place if direct else 0
                cut.begin = parts == 1 and call.bias == 0
                if not cut.begin:
                    copy_panel(F32, lanes, call.sums, 4 * lanes, scratch, 0, share.rows)
                weights = call.panels + 2 * p * block_bytes
                _sum_phase(table, share, one, call, phases[k], cuts[0], tables.offsets, weights)
                _set_out(share, call, cells[0], phases[k], cuts[0], dst)
            if not direct:
                out = Values(kind, place, dst.strides[:], dst.channel, 0)
                write(out, _dense(share, call), lanes, valid, sizes, scratch + 4 * LANES)
        call_entry(table[END], 0, 0, 0, 0, 0, 0, 0, 0)
