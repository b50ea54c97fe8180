"""The compiled loops of ConvTranspose forward for few dst channels: products are added where they belong.

Lanes of a register tile are (tap, dst channel) pairs and its rows src pixels; the products of a src pixel and a line of
the kernel then lie next to each other, as their dst pixels do. A class is one tap, and taps are numbered as they are.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.compiler import Rows, Vector, jit
from kernels.emit.intrinsics import SEGMENT_LOG, add_run, address_of, call_tile, fill_zero, store_value
from kernels.forward.gather import bring_source, load, write
from kernels.forward.records import Bias, Call, Class, Pass, ScatterShare, TapLine, Work
from kernels.pack.panels import pack_panel
from kernels.target import target

__all__ = ["pack_columns", "scatter"]

WIDTH = target().lanes

TAP_LINE, WORK = TapLine.dtype, Work.dtype


@jit
def pack_columns(shares: Rows[ScatterShare], passes: Rows[Pass], calls: Rows[Call]) -> None:
    """Pack panels [group][src channel][tap, dst channel]; a src channel has room for 8 more lanes."""
    share, one, call = shares[0], passes[0], calls[0]
    weights, channels, out, line = one.weights, share.shape.channels, share.channels, share.line_bytes
    counts, steps, to = np.ones(4, np.int64), np.zeros(4, np.int64), np.zeros(4, np.int64)
    counts[3], steps[3], to[3] = channels, weights.src_channel, line
    for g in range(one.groups):
        for tap in range(_taps(share)):  # rising, because a line may spill over into the next tap's lanes
            place = call.panels + g * channels * line + 4 * tap * out
            source = call.weights + weights.start + g * weights.group + tap * weights.tap
            pack_panel(
                share.shape.kind, out, out, place, counts, to, source, steps, weights.lane,
                call.weights + weights.nbytes,
            )  # fmt: skip


@jit
def _taps(share: ScatterShare) -> int:
    """Count the taps of a group."""
    kernel = share.shape.kernel
    taps: int = kernel[0] * kernel[1] * kernel[2]
    return taps


@jit
def _begin(kind: int, acc: int, pixels: int, out: int, address: int, bias: Bias, g: int) -> None:
    """Begin the sums of some dst pixels with the bias, if it has an address."""
    if address == 0:
        fill_zero(acc, 4 * pixels * out)
        return
    for c in range(out):
        value = load(kind, address + bias.start + g * bias.group + c * bias.lane)
        for p in range(pixels):
            store_value(acc + 4 * (p * out + c), value)


@jit
def _meet(
    share: ScatterShare, planes: Rows[Class], lines: Rows[Class], d: int, h: int, counts: Vector, acc: int,
    live: Rows[TapLine],
) -> int:  # fmt: skip
    """List the lines of taps that src line (d, h) meets wanted dst lines with; give their number."""
    kernel, strides, low, out = share.shape.kernel, share.shape.strides, share.wanted.low, share.channels
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
                met.products = 4 * (plane.first * kernel[1] + line.first) * kernel[2] * out
                met.sums = acc + 4 * (u * counts[2] + v) * counts[3] * out
                count += 1
    return count


@jit
def scatter(
    table: Vector, shares: Rows[ScatterShare], passes: Rows[Pass], calls: Rows[Call], planes: Rows[Class],
    lines: Rows[Class], columns: Rows[Class], first: int, last: int,
) -> None:  # fmt: skip
    """Do items ``first..last`` in order: each is some src lines of one plane, group and image.

    The call's `products` hold those of one tile, its `sums` those of one image and group [d][h][w][dst channels].
    """
    share, one, call = shares[0], passes[0], calls[0]
    shape, src, dst = share.shape, one.src, one.dst
    kind, channels, out, groups, limit = shape.kind, shape.channels, share.channels, one.groups, share.limit
    low, high, reach, acc = share.wanted.low, share.wanted.high, share.reach, call.sums
    used = (_taps(share) * out + 2 * WIDTH - 1) // (2 * WIDTH)
    counts, spare = np.empty(4, np.int64), np.empty(64, np.float32)
    live, works = np.empty(planes.shape[0] * lines.shape[0], TAP_LINE), np.empty(1, WORK)
    work = works[0]  # in the loop the table is named too: that keeps it
    for axis in range(1, 4):
        counts[axis] = high[axis] - low[axis]
    counts[0] = 1
    chunks = max(1, (reach.high[2] - reach.low[2] + share.lines - 1) // share.lines)
    depth = max(1, reach.high[1] - reach.low[1])
    walk, box = work.walk, work.reach
    for axis in range(3):
        walk.panel[axis], walk.scalars[axis], walk.counts[axis] = 1, 1, 1
    walk.panel[2], walk.counts[2] = share.line_bytes // (8 * WIDTH), channels
    walk.acc_step, walk.segment, walk.start = used, SEGMENT_LOG, 0
    box.sizes[0], box.sizes[1] = 1, 1
    left, width = reach.low[3], reach.high[3] - reach.low[3]
    box.first[3], box.sizes[3] = left, width
    for item in range(first, last):
        g = item // (chunks * depth) % groups
        n, d = low[0] + item // (chunks * depth * groups), reach.low[1] + item // chunks % depth
        begin = reach.low[2] + item % chunks * share.lines
        end = min(reach.high[2], begin + share.lines)
        if item % (chunks * depth) == 0:
            _begin(kind, acc, counts[1] * counts[2] * counts[3], out, call.bias, one.bias, g)
        box.first[0], box.first[1], box.first[2], box.sizes[2] = n, d, begin, end - begin
        base = bring_source(
            shape,
            0,
            src,
            call.src + src.start + g * src.group,
            call.src + src.nbytes,
            False,
            works[0],
            call.source,
        )
        steps, offsets = work.src, work.offsets
        base += n * steps[0] + d * steps[1]
        walk.scalars[2] = work.channel
        for m in range(limit):
            offsets[m] = m * steps[3]
        for h in range(begin, end):
            count = _meet(share, planes, lines, d, h, counts, acc, live)
            # as src columns rise, the taps of a line that are inside fall
            start, stop = columns.shape[0], columns.shape[0]
            pieces = (width + limit - 1) // limit if count > 0 else 0
            for piece in range(pieces):
                x, rows = left + width * piece // pieces, width * (piece + 1) // pieces - width * piece // pieces
                fill_zero(call.products, rows * used * 8 * WIDTH)
                for b in range(used):
                    call_tile(
                        table[rows], address_of(walk), call.panels + g * channels * share.line_bytes + b * 8 * WIDTH,
                        base + h * steps[2] + x * steps[3], address_of(offsets), call.products + b * 8 * WIDTH,
                    )  # fmt: skip
                for m in range(rows):
                    while stop > 0:
                        tap = columns[stop - 1]
                        j = x + m - tap.src
                        if j < tap.count and tap.dst + j * shape.strides[2] < high[3]:
                            break
                        stop -= 1
                    while start > 0:
                        tap = columns[start - 1]
                        j = x + m - tap.src
                        if j < 0 or tap.dst + j * shape.strides[2] < low[3]:
                            break
                        start -= 1
                    products = call.products + m * used * 8 * WIDTH
                    k = start
                    while k < stop:
                        tap = columns[k]
                        run = stop - k if share.dense else 1
                        u = 4 * out * (tap.dst + (x + m - tap.src) * shape.strides[2] - low[3])
                        for i in range(count):
                            met = live[i]
                            add_run(met.sums + u, products + met.products + 4 * out * tap.first, run * out)
                        k += run
        if item % (chunks * depth) == chunks * depth - 1:
            place = call.dst + dst.start + g * dst.group + n * dst.strides[0]
            for axis in range(1, 4):
                place += low[axis] * dst.strides[axis]
            write(kind, acc, out, out, counts, place, dst.strides[:], dst.lane, spare.ctypes.data)
