"""Filter gradients on products of bf16 pairs, where the processor has instructions for them.

Values of f16 are sums of two bf16, those of f32 of three (`kernels.emit.dots`, `kernels.pack.lines`).

Zeros multiply here: those that fill up channels, pairs and steps, and short runs of padding. With finite data they add
nothing. A channel that holds Inf or NaN among a slab's pixels is replaced by zeros, and its sums are formed pixel by
pixel over real taps instead, for that slab: other channels' sums stay as they are, bit for bit. Where a pair of blocks
of 16 channels holds f32 so large, or f32 or bf16 so small, that their products would overflow or vanish, all of its
sums are formed so. What is formed how depends on the problem and its data alone, so the bits do not depend on the
workers.

The instructions take subnormal numbers (below 2**-126) as zero, in what they read and in what they write. For bf16 and
f32, with `P` the largest product that two channels allow in a slab (the largest magnitude of one times that of the
other), each product of the two and each addition loses at most ``2**-40 * P`` by that (of f32, whose parts are
multiplied, a few times that). With a channel of subnormal numbers alone nothing is lost. Sums of f16 are multiples of
2**-48, so none is subnormal.
"""

from __future__ import annotations

import numpy as np

from kernels.blocks import SUMS
from kernels.emit.brgemm import FLUSH, Batch, Element
from kernels.emit.compiler import Rows, Table, Vector, inlined, jit
from kernels.emit.dots import ACROSS, BEGIN, BLOCKS, END, EXACT, ROWS, STAGE, STEP, TILE, Sides, TileSteps
from kernels.emit.intrinsics import (
    F32,
    address_of,
    call_entry,
    copy_panel,
    fill_zero,
    keep_alive,
    load,
    stack_array,
    stack_record,
    store_value,
)
from kernels.gradient.dots.records import (
    DotCall,
    DotShare,
    DotSlab,
    DotTap,
    DotWork,
    PackedBox,
    Packing,
    PairSpan,
    Peaks,
)
from kernels.gradient.dots.schedule import LEAST_GAP
from kernels.pack.lines import SPLIT_BYTES, split_f16
from kernels.pack.magnitudes import SPECIAL, clear_lane, lane_peaks
from kernels.pack.pairs import pack_boxes
from kernels.target import target

__all__ = ["STAGE_BYTES", "add_dots"]

WALK_PIXELS = SUMS.walk_pixels
STAGED_PIXELS = np.array(SUMS.staged_pixels, np.int64)

STAGE_BYTES = max(SPLIT_BYTES, 4 * ROWS * max((p + 1) * 2 * int(pixels) for p, pixels in enumerate(STAGED_PIXELS)))
"""Room for staged rows, and before that for what packing needs."""

LEAST_PEAK, LEAST_PEAKS, MOST_PEAKS = 41, 168, 350
"""Exponents, as f32 stores them, of the largest values of each channel, and sums of two channels' exponents.

Within these bounds, what is lost because subnormal numbers count as zeros (parts and their products as well) is a few
2**-40 of the largest product of both channels, and sums of 2**29 pixels stay below the largest number: 2**-126 times
another channel's peak is 2**-40 of the product with a peak of 2**-86, and 2**-126 that of a product of 2**-86.
"""

LINE, BLOCK = 4 * TILE, TILE * TILE
"""Bytes of an accumulator row."""

MOST_ELEMENTS = 2 * (WALK_PIXELS // LEAST_GAP + 2)
"""Elements of a piece of a walk."""

BATCH, ELEMENT, PACKING, PEAKS, PAIR_SPAN = (each.dtype for each in (Batch, Element, Packing, Peaks, PairSpan))
SIDES, TILE_STEPS, WORK = (each.dtype for each in (Sides, TileSteps, DotWork))
ELEMENT_BYTES = ELEMENT.itemsize


@inlined
def _empty(packing: Packing, boxes: Rows[PackedBox], channel: int) -> bool:
    """Return whether all f32 of one channel are zero."""
    strides = packing.strides
    for b in range(boxes.shape[0]):
        sizes = boxes[b].sizes
        for n in range(sizes[0]):
            for d in range(sizes[1]):
                for h in range(sizes[2]):
                    start = packing.source + boxes[b].source + channel * packing.channel
                    start += n * strides[0] + d * strides[1] + h * strides[2]
                    for w in range(sizes[3]):
                        if load(F32, start + w * strides[3]) != 0:
                            return False
    return True


@jit
def _peaks(packing: Packing, boxes: Rows[PackedBox], peaks: Rows[Peaks], nonfinite: Vector) -> None:
    """Find the smallest and the largest of the channels' largest values for each block of 16 channels.

    In a panel of pairs each of the 16 channels has a lane. Channels of zeros do not count, and neither do those that
    hold Inf or NaN: they are marked `nonfinite`, and zeros take their place. An f32 may be too small for a first part:
    then it counts as 1.
    """
    lanes, lanes_each = stack_array(TILE, np.uint16), TILE if packing.pairs else 1
    parts, channels, size, part = packing.parts, packing.channels, packing.plane, packing.planes * packing.plane
    for i in range(peaks.shape[0]):
        peaks[i].least, peaks[i].most = SPECIAL, 0
    for first in range(0, channels, lanes_each):
        place = packing.target + first // lanes_each * size
        whole = lane_peaks(place, size // LINE, address_of(lanes))
        for c in range(first, min(first + lanes_each, channels)):
            peak = int(lanes[c - first]) if lanes_each == TILE else whole
            nonfinite[c] = 1 if peak >= SPECIAL else 0
            if nonfinite[c] == 1:
                for p in range(parts):
                    if lanes_each == TILE:
                        clear_lane(place + p * part + 4 * (c - first), size // LINE)
                    else:
                        fill_zero(place + p * part, size)
                continue
            if peak == 0 and parts == 3 and not _empty(packing, boxes, c):
                peak = 1
            if peak > 0:
                block = peaks[c // TILE]
                block.least, block.most = min(block.least, peak), max(block.most, peak)


@inlined
def _line(share: DotShare, j: int) -> int:
    """Return the bytes of an accumulator row of a block of b: `ACROSS` blocks share rows."""
    return ACROSS * LINE if j // ACROSS * ACROSS + ACROSS <= share.b.planes else LINE


@inlined
def _block(share: DotShare, j: int) -> int:
    """Return the bytes from the accumulators to those of a block of b."""
    return j // ACROSS * ACROSS * share.acc_block + j % ACROSS * LINE


@jit
def _find_dense(parts: int, a: Rows[Peaks], b: Rows[Peaks], underflowed: Vector, dense: Table) -> None:
    """Return which pairs of blocks may be summed with zeros between their values, from what `_peaks` found.

    Of bf16 the sums on the way are read as well: an `underflowed` pair, which was too small once, stays with f32 until
    its sums are complete.
    """
    for i in range(dense.shape[0]):
        for j in range(dense.shape[1]):
            fits = True
            if parts != 2 and a[i].most > 0 and b[j].most > 0:
                first, second = a[i].least >> 7, b[j].least >> 7
                fits = min(first, second) >= LEAST_PEAK and first + second >= LEAST_PEAKS
            if parts == 3:
                fits &= (a[i].most >> 7) + (b[j].most >> 7) <= MOST_PEAKS
            if parts == 1:
                at = i * dense.shape[1] + j
                fits &= underflowed[at] == 0
                underflowed[at] = 0 if fits else 1
            dense[i, j] = 1 if fits else 0


if target().dots == "amx":

    @jit
    def _tiles_at_once(tiles: int, b_blocks: int) -> int:
        """Return how many tiles of rows to sum at once: two, with a single block of b three or four."""
        if b_blocks > 1 or tiles < 3:
            return min(tiles, 2)
        return 3 if tiles % 3 == 0 or tiles == 5 else 4

    @jit
    def _add_tiles(table: Vector, share: DotShare, work: DotWork, batch: Batch, b: int, dense: Vector) -> None:
        """Sum `work.down` tiles of rows with each dense block of b."""
        entry, blocks, size = BLOCKS + 2 * (share.a.parts - 1), share.b.planes, share.b.plane
        batch.rows, batch.start_row = ROWS * work.down, batch.c_row
        for j0 in range(0, blocks, 2):
            across = min(2, blocks - j0)
            some = across if dense[j0] + dense[j0 + across - 1] == 2 else 1
            for j in range(j0, j0 + across, some):
                if dense[j] == 1:
                    batch.b, batch.c = b + j * size, work.acc + j * share.acc_block
                    batch.start = batch.c
                    call_entry(table[entry + some - 1], address_of(batch))

    @jit
    def _add_rows(
        table: Vector, share: DotShare, slab: DotSlab, taps: Rows[DotTap], call: DotCall, work: DotWork, dense: Vector
    ) -> None:
        """Sum tiles of rows, some at a time, with all dense blocks of b.

        Their sums stay in the second cache for all pixels. A tile of one tap of 16 channels is read where it lies, if
        there are products enough to hide that its rows cross lines of memory; others are staged.
        """
        live, every, parts, a_plane, i0, i1 = (
            taps.shape[0], share.taps, share.a.parts, share.a.plane, work.first, work.end
        )  # fmt: skip
        a_part, a, acc, steps, b, stage = share.a.planes * a_plane, work.a, work.acc, work.steps, work.b, work.stage
        whole = min(i1, share.a.channels // TILE) if parts > 1 else i0
        tiles, start = max(0, whole - i0) * live, TILE * max(i0, whole) * every
        rest = (min(call.rows, TILE * i1 * every) - start) // ROWS
        a_down, acc_down = stack_array(4, np.int64), stack_array(4, np.int64)
        batch, element, more, tile = stack_record(BATCH), stack_record(ELEMENT), stack_record(TILE_STEPS), 0
        batch.elements, batch.count, batch.indirection = address_of(element), 1, address_of(more)
        batch.b_vector, more.b_part, more.c_vector = (
            share.b.plane,
            share.b.planes * share.b.plane,
            share.acc_block,
        )
        while tile < tiles + rest:
            down = _tiles_at_once((tiles if tile < tiles else tiles + rest) - tile, share.b.planes)
            for k in range(down):
                if tile < tiles:
                    i, t = divmod(tile + k, live)
                    tap = taps[t]
                    a_down[k] = (i0 + i) * TILE * a_plane + tap.plane
                    acc_down[k] = ((i0 + i) * TILE * every + tap.number) * LINE
                else:
                    a_down[k], acc_down[k] = k * ROWS * LINE, (start + (tile - tiles + k) * ROWS) * LINE
            last = min(1, down - 1)
            more.a_tile, more.c_tile = a_down[last] - a_down[0], acc_down[last] - acc_down[0]
            for k in range(2, down):  # of tiles that are not equally far apart two are summed at once
                if a_down[k] - a_down[k - 1] != more.a_tile or acc_down[k] - acc_down[k - 1] != more.c_tile:
                    down = 2
            more.a_part, batch.a_row, batch.c_row = a_part, a_plane, every * LINE
            if tile >= tiles:
                more.a_part, batch.a_row, batch.c_row = down * ROWS * LINE, LINE, LINE
            most = WALK_PIXELS if tile < tiles else STAGED_PIXELS[parts - 1]
            pieces = (steps * STEP + most - 1) // most
            work.down, work.a, work.acc = down, a + a_down[0], acc + acc_down[0]
            for piece in range(pieces):
                first, end = steps * piece // pieces, steps * (piece + 1) // pieces
                batch.a, batch.a_step, element.steps = work.a + LINE * first, LINE, end - first
                if tile >= tiles:
                    batch.a, batch.a_step = stage, parts * down * ROWS * LINE
                    for each in range(parts * down):
                        p, k = divmod(each, down)
                        call_entry(
                            table[STAGE], a + p * a_part + LINE * first,
                            call.offsets + 8 * (start + (tile - tiles + k) * ROWS), 0, batch.a_step, end - first,
                            stage + each * ROWS * LINE, 0, 0,
                        )  # fmt: skip
                _add_tiles(table, share, work, batch, b + STEP // 2 * LINE * first, dense)
            tile += down

else:

    @inlined
    def _list(share: DotShare, slab: DotSlab, tap: DotTap, span: PairSpan, elements: Rows[Element], count: int) -> int:
        """List the pairs of a span that taps meet, from the place `count` on; return the next place.

        Positions lie as boxes in boxes. Gaps along the innermost axis that has a long one, and along those outside, are
        left out; all other zeros multiply.
        """
        steps, first, unit, stop, begun, axis = share.a.steps, 0, 0, 0, count, 0
        for a in range(4):
            low, high = max(tap.low[a], slab.low[a]), min(tap.high[a], slab.high[a])
            if low >= high:
                return count
            step = steps[a] // 2
            outer = steps[a - 1] // 2 if a > 0 else step * (slab.high[0] - slab.low[0])
            if a == 0 or outer - (high - low) * step >= LEAST_GAP:
                axis, unit, first, stop = a, outer, (low - slab.low[a]) * step, (high - slab.low[a]) * step
        for number in range(2 * span.begin // unit, (2 * span.end - 1) // unit + 1 if axis > 0 else 1):
            inside, left = True, number
            for a in range(axis - 1, -1, -1):
                size = steps[a - 1] // steps[a] if a > 0 else left + 1
                x = slab.low[a] + left % size
                inside, left = inside and tap.low[a] <= x and x < min(tap.high[a], slab.high[a]), left // size
            begin = max(span.begin, (number * unit + first) // 2)
            end = min(span.end, (number * unit + stop + 1) // 2)
            if inside and begin < end:
                element = elements[count]
                element.a, element.b, element.steps = (
                    4 * (begin - span.origin),
                    LINE * (begin - span.origin),
                    end - begin,
                )
                element.flush, element.case = 0, 0
                count += 1
        if count > begun:
            elements[count - 1].flush = span.flush
        return count

    @jit
    def _add_rows(
        table: Vector, share: DotShare, slab: DotSlab, taps: Rows[DotTap], call: DotCall, work: DotWork, dense: Vector
    ) -> None:
        """Sum tiles of channels of a tap, or taps of a channel, with two blocks of b at a time, where both are dense.

        Their pixels stay in the first cache. Those of a piece are summed in two parts: long sums lose more digits.
        """
        begin, end = TILE * work.first, min(share.a.channels, TILE * work.end)
        blocks, block, pairs = share.b.planes, share.b.plane, work.steps * STEP // 2
        tiles = (end - begin + share.tile_channels - 1) // share.tile_channels
        batch, spans, ends = stack_record(BATCH), stack_array(2, PAIR_SPAN), np.zeros(taps.shape[0] + 1, np.int64)
        elements = np.empty(taps.shape[0] * MOST_ELEMENTS, ELEMENT)
        one, two = spans[0], spans[1]
        batch.a_row, batch.a_step, batch.b_vector, batch.b_step = share.row_bytes, 4, block, LINE
        batch.apart, batch.valid, one.flush, two.flush = 1, TILE, FLUSH, 0
        for first in range(0, pairs, WALK_PIXELS // 2):
            count = min(WALK_PIXELS // 2, pairs - first)
            one.begin, one.end, one.origin = first, first + count // 2, first
            two.begin, two.end, two.origin = one.end, first + count, first
            for t in range(taps.shape[0]):
                listed = ends[t]
                for half in range(2):
                    listed = _list(share, slab, taps[t], spans[half], elements, listed)
                ends[t + 1] = listed
            for j0 in range(0, blocks, 2):
                across = min(2, blocks - j0)
                size = across if dense[j0] + dense[j0 + across - 1] == 2 else 1
                for j in range(j0, j0 + across, size):
                    batch.b, line = work.b + j * block + LINE * first, _line(share, j)
                    batch.c_row = batch.totals_row = share.row_sums * line
                    for tile in range(tiles if dense[j] == 1 else 0):
                        channel = begin + (end - begin) * tile // tiles
                        channels = begin + (end - begin) * (tile + 1) // tiles - channel
                        for t in range(taps.shape[0]):
                            tap = taps[t]
                            batch.elements, batch.count = (
                                address_of(elements) + ends[t] * ELEMENT_BYTES,
                                ends[t + 1] - ends[t],
                            )
                            if batch.count == 0:
                                continue
                            batch.rows = channels * tap.rows
                            batch.a = work.a + channel * share.a.plane + tap.plane + 4 * first
                            batch.c = work.acc + _block(share, j) + (channel * share.taps + tap.number) * line
                            batch.next = batch.totals = batch.c
                            call_entry(table[BLOCKS + size - 1], address_of(batch))
        keep_alive(elements)


@jit
def _walk(
    table: Vector, share: DotShare, slab: DotSlab, taps: Rows[DotTap], call: DotCall, dense: Table, acc: int
) -> None:
    """Sum the dense pairs of blocks, as many at once as have the same ones."""
    pixels, i, work = (slab.high[0] - slab.low[0] - 1) * share.a.steps[0] // 2 + share.pixels, 0, stack_record(WORK)
    while i < dense.shape[0]:
        start, same, some = i, True, 0
        while same:
            i += 1
            same = i < dense.shape[0]
            for j in range(dense.shape[1] if same else 0):
                same &= dense[i, j] == dense[start, j]
        for j in range(dense.shape[1]):
            some += dense[start, j]
        if some > 0:
            work.first, work.end, work.steps = start, i, (pixels + STEP - 1) // STEP
            work.a, work.acc = call.panels, acc
            work.b, work.stage = call.panels + share.b.target, call.panels + share.b.scratch
            _add_rows(table, share, slab, taps, call, work, dense[start])


@jit
def _walk_exactly(
    exact: int, share: DotShare, slab: DotSlab, taps: Rows[DotTap], packings: Rows[Packing], dense: Table,
    nonfinite: Table, acc: int,
) -> None:  # fmt: skip
    """Sum all other pairs of blocks, over the pixels for which each tap is inside, from the tensors themselves.

    Of a dense pair only the sums of nonfinite channels are kept.
    """
    sides, buffer = stack_record(SIDES), stack_array(BLOCK, np.float32)
    a, b, a_nonfinite, b_nonfinite = packings[0], packings[1], nonfinite[0], nonfinite[1]
    a_strides, b_strides = a.strides, b.strides
    for pair in range(dense.size):
        i, j = divmod(pair, dense.shape[1])
        rows, lanes = min(TILE, a.channels - TILE * i), min(TILE, b.channels - TILE * j)
        some = dense[i, j] == 0
        for m in range(rows):
            some |= a_nonfinite[TILE * i + m] == 1
        for lane in range(lanes):
            some |= b_nonfinite[TILE * j + lane] == 1
        sides.a_channel, sides.a_last, sides.b_channel, sides.b_last = a.channel, rows - 1, b.channel, lanes - 1
        for t in range(taps.shape[0] if some else 0):
            tap = taps[t]
            row = share.taps * _line(share, j)
            sums = acc + _block(share, j) + (i * TILE * share.taps + tap.number) * _line(share, j)
            to, line = sums, row
            if dense[i, j] == 1:
                to, line = address_of(buffer), LINE
                copy_panel(F32, TILE, to, line, sums, row, rows)
            first, second = a.source + TILE * i * a.channel + tap.source, b.source + TILE * j * b.channel
            low, high = max(slab.low[3], tap.low[3]), min(slab.high[3], tap.high[3])
            for n in range(max(slab.low[0], tap.low[0]), min(slab.high[0], tap.high[0]) if low < high else 0):
                for d in range(max(slab.low[1], tap.low[1]), min(slab.high[1], tap.high[1])):
                    for h in range(max(slab.low[2], tap.low[2]), min(slab.high[2], tap.high[2])):
                        one = first + n * a_strides[0] + d * a_strides[1] + h * a_strides[2] + low * a_strides[3]
                        other = second + n * b_strides[0] + d * b_strides[1] + h * b_strides[2] + low * b_strides[3]
                        call_entry(
                            exact, one, a_strides[3], other, b_strides[3], high - low, to, line, address_of(sides)
                        )  # fmt: skip
            for m in range(rows if dense[i, j] == 1 else 0):
                for lane in range(lanes):
                    if a_nonfinite[TILE * i + m] + b_nonfinite[TILE * j + lane] > 0:
                        store_value(sums + m * row + 4 * lane, load(F32, to + m * LINE + 4 * lane))


@jit
def _pack(
    packing: Packing, boxes: Rows[PackedBox], before: Rows[PackedBox], peaks: Rows[Peaks], nonfinite: Vector
) -> None:
    """Pack all parts of some channels, and see how large their values are."""
    pack_boxes(packing, boxes, before)
    if packing.parts == 2:
        part = packing.planes * packing.plane
        split_f16(packing.target, packing.target + part, part // LINE)
    _peaks(packing, boxes, peaks, nonfinite)


@jit
def add_dots(
    table: Vector, shares: Rows[DotShare], calls: Rows[DotCall], slabs: Rows[DotSlab], boxes: Rows[PackedBox],
    last: Rows[PackedBox], taps: Rows[DotTap], underflowed: Table,
) -> None:  # fmt: skip
    """Add slabs of pixels to the accumulators of the one share's groups.

    `boxes` are for each slab those of a, then that of b; `last` those that were packed last, if any. `taps` are the
    live ones, then the same as tiles take them. `underflowed` has a row for each group: the pairs of blocks that
    `_find_dense` found to be so.
    """
    call = calls[0]
    share = shares[0]
    channels, phases = share.a.channels, share.phases
    a_peaks, b_peaks = np.empty((channels + TILE - 1) // TILE, PEAKS), np.empty(share.b.planes, PEAKS)
    dense = np.empty((a_peaks.shape[0], b_peaks.shape[0]), np.int64)
    nonfinite = np.empty((2, max(channels, share.b.channels)), np.int64)
    packings = stack_array(2, PACKING)
    packings[0], packings[1] = share.a, share.b
    for i in range(2):
        packings[i].target += call.panels
        packings[i].scratch += call.panels
    a_last, b_last = last[:phases], last[phases:]
    for s in range(slabs.shape[0]):
        slab, wide, narrow = slabs[s], packings[0], packings[1]
        now = boxes[s * (phases + 1) : (s + 1) * (phases + 1)]
        for g in range(share.groups):
            sums = call.acc + g * share.acc_group
            narrow.source = call.b + share.b.source + g * share.b_group
            _pack(narrow, now[phases:], b_last, b_peaks, nonfinite[1])
            wide.source = call.a + share.a.source + g * share.a_group
            _pack(wide, now[:phases], a_last, a_peaks, nonfinite[0])
            a_last, b_last = now[:phases], now[phases:]
            _find_dense(wide.parts, a_peaks, b_peaks, underflowed[g], dense)
            call_entry(table[BEGIN], 0, 0, 0, 0, 0, 0, 0, 0)
            _walk(table, share, slab, taps[share.live :], call, dense, sums)
            call_entry(table[END], 0, 0, 0, 0, 0, 0, 0, 0)
            _walk_exactly(
                table[EXACT + wide.parts - 1], share, slab, taps[: share.live], packings, dense, nonfinite, sums
            )
