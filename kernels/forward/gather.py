"""The compiled loops of the forward operations where every dst pixel gathers its taps.

Pixels that share their taps (`kernels.forward.classes`) are the rows of a register tile, wherever they lie: in a line,
in several lines, in several images. Its lanes are dst channels, or groups, and one call sums over all taps and src
channels.

Everything is addresses, byte steps and tables (`kernels.forward.records`) that `kernels.forward.share` has laid out;
nothing is checked here.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.compiler import Rows, Table, Vector, jit
from kernels.emit.depthwise import LANE_PIXELS, lane_sums
from kernels.emit.intrinsics import (
    SEGMENT_LOG,
    add_run,
    address_of,
    call_tile,
    copy_panel,
    fill_zero,
    store_value,
    transpose_panel,
)
from kernels.emit.tile_table import LANEWISE
from kernels.forward.records import Call, Class, Data, GatherShare, Lanes, Pass, Region, Shape, Work
from kernels.pack.panels import F32, load, pack_panel, put
from kernels.target import target

__all__ = ["bring_source", "gather", "load", "pack_weights", "put_lines", "write"]

WIDTH = target().lanes

CLASS, WORK = Class.dtype, Work.dtype

put_lines = copy_panel("f32")
_transpose = transpose_panel("f32")
_lane_sums = lane_sums(WIDTH)


@jit
def pack_weights(
    shares: Rows[GatherShare], passes: Rows[Pass], calls: Rows[Call], blocks: Rows[Lanes], tap_numbers: Vector
) -> None:
    """Pack panels [tap number][src channel][lanes], one for each group and block; at their ends are lines of bias."""
    share, one, call = shares[0], passes[0], calls[0]
    shape, weights, bias = share.shape, one.weights, one.bias
    kind, channels, taps, end = shape.kind, shape.channels, tap_numbers.shape[0], call.weights + weights.nbytes
    size = 4 if kind == F32 else 2
    counts, steps, to = np.ones(4, np.int64), np.zeros(4, np.int64), np.zeros(4, np.int64)
    by_tap = weights.tap == size and taps >= 8  # taps are adjacent: they are the run
    for g in range(one.groups):
        for b in range(blocks.shape[0]):
            block = blocks[b]
            lanes = WIDTH * block.vectors
            valid = min(block.valid, one.left - g * WIDTH) if shape.lanewise else block.valid
            panel = call.panels + (g * blocks.shape[0] + b) * share.panel_bytes
            source = call.weights + weights.start + g * weights.group + block.first * weights.dst_channel
            tap_bytes = 4 * lanes * channels
            if share.order != 0:
                counts[2], steps[2], to[2] = taps, weights.tap, share.order * tap_bytes
                counts[3], steps[3], to[3] = channels, weights.src_channel, 4 * lanes
                if by_tap:
                    counts[2], steps[2], to[2], counts[3], steps[3], to[3] = (
                        counts[3], steps[3], to[3], counts[2], steps[2], to[2],
                    )  # fmt: skip
                begin = panel + ((taps - 1) * tap_bytes if share.order < 0 else 0)
                pack_panel(kind, lanes, valid, begin, counts, to, source, steps, weights.lane, end)
            else:
                counts[3], steps[3], to[3] = channels, weights.src_channel, 4 * lanes
                for tap in range(taps):
                    pack_panel(
                        kind, lanes, valid, panel + tap_numbers[tap] * tap_bytes, counts, to,
                        source + tap * weights.tap, steps, weights.lane, end,
                    )  # fmt: skip
            for lane in range(lanes):
                value = 0.0
                if call.bias != 0 and lane < valid:
                    place = bias.start + g * bias.group + lane * bias.lane + block.first * bias.dst_channel
                    value = load(kind, call.bias + place)
                store_value(panel + share.panel_bytes - 8 * WIDTH + 4 * lane, np.float32(value))


@jit
def _fill(lanes: int, to: int, line: int, counts: Vector, steps: Vector) -> None:
    """Begin the sums of a box of pixels with a line of bias; `steps` are in bytes."""
    run, lines = counts[3], counts[2]
    if steps[2] == run * steps[3]:
        run, lines = run * lines, 1
    for n in range(counts[0]):
        for d in range(counts[1]):
            for h in range(lines):
                put_lines(lanes, to + n * steps[0] + d * steps[1] + h * steps[2], steps[3], line, 0, run)


@jit
def write(
    kind: int, acc: int, lanes: int, valid: int, counts: Vector, to: int, steps: Vector, lane_step: int, spare: int
) -> None:
    """Write a dense box of sums [n][d][h][w][lanes] to dst, with byte steps there; `spare` has room for 64 f32."""
    size = 4 if kind == F32 else 2
    run, lines, planes = counts[3], counts[2], counts[1]
    if steps[2] == run * steps[3]:
        run, lines = run * lines, 1
        if steps[1] == run * steps[3]:
            run, planes = run * planes, 1
    for n in range(counts[0]):
        for d in range(planes):
            for h in range(lines):
                source = acc + ((n * planes + d) * lines + h) * run * 4 * lanes
                place = to + n * steps[0] + d * steps[1] + h * steps[2]
                if lane_step == size and kind == F32 and valid % 8 == 0:
                    put_lines(valid, place, steps[3], source, 4 * lanes, run)
                    continue
                start = 0
                while lane_step != size and steps[3] == size and run >= 8 and start < run:
                    start = min(start, run - 8)  # a last block that is not full starts earlier
                    target, origin = place + size * start, source + 4 * start * lanes
                    whole = valid // 8 * 8 if kind == F32 else 0
                    if whole > 0:
                        _transpose(target, lane_step, origin, whole // 8, 4 * lanes, 7)
                    for first in range(whole, valid, 8):
                        _transpose(spare, 32, origin + 4 * first, 1, 4 * lanes, 7)
                        for lane in range(first, min(first + 8, valid)):
                            put(kind, target + lane * lane_step, spare + 32 * (lane - first), 8)
                    start += 8
                # what is left goes in the longest runs that lie together on both sides
                pixels, values, count = run - start, valid, 1
                if lane_step == size:
                    values, count = 1, valid
                    if valid == lanes and steps[3] == valid * size:
                        pixels, count = 1, run * valid
                for p in range(pixels):
                    for lane in range(values):
                        put(kind, place + p * steps[3] + lane * lane_step, source + 4 * (p * lanes + lane), count)


@jit
def _clip(classes: Rows[Class], low: int, high: int, stride: int, src_stride: int, live: Rows[Class]) -> int:
    """Clip each class to the dst positions ``low..high``, counted from `low`; return the number of classes left."""
    count = 0
    for i in range(classes.shape[0]):
        whole = classes[i]
        first = max(0, (low - whole.dst + stride - 1) // stride)
        last = min(whole.count, (high - whole.dst + stride - 1) // stride)
        if first < last:
            part = live[count]
            part.first, part.taps, part.fills = whole.first, whole.taps, whole.fills
            part.dst, part.count, part.src = (
                whole.dst + first * stride - low,
                last - first,
                whole.src + first * src_stride,
            )
            count += 1
    return count


@jit
def _pixels(live: Rows[Class], count: int) -> int:
    """Count the dst positions of some classes."""
    total = 0
    for i in range(count):
        total += live[i].count
    return total


@jit
def _reach(live: Rows[Class], first: int, last: int, src_step: int, src_stride: int, axis: int, reach: Region) -> None:
    """Note the src positions of an axis that some classes meet."""
    low, high = live[first].src, live[first].src
    for i in range(first, last):
        one = live[i]
        low = min(low, one.src)
        high = max(high, one.src + (one.count - 1) * src_stride + 1 + (one.taps - 1) * src_step)
    reach.first[axis], reach.sizes[axis] = low, high - low


@jit
def bring_source(
    shape: Shape, left: int, data: Data, source: int, end: int, apart: bool, work: Work, scratch: int
) -> int:
    """Bring the src in reach to where tiles read it, from `source` on; return the address of position 0 there.

    `source` is that of position 0 in src, which ends at `end`; `left` groups exist where lanes are groups. With `apart`
    only the positions of one tap are packed, one stride apart, and then count as adjacent.
    """
    steps, first, sizes, channels = work.src, work.reach.first, work.reach.sizes, shape.channels
    strides = work.pixel  # not needed yet
    strides[0] = data.strides[0]
    for axis in range(3):
        strides[1 + axis] = data.strides[1 + axis] * (shape.src_strides[axis] if apart else 1)
    if not shape.packed:
        for axis in range(4):
            steps[axis] = data.strides[axis]
        work.channel = data.channel
        return source
    lanes = WIDTH if shape.lanewise else channels if channels < 8 else (channels + 7) // 8 * 8
    steps[3] = 4 * lanes * (channels if shape.lanewise else 1)
    work.channel = 4 * lanes if shape.lanewise else 4
    start = scratch
    for axis in range(3, -1, -1):
        if axis < 3:
            steps[axis] = steps[axis + 1] * sizes[axis + 1]
        source += first[axis] * data.strides[axis]
        start -= first[axis] * steps[axis]
    for c in range(channels if shape.lanewise else 1):
        valid = min(WIDTH, left) if shape.lanewise else channels
        pack_panel(
            shape.kind, lanes, valid, scratch + 4 * lanes * c, sizes[:], steps[:], source + c * data.channel,
            strides[:], data.lane, end,
        )  # fmt: skip
    return start


@jit
def _collect(work: Work, count: int) -> None:
    """List the next `count` pixels."""
    counts, src, sums, at = work.counts, work.pixel, work.sums, work.at
    offsets, places = work.offsets, work.places
    for m in range(count):
        offsets[m] = at[0] * src[0] + at[1] * src[1] + at[2] * src[2] + at[3] * src[3]
        places[m] = at[0] * sums[0] + at[1] * sums[1] + at[2] * sums[2] + at[3] * sums[3]
        at[3] += 1
        for axis in range(3, 0, -1):
            if at[axis] < counts[axis]:
                break
            at[axis] = 0
            at[axis - 1] += 1


@jit
def _begin(work: Work) -> int:
    """Start listing with the first pixel; return the number of pixels."""
    total, counts, at = 1, work.counts, work.at
    for axis in range(4):
        at[axis] = 0
        total *= counts[axis]
    return total


@jit
def _sum(
    table: Vector, limit: int, line: int, by_line: bool, work: Work, panel: int, start: int, src: int, acc: int,
    few: int,
) -> None:  # fmt: skip
    """Add the sums of one class's pixels to their accumulator lines, with one tile's worth of them in each call.

    With a `start` other than 0 the lines are new: sums are added to the one line at that address instead.
    """
    walk, offsets, places = work.walk, work.offsets, work.places
    counts, steps, sums = work.counts, work.pixel, work.sums
    if by_line:
        pieces = (counts[3] + limit - 1) // limit
        rows, more = counts[3] // pieces, counts[3] % pieces
        walk.acc_step, walk.start = sums[3] // line, start
        for m in range(limit):
            offsets[m] = m * steps[3]
        for n in range(counts[0]):
            for d in range(counts[1]):
                for h in range(counts[2]):
                    origin = src + n * steps[0] + d * steps[1] + h * steps[2]
                    to = acc + n * sums[0] + d * sums[1] + h * sums[2]
                    for piece in range(pieces):
                        tall = rows + (1 if piece < more else 0)
                        call_tile(table[tall], address_of(walk), panel, origin, address_of(offsets), to)
                        origin += tall * steps[3]
                        to += tall * sums[3]
        return
    total = _begin(work)
    pieces = (total + limit - 1) // limit
    rows, more = total // pieces, total % pieces
    walk.acc_step, walk.start = 1, 0
    for piece in range(pieces):
        tall = rows + (1 if piece < more else 0)
        _collect(work, tall)
        fill_zero(few, tall * line)
        call_tile(table[tall], address_of(walk), panel, src, address_of(offsets), few)
        for m in range(tall):
            if start != 0:
                put_lines(line // 4, acc + places[m], 0, start, 0, 1)
            add_run(acc + places[m], few + m * line, line // 4)


@jit
def _sum_groups(work: Work, panel: int, bias: int, src: int, dst: int, groups: int, panel_bytes: int) -> None:
    """Sum the pixels of one class for all groups of lanes, straight into dst."""
    left, offsets, places = _begin(work), work.offsets, work.places
    while left > 0:
        some = min(left, LANE_PIXELS)
        _collect(work, some)
        for m in range(some, LANE_PIXELS):  # too few pixels: the last one is done again
            offsets[m], places[m] = offsets[some - 1], places[some - 1]
        _lane_sums(
            address_of(work.walk), panel, bias, src, dst, address_of(offsets), address_of(places), groups, panel_bytes
        )  # fmt: skip
        left -= some


@jit
def _walk(shape: Shape, planes: int, lines: int, columns: int, work: Work) -> int:
    """Lay out the walk over a class's taps and channels (see `kernels.emit.register_tiles.fma_tile`); give the number
    of calls.

    Where the pixels of a line of taps follow each other, they and their channels are one run, and one call has all
    planes of the kernel; else each has one.
    """
    channels, taps, steps = shape.channels, shape.tap_steps, shape.src_steps
    panel, scalars, counts, src = work.walk.panel, work.walk.scalars, work.walk.counts, work.src
    column, line = taps[2] * channels, taps[1] * shape.kernel[2] * channels
    if channels == 1:
        panel[2], scalars[2], counts[2] = column, steps[2] * src[3], columns
    elif columns == 1 or (taps[2] == 1 and steps[2] * src[3] == channels * work.channel):
        panel[2], scalars[2], counts[2] = 1, work.channel, columns * channels
    else:
        panel[2], scalars[2], counts[2] = 1, work.channel, channels
        panel[1], scalars[1], counts[1] = column, steps[2] * src[3], columns
        panel[0], scalars[0], counts[0] = line, steps[1] * src[2], lines
        return planes
    panel[1], scalars[1], counts[1] = line, steps[1] * src[2], lines
    panel[0], scalars[0], counts[0] = _plane(shape), steps[0] * src[1], planes
    return 1


@jit
def _plane(shape: Shape) -> int:
    """Return the lines of weights between a tap of a class and the one in the next plane."""
    plane: int = shape.tap_steps[0] * shape.kernel[1] * shape.kernel[2] * shape.channels
    return plane


@jit
def gather(
    table: Table, shares: Rows[GatherShare], passes: Rows[Pass], calls: Rows[Call], planes: Rows[Class],
    lines: Rows[Class], columns: Rows[Class], blocks: Rows[Lanes], first: int, last: int,
) -> None:  # fmt: skip
    """Compute bands ``first..last`` of the grid for the groups of a pass.

    The call's `source` holds the packed src of a band, its `sums` those of a band [n][d][h][w][lanes] for one block.
    """
    share, one, call = shares[0], passes[0], calls[0]
    shape, grid, src, dst = share.shape, share.grid, one.src, one.dst
    kind, lanewise, together, strides = shape.kind, shape.lanewise, share.together, dst.strides
    groups, panel_bytes = one.groups, share.panel_bytes
    live_d, live_h = np.empty(planes.shape[0], CLASS), np.empty(lines.shape[0], CLASS)
    live_w = np.empty(columns.shape[0], CLASS)
    band, counts, ways = np.empty(4, np.int64), np.empty(4, np.int64), np.empty(4, np.int64)
    apart_by = np.empty(3, np.int64)  # src positions between pixels, where they are read
    few, works = np.empty(9 * 2 * WIDTH + 64, np.float32), np.empty(1, WORK)
    work = works[0]  # in the loops the table is named too: that keeps it
    work.walk.segment = SEGMENT_LOG
    for item in range(first, last):
        rest, base = item, call.dst + dst.start
        for axis in range(3, -1, -1):
            low, high, step = grid.low[axis], grid.high[axis], grid.step[axis]
            parts = (high - low + step - 1) // step
            low += rest % parts * step
            rest //= parts
            band[axis], counts[axis] = low, min(high, low + step) - low
            base += low * strides[axis]
        nd = _clip(planes, band[1], band[1] + counts[1], shape.strides[0], shape.src_strides[0], live_d)
        nh = _clip(lines, band[2], band[2] + counts[2], shape.strides[1], shape.src_strides[1], live_h)
        nw = _clip(columns, band[3], band[3] + counts[3], shape.strides[2], shape.src_strides[2], live_w)
        work.reach.first[0], work.reach.sizes[0] = band[0], counts[0]
        covered = _pixels(live_d, nd) * _pixels(live_h, nh) * _pixels(live_w, nw) == counts[1] * counts[2] * counts[3]
        once = share.once and covered
        for g in range(1 if together else groups):
            start, brought = 0, False
            for b in range(blocks.shape[0]):
                block = blocks[b]
                tile = LANEWISE if lanewise else block.vectors
                limit, lanes = share.limits[tile], WIDTH * block.vectors
                line, panel = 4 * lanes, call.panels + (g * blocks.shape[0] + b) * panel_bytes
                valid = min(block.valid, one.left - g * WIDTH) if lanewise else block.valid
                place = base + g * dst.group + block.first * dst.channel
                direct = kind == F32 and dst.lane == 4 and valid == lanes and strides[3] % line == 0
                sums = place if direct else call.sums
                ways[3] = strides[3] if direct else line
                for axis in range(2, -1, -1):
                    ways[axis] = strides[axis] if direct else ways[axis + 1] * counts[axis + 1]
                bias = panel + panel_bytes - 8 * WIDTH
                for i in range(groups if together else 1):
                    if not once:
                        _fill(lanes, sums + i * line, bias + i * panel_bytes, counts, ways)
                work.sums[0] = ways[0]
                for axis in range(3):
                    work.sums[1 + axis] = ways[1 + axis] * shape.strides[axis]
                for i in range(nd):
                    for j in range(nh):
                        for k in range(nw):
                            d, h, w = live_d[i], live_h[j], live_w[k]
                            if share.apart or not brought:
                                apart, reach, far = share.apart, works[0].reach, shape.src_steps
                                for axis in range(3):  # where classes are packed apart, pixels become adjacent
                                    apart_by[axis] = 1 if apart else shape.src_strides[axis]
                                _reach(live_d, i if apart else 0, i + 1 if apart else nd, far[0], apart_by[0], 1, reach)
                                _reach(live_h, j if apart else 0, j + 1 if apart else nh, far[1], apart_by[1], 2, reach)
                                _reach(live_w, k if apart else 0, k + 1 if apart else nw, far[2], apart_by[2], 3, reach)
                                start = bring_source(
                                    shape, one.left - g * WIDTH, src, call.src + src.start + g * src.group,
                                    call.src + src.nbytes, apart, works[0], call.source,
                                )  # fmt: skip
                                brought = True
                                work.pixel[0] = work.src[0]
                                for axis in range(3):
                                    work.pixel[1 + axis] = work.src[1 + axis] * apart_by[axis]
                            number = (d.first * shape.kernel[1] + h.first) * shape.kernel[2] + w.first
                            steps = work.src
                            source = start + band[0] * steps[0] + d.src * steps[1] + h.src * steps[2] + w.src * steps[3]
                            work.counts[0], work.counts[1] = counts[0], d.count
                            work.counts[2], work.counts[3] = h.count, w.count
                            begin = sums + d.dst * ways[1] + h.dst * ways[2] + w.dst * ways[3]
                            first_line = panel + number * shape.channels * line
                            walks = _walk(shape, d.taps, h.taps, w.taps, works[0])
                            if together:
                                _sum_groups(works[0], first_line, bias, source, begin, groups, panel_bytes)
                                continue
                            for plane in range(walks):
                                _sum(
                                    table[tile], limit, line, w.fills, works[0], first_line,
                                    bias if once and plane == 0 else 0, source, begin, few.ctypes.data,
                                )  # fmt: skip
                                first_line += _plane(shape) * line
                                source += shape.src_steps[0] * steps[1]
                if not direct:
                    spare = few.ctypes.data + 9 * 8 * WIDTH
                    write(kind, sums, lanes, valid, counts, place, strides[:], dst.lane, spare)
