"""The compiled loops of ConvTranspose forward for few dst channels: products are added where they belong.

Lanes of a tile are (tap, dst channel) pairs and its rows src pixels; the products of a src pixel and a line of the
kernel then lie next to each other, as their dst pixels do.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.brgemm import FLUSH, FLUSH_FIRST, Batch, Element
from kernels.emit.compiler import Rows, Vector, jit
from kernels.emit.intrinsics import (
    F32,
    add_run,
    address_of,
    call_entry,
    fill_zero,
    keep_alive,
    load,
    stack_array,
    stack_record,
    store_value,
)
from kernels.forward.gather import bring_box
from kernels.forward.output import bring_bias, fill, write
from kernels.forward.records import Call, Pass, ScatterShare, TapLine, TapRun, TapRuns, Work
from kernels.pack.panels import Values
from kernels.target import target

__all__ = ["pack_columns", "scatter"]

WIDTH = target().lanes
LANES = 2 * WIDTH

TAP_LINE, WORK, ELEMENT, BATCH = TapLine.dtype, Work.dtype, Element.dtype, Batch.dtype


@jit
def pack_columns(shares: Rows[ScatterShare], passes: Rows[Pass], calls: Rows[Call]) -> None:
    """Pack panels [group][vector][src channel][lanes] of (tap, dst channel) pairs."""
    share, one, call = shares[0], passes[0], calls[0]
    weights, channels, out = one.weights, share.src_channels, share.channels
    lanes = 2 * WIDTH * share.blocks
    for g in range(one.groups):
        for lane in range(lanes):
            tap, c = lane // out, lane % out
            inside = tap < share.kernel[0] * share.kernel[1] * share.kernel[2]
            source = call.weights + weights.start + g * weights.group + tap * weights.tap + c * weights.dst_channel
            place = call.panels + 4 * (g * lanes * channels + lane // WIDTH * channels * WIDTH + lane % WIDTH)
            for k in range(channels):
                value = load(share.kind, source + k * weights.src_channel) if inside else 0.0
                store_value(place + 4 * WIDTH * k, np.float32(value))


@jit
def _meet(
    share: ScatterShare, planes: Rows[TapRun], lines: Rows[TapRun], d: int, h: int, counts: Vector, acc: int,
    live: Rows[TapLine],
) -> int:  # fmt: skip
    """List the lines of taps that src line (d, h) meets wanted dst lines with; give their number."""
    kernel, strides, low, out = share.kernel, share.strides, share.wanted.low, share.channels
    count = 0
    for i in range(planes.shape[0]):
        plane = planes[i]
        u = plane.dst + (d - plane.src) * strides[0] - low[1]
        if d < plane.src or d >= plane.src + plane.count or u < 0 or u >= counts[1]:
            continue
        for j in range(lines.shape[0]):
            line = lines[j]
            v = line.dst + (h - line.src) * strides[1] - low[2]
            if h >= line.src and h < line.src + line.count and v >= 0 and v < counts[2]:
                met = live[count]
                met.products = 4 * (plane.tap * kernel[1] + line.tap) * kernel[2] * out
                met.sums = acc + 4 * (u * counts[2] + v) * counts[3] * out
                count += 1
    return count


@jit
def _add_tile(
    share: ScatterShare, columns: Rows[TapRun], live: Rows[TapLine], first: int, rows: int, products: int
) -> None:
    """Add the products of `rows` src pixels of a line, from column `first` on, to the sums that they belong to."""
    low, high, out, stride = share.wanted.low[3], share.wanted.high[3], share.channels, share.strides[2]
    # as src columns rise, the taps of a line that are inside fall
    start, stop = columns.shape[0], columns.shape[0]
    for x in range(first, first + rows):
        while stop > 0:
            tap = columns[stop - 1]
            j = x - tap.src
            if j < tap.count and tap.dst + j * stride < high:
                break
            stop -= 1
        while start > 0:
            tap = columns[start - 1]
            j = x - tap.src
            if j < 0 or tap.dst + j * stride < low:
                break
            start -= 1
        k = start
        while k < stop:
            tap = columns[k]
            run = stop - k if share.dense else 1
            u = 4 * out * (tap.dst + (x - tap.src) * stride - low)
            for i in range(live.shape[0]):
                met = live[i]
                add_run(met.sums + u, products + met.products + 4 * out * tap.tap, run * out)
            k += run
        products += 8 * WIDTH * share.blocks


@jit
def scatter(
    table: Vector, shares: Rows[ScatterShare], passes: Rows[Pass], calls: Rows[Call], runs: TapRuns, first: int,
    last: int,
) -> None:  # fmt: skip
    """Do items ``first..last`` in order: each is some src lines of one plane, group and image.

    The call's `products` hold those of one tile, its `sums` those of one image and group [d][h][w][dst channels].
    """
    share, one, call = shares[0], passes[0], calls[0]
    planes, lines, columns = runs.planes, runs.lines, runs.columns
    kind, channels, src, dst, chunk = share.kind, share.src_channels, one.src, one.dst, share.chunk
    out, groups, limit, used = share.channels, one.groups, share.limit, share.blocks
    low, high, reach, acc = share.wanted.low, share.wanted.high, share.reach, call.sums
    counts, sums, buffer = stack_array(4, np.int64), stack_array(4, np.int64), stack_array(64, np.float32)
    work, batch, live = stack_record(WORK), stack_record(BATCH), np.empty(planes.shape[0] * lines.shape[0], TAP_LINE)
    elements = np.zeros((channels + chunk - 1) // chunk, ELEMENT)
    for number in range(elements.shape[0]):
        element, done = elements[number], number * chunk
        element.a, element.b, element.steps = 4 * done, 4 * WIDTH * done, min(chunk, channels - done)
        element.flush = FLUSH if number > 0 else FLUSH_FIRST
    elements[elements.shape[0] - 1].flush = 0
    batch.elements, batch.count, batch.valid = address_of(elements), elements.shape[0], WIDTH
    zeros = stack_array(LANES, np.float32)
    batch.start, batch.apart = address_of(zeros), 1 if channels > chunk else 0
    batch.a_step, batch.b_step, batch.b_vector = 4, 4 * WIDTH, 4 * WIDTH * channels
    batch.c_row, batch.totals_row = 8 * WIDTH * used, 8 * WIDTH
    batch.totals = call.products + limit * used * 8 * WIDTH if channels > chunk else 0
    for axis in range(1, 4):
        counts[axis] = high[axis] - low[axis]
    counts[0], sums[3] = 1, 4 * out
    for axis in range(2, -1, -1):
        sums[axis] = sums[axis + 1] * counts[axis + 1]
    chunks = max(1, (reach.high[2] - reach.low[2] + share.lines - 1) // share.lines)
    depth = max(1, reach.high[1] - reach.low[1])
    left, width = reach.low[3], reach.high[3] - reach.low[3]
    box, sizes = work.band.first, work.band.sizes
    sizes[0], sizes[1], box[3], sizes[3] = 1, 1, left, width
    for item in range(first, last):
        g = item // (chunks * depth) % groups
        n, d = low[0] + item // (chunks * depth * groups), reach.low[1] + item // chunks % depth
        begin = reach.low[2] + item % chunks * share.lines
        end = min(reach.high[2], begin + share.lines)
        if item % (chunks * depth) == 0:
            if call.bias == 0:  # data gradients: for three channels zeros at once are several times as fast
                fill_zero(acc, sums[0])
            else:
                bring_bias(kind, one, call, g, 0, out, call.products)
                fill(F32, call.products, out, counts, acc, sums)
        box[0], box[1], box[2], sizes[2] = n, d, begin, end - begin
        work.start = call.src + src.start + g * src.group
        for axis in range(4):
            work.src[axis] = src.strides[axis]
        if share.packed:
            source = work.start
            for axis in range(4):
                source += box[axis] * src.strides[axis]
            values = Values(kind, source, src.strides[:], src.channel, call.src + src.nbytes)
            bring_box(values, channels, share.pixel_bytes, work, call.source)
        steps = work.src
        base = work.start + n * steps[0] + d * steps[1]
        batch.a_row = steps[3]
        for h in range(begin, end):
            count = _meet(share, planes, lines, d, h, counts, acc, live)
            pieces = (width + limit - 1) // limit if count > 0 else 0
            for piece in range(pieces):
                x, rows = left + width * piece // pieces, width * (piece + 1) // pieces - width * piece // pieces
                batch.rows, batch.a = rows, base + h * steps[2] + x * steps[3]
                for b in range(used):
                    batch.b = call.panels + 8 * WIDTH * channels * (g * used + b)
                    batch.c = batch.next = call.products + b * 8 * WIDTH
                    call_entry(table[1], address_of(batch))
                _add_tile(share, columns, live[:count], x, rows, call.products)
        if item % (chunks * depth) == chunks * depth - 1:
            place = call.dst + dst.start + g * dst.group + n * dst.strides[0]
            for axis in range(1, 4):
                place += low[axis] * dst.strides[axis]
            to = Values(kind, place, dst.strides[:], dst.channel, call.dst + dst.nbytes)
            write(to, acc, out, out, counts, address_of(buffer))
    keep_alive(elements)
