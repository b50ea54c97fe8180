"""Filter gradients on products of bf16 pairs, where the processor has instructions for them.

Zeros multiply here: those that fill up channels, pairs and steps, and short runs of padding. With finite data they add
nothing. Where a slab holds Inf or NaN, or channels so small that their products would vanish, sums are formed pixel by
pixel over real taps instead (`exact`), for a block of 16 channels of the narrow tensor. That depends on the problem and
its data alone, so the bits do not depend on the workers.

The instructions take subnormal numbers (below 2**-126) as zero, in what they read and in what they write. With `P` the
largest product that two channels allow in a slab (the largest magnitude of one times that of the other), each product
of the two and each addition loses at most ``2**-40 * P`` by that; and with tile registers a sum that is itself that
small, where another slab follows.
"""

from __future__ import annotations

import numpy as np

from kernels.blocks import SUMS
from kernels.emit.brgemm import FLUSH, Batch, Element
from kernels.emit.compiler import Rows, Vector, inlined, jit
from kernels.emit.dots import BEGIN, BLOCKS, DOWN, END, EXACT, STAGE, STAGED, STEP, TILE, Sides
from kernels.emit.intrinsics import address_of, call_entry, fill_zero, keep_alive, stack_array, stack_record
from kernels.gradient.dots.records import DotCall, DotShare, DotSlab, DotTap, PackedBox, Packing
from kernels.gradient.dots.schedule import LEAST_GAP
from kernels.pack.magnitudes import SPECIAL, lane_peaks
from kernels.pack.pairs import pack_boxes

__all__ = ["STAGE_BYTES", "add_dots"]

WALK_PIXELS, STAGED_PIXELS = SUMS.walk_pixels, SUMS.staged_pixels

STAGE_BYTES = 2 * STAGED_PIXELS * TILE * DOWN[0] if STAGED else 0
"""Room for staged rows."""

LEAST_PEAK, LEAST_PEAKS = 41, 168
"""Exponents, as f32 stores them, of the largest values of each channel, and sums of two channels' exponents.

Above these, what is lost because subnormal numbers count as zeros (products as well) is 2**-40 of the largest product
of both channels: 2**-126 times another channel's peak is that of the product with a peak of 2**-86, and 2**-126 that of
a product of 2**-86.
"""

LINE = 4 * TILE
"""Bytes of a block's accumulator row."""

MOST_ELEMENTS = 2 * (WALK_PIXELS // LEAST_GAP + 2)
"""Elements of a piece of a walk."""

BATCH, ELEMENT, PACKING, SIDES = (each.dtype for each in (Batch, Element, Packing, Sides))
ELEMENT_BYTES = ELEMENT.itemsize


@jit
def _clear(packing: Packing, boxes: Rows[PackedBox]) -> None:
    """Write zeros behind the only box where its lines have no gaps between them, and everywhere where they have."""
    plane, end, steps = packing.plane, 0, packing.steps
    if boxes.shape[0] == 1 and boxes[0].place == 0:
        sizes = boxes[0].sizes
        end = 2 * sizes[3]
        for axis in range(2, -1, -1):
            end = end * sizes[axis] if sizes[axis] == 1 or steps[axis] == end else 0
    full = packing.channels
    if packing.pairs:
        full, end = full // TILE, end // 4 * LINE
    for p in range(packing.planes):
        start = end if p < full else 0
        fill_zero(packing.target + p * plane + start, plane - start)


@jit
def _least_peaks(packing: Packing, peaks: Vector) -> None:
    """Find the smallest of the channels' largest values, of all planes or of each panel of pairs, as bits of bf16.

    It is 0 where a value is Inf or NaN. Channels of zeros do not count.
    """
    lanes, whole, pairs = stack_array(TILE, np.uint16), 0, packing.pairs
    peaks[:] = SPECIAL
    for c in range(packing.channels):
        block = c // TILE if pairs else 0
        if not pairs or c % TILE == 0:
            place = packing.target + (block if pairs else c) * packing.plane
            whole = lane_peaks(place, packing.plane // LINE, address_of(lanes))
        peak = int(lanes[c % TILE]) if pairs else whole
        if peak > 0:
            peaks[block] = min(peaks[block], peak) if peak < SPECIAL else 0


@jit
def _pack(packing: Packing, boxes: Rows[PackedBox], peaks: Vector) -> None:
    """Pack some channels, and see how large their values are."""
    _clear(packing, boxes)
    pack_boxes(packing, boxes)
    _least_peaks(packing, peaks)


@inlined
def _line(share: DotShare, j: int) -> int:
    """Return the bytes of an accumulator row of a block of b: two blocks share rows."""
    return 2 * LINE if (j ^ 1) < share.b.planes else LINE


@inlined
def _block(share: DotShare, j: int) -> int:
    """Return the bytes from the accumulators to those of a block of b."""
    return j // 2 * 2 * share.acc_block + j % 2 * LINE


@inlined
def _across(exact: Vector, j: int) -> int:
    """Count the blocks of b that are summed from one on: two that share rows, none where an `exact` one begins."""
    other = j ^ 1
    both = other < exact.shape[0] and exact[j] + exact[other] == 0
    return 2 - j % 2 * 2 if both else 1 - exact[j]


if STAGED:

    @jit
    def _add_rows(
        table: Vector, share: DotShare, slab: DotSlab, taps: Rows[DotTap], call: DotCall, exact: Vector, acc: int
    ) -> None:
        """Stage tiles of rows, some at a time, and sum them with all blocks of b that are not exact.

        Their sums stay in the second cache for all pixels.
        """
        blocks, steps, tile, tiles = share.b.planes, slab.pairs // (STEP // 2), 0, call.rows // TILE
        b = call.panels + share.b.target
        stage, most = b + blocks * share.b.plane, DOWN[min(blocks, 2) - 1]
        pieces = (steps * STEP + STAGED_PIXELS - 1) // STAGED_PIXELS
        batch, element = stack_record(BATCH), stack_record(ELEMENT)
        batch.elements, batch.count = address_of(element), 1
        batch.a, batch.a_row, batch.b_vector = stage, LINE, share.b.plane
        while tile < tiles:
            times = (tiles - tile + most - 1) // most
            down = (tiles - tile + times - 1) // times
            batch.rows, batch.a_step = TILE * down, TILE * LINE * down
            for piece in range(pieces):
                first, end = steps * piece // pieces, steps * (piece + 1) // pieces
                element.steps = end - first
                for k in range(down):
                    offsets = call.offsets + 8 * TILE * (tile + k)
                    to = stage + TILE * LINE * k
                    call_entry(table[STAGE], call.panels + LINE * first, offsets, batch.a_step, end - first, to)
                for j in range(blocks):
                    across = _across(exact, j)
                    if across > 0:
                        batch.c_row = batch.start_row = _line(share, j)
                        batch.b = b + j * share.b.plane + STEP // 2 * LINE * first
                        batch.c = batch.start = acc + _block(share, j) + TILE * tile * batch.c_row
                        call_entry(table[BLOCKS + across - 1], address_of(batch))
            tile += down

else:

    @inlined
    def _list(
        share: DotShare, slab: DotSlab, tap: DotTap, low: int, high: int, elements: Rows[Element], count: int
    ) -> int:
        """List those pairs from `low` to `high` that taps meet, from the place `count` on; return the next place.

        Positions lie as boxes in boxes. Gaps along the innermost axis that has a long one, and along those outside, are
        left out; all other zeros multiply.
        """
        steps, first, unit, stop, axis = share.a.steps, 0, 0, 0, 0
        for a in range(4):
            begin, end = max(tap.low[a], slab.low[a]), min(tap.high[a], slab.high[a])
            if begin >= end:
                return count
            step = steps[a] // 2
            outer = steps[a - 1] // 2 if a > 0 else step * (slab.high[0] - slab.low[0])
            if a == 0 or outer - (end - begin) * step >= LEAST_GAP:
                axis, unit, first, stop = a, outer, (begin - slab.low[a]) * step, (end - slab.low[a]) * step
        for number in range(2 * low // unit, (2 * high - 1) // unit + 1 if axis > 0 else 1):
            inside, left = True, number
            for a in range(axis - 1, -1, -1):
                size = steps[a - 1] // steps[a] if a > 0 else left + 1
                x = slab.low[a] + left % size
                inside, left = inside and tap.low[a] <= x and x < min(tap.high[a], slab.high[a]), left // size
            begin = max(low, (number * unit + first) // 2)
            end = min(high, (number * unit + stop + 1) // 2)
            if inside and begin < end:
                element = elements[count]
                element.a, element.b, element.steps, element.flush = 4 * begin, LINE * begin, end - begin, 0
                count += 1
        return count

    @jit
    def _add_rows(
        table: Vector, share: DotShare, slab: DotSlab, taps: Rows[DotTap], call: DotCall, exact: Vector, acc: int
    ) -> None:
        """Sum tiles of channels of a tap, or taps of a channel, with all blocks of b that are not exact.

        Their pixels stay in the first cache. Those of a piece are summed in two parts: long sums lose more digits.
        """
        channels, pairs, ends = share.a.channels, slab.pairs, np.zeros(taps.shape[0] + 1, np.int64)
        tiles = (channels + share.tile_channels - 1) // share.tile_channels
        batch, elements = stack_record(BATCH), np.zeros(taps.shape[0] * MOST_ELEMENTS, ELEMENT)
        batch.a_row, batch.a_step, batch.b_vector, batch.b_step = share.row_bytes, 4, share.b.plane, LINE
        batch.apart, batch.valid = 1, TILE
        for first in range(0, pairs, WALK_PIXELS // 2):
            last = min(first + WALK_PIXELS // 2, pairs)
            half = (first + last) // 2
            for t in range(taps.shape[0]):
                listed = _list(share, slab, taps[t], first, half, elements, ends[t])
                if listed > ends[t]:
                    elements[listed - 1].flush = FLUSH
                ends[t + 1] = _list(share, slab, taps[t], half, last, elements, listed)
            for j in range(share.b.planes):
                across, line = _across(exact, j), _line(share, j)
                batch.b = call.panels + share.b.target + j * share.b.plane
                batch.c_row = batch.totals_row = share.row_sums * line
                for tile in range(tiles if across > 0 else 0):
                    channel = channels * tile // tiles
                    count = channels * (tile + 1) // tiles - channel
                    for t in range(taps.shape[0]):
                        tap = taps[t]
                        batch.elements = address_of(elements) + ends[t] * ELEMENT_BYTES
                        batch.count, batch.rows = ends[t + 1] - ends[t], count * tap.rows
                        batch.a = call.panels + channel * share.a.plane + tap.plane
                        batch.c = acc + _block(share, j) + (channel * share.taps + tap.number) * line
                        batch.next = batch.totals = batch.c
                        if batch.count > 0:
                            call_entry(table[BLOCKS + across - 1], address_of(batch))
        keep_alive(elements)


@jit
def _add_exactly(
    entry: int, share: DotShare, slab: DotSlab, taps: Rows[DotTap], packings: Rows[Packing], j: int, acc: int
) -> None:
    """Sum all rows with a block of b over the pixels for which each tap is inside, from the tensors themselves."""
    sides, a, b, line = stack_record(SIDES), packings[0], packings[1], _line(share, j)
    a_strides, b_strides = a.strides, b.strides
    sides.a_channel, sides.b_channel, sides.b_last = a.channel, b.channel, min(TILE, b.channels - TILE * j) - 1
    for item in range((a.channels + TILE - 1) // TILE * taps.shape[0]):
        channel, tap = item // taps.shape[0] * TILE, taps[item % taps.shape[0]]
        sides.a_last = min(TILE, a.channels - channel) - 1
        sums = acc + _block(share, j) + (channel * share.taps + tap.number) * line
        first, second = a.source + channel * a.channel + tap.source, b.source + TILE * j * b.channel
        low, high = max(slab.low[3], tap.low[3]), min(slab.high[3], tap.high[3])
        for n in range(max(slab.low[0], tap.low[0]), min(slab.high[0], tap.high[0]) if low < high else 0):
            for d in range(max(slab.low[1], tap.low[1]), min(slab.high[1], tap.high[1])):
                for h in range(max(slab.low[2], tap.low[2]), min(slab.high[2], tap.high[2])):
                    one = first + n * a_strides[0] + d * a_strides[1] + h * a_strides[2] + low * a_strides[3]
                    other = second + n * b_strides[0] + d * b_strides[1] + h * b_strides[2] + low * b_strides[3]
                    call_entry(
                        entry, one, a_strides[3], other, b_strides[3], high - low, sums, share.taps * line,
                        address_of(sides),
                    )  # fmt: skip


@jit
def add_dots(
    table: Vector, shares: Rows[DotShare], calls: Rows[DotCall], slabs: Rows[DotSlab], boxes: Rows[PackedBox],
    taps: Rows[DotTap],
) -> None:  # fmt: skip
    """Add slabs of pixels to the accumulators of the one share's groups.

    `boxes` are for each slab those of a, then that of b. `taps` are the live ones, then the same as tiles take them.
    """
    call, share, packings, a_peaks = calls[0], shares[0], stack_array(2, PACKING), stack_array(1, np.int64)
    phases, blocks = share.phases, share.b.planes
    b_peaks, exact = np.empty(blocks, np.int64), np.empty(blocks, np.int64)
    packings[0], packings[1] = share.a, share.b
    for i in range(2):
        packings[i].target += call.panels
    for s in range(slabs.shape[0]):
        slab, wide, narrow = slabs[s], packings[0], packings[1]
        now = boxes[s * (phases + 1) : (s + 1) * (phases + 1)]
        for g in range(share.groups):
            sums = call.acc + g * share.acc_group
            narrow.source = call.b + share.b.source + g * share.b_group
            _pack(narrow, now[phases:], b_peaks)
            wide.source = call.a + share.a.source + g * share.a_group
            _pack(wide, now[:phases], a_peaks)
            for j in range(blocks):
                first, second = a_peaks[0] >> 7, b_peaks[j] >> 7
                exact[j] = 1 if min(first, second) < LEAST_PEAK or first + second < LEAST_PEAKS else 0
            call_entry(table[BEGIN])
            _add_rows(table, share, slab, taps[share.live :], call, exact, sums)
            call_entry(table[END])
            for j in range(blocks):
                if exact[j] == 1:
                    _add_exactly(table[EXACT], share, slab, taps[: share.live], packings, j, sums)
