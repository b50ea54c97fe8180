"""The compiled loops of ConvTranspose forward where every dst pixel gathers its taps.

Pixels that share their taps (`kernels.forward.classes`) are the rows of a register tile, wherever they lie: in a line,
in several lines, in several images. Its lanes are dst channels, or groups, and one call sums over all taps and src
channels.

As in `kernels.gradient.tiles.driver`, everything is addresses, byte steps and integer tables, and nothing is checked.

* shape: 0 src channels of a group, 1-3 kernel, 4-6 steps between a class's taps (d, h, w) in tap numbers, 7-9 the same
  in src positions, 10-12 dst positions between those of a class.
* grid: first, last and step of the dst positions (n, d, h, w) that one band has.
* src, dst: 0 address, 1 end of the tensor, 2 bytes between groups, 3-6 bytes for (n, d, h, w), 7 between lanes of a
  packed line, 8 between channels.
* weights: 0 address, 1 end, 2 bytes between groups, 3 between lanes, 4 dst channels, 5 src channels, 6 taps.
* bias: 0 address or 0, 1 end, 2 bytes between groups, 3 between lanes, 4 between dst channels.
* blocks: 0 first dst channel, 1 valid lanes, 2 vectors.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.compiler import Table, Vector, jit
from kernels.emit.depthwise import LANE_PIXELS, lane_sums
from kernels.emit.intrinsics import (
    SEGMENT_LOG,
    add_run,
    call_tile,
    copy_panel,
    fill_zero,
    store_value,
    transpose_panel,
)
from kernels.emit.tile_table import LANEWISE
from kernels.pack.panels import F32, load, pack_panel
from kernels.pack.panels import put as _put
from kernels.target import target

__all__ = ["bring_source", "gather", "load", "pack_weights", "put_lines", "write"]

WIDTH = target().lanes

put_lines = copy_panel("f32")
_transpose = transpose_panel("f32")
_lane_sums = lane_sums(WIDTH)


@jit
def pack_weights(
    kind: int, lanewise: bool, groups: int, left: int, shape: Vector, blocks: Table, numbers: Vector, backwards: bool,
    weights: Vector, bias: Vector, panels: int, panel_bytes: int,
) -> None:  # fmt: skip
    """Pack panels [tap number][src channel][lanes] for each group and block of lanes; at their end is a line of bias.

    `numbers` are those of all taps; `backwards` says that they simply fall. `left` groups exist where lanes are groups.
    """
    channels, taps = shape[0], numbers.shape[0]
    size = 4 if kind == F32 else 2
    counts, steps, to = np.ones(4, np.int64), np.zeros(4, np.int64), np.zeros(4, np.int64)
    by_tap = weights[6] == size and taps >= 8  # taps are adjacent: they are the run
    for g in range(groups):
        for b in range(blocks.shape[0]):
            lanes = WIDTH * blocks[b, 2]
            valid = min(blocks[b, 1], left - g * WIDTH) if lanewise else blocks[b, 1]
            panel = panels + (g * blocks.shape[0] + b) * panel_bytes
            source = weights[0] + g * weights[2] + blocks[b, 0] * weights[4]
            tap_bytes = 4 * lanes * channels
            if backwards:
                counts[2], steps[2], to[2] = taps, weights[6], -tap_bytes
                counts[3], steps[3], to[3] = channels, weights[5], 4 * lanes
                if by_tap:
                    counts[2], steps[2], to[2], counts[3], steps[3], to[3] = (
                        counts[3], steps[3], to[3], counts[2], steps[2], to[2],
                    )  # fmt: skip
                last = panel + (taps - 1) * tap_bytes
                pack_panel(kind, lanes, valid, last, counts, to, source, steps, weights[3], weights[1])
            else:
                counts[3], steps[3], to[3] = channels, weights[5], 4 * lanes
                for tap in range(taps):
                    pack_panel(
                        kind, lanes, valid, panel + numbers[tap] * tap_bytes, counts, to, source + tap * weights[6],
                        steps, weights[3], weights[1],
                    )  # fmt: skip
            for lane in range(lanes):
                value = 0.0
                if bias[0] != 0 and lane < valid:
                    place = bias[0] + g * bias[2] + lane * bias[3] + blocks[b, 0] * bias[4]
                    value = load(kind, place)
                store_value(panel + panel_bytes - 8 * WIDTH + 4 * lane, np.float32(value))


@jit
def _fill(lanes: int, to: int, line: int, counts: Vector, steps: Vector) -> None:
    """Begin the sums of a box of pixels with a line of bias; `steps` as in dst."""
    run, lines = counts[3], counts[2]
    if steps[5] == run * steps[6]:
        run, lines = run * lines, 1
    for n in range(counts[0]):
        for d in range(counts[1]):
            for h in range(lines):
                put_lines(lanes, to + n * steps[3] + d * steps[4] + h * steps[5], steps[6], line, 0, run)


@jit
def write(kind: int, acc: int, lanes: int, valid: int, counts: Vector, to: int, dst: Vector, spare: int) -> None:
    """Write a dense box of sums [n][d][h][w][lanes] to dst; `spare` has room for 64 f32."""
    size = 4 if kind == F32 else 2
    run, lines, planes = counts[3], counts[2], counts[1]
    if dst[5] == run * dst[6]:
        run, lines = run * lines, 1
        if dst[4] == run * dst[6]:
            run, planes = run * planes, 1
    for n in range(counts[0]):
        for d in range(planes):
            for h in range(lines):
                source = acc + ((n * planes + d) * lines + h) * run * 4 * lanes
                place = to + n * dst[3] + d * dst[4] + h * dst[5]
                if dst[7] == size and kind == F32 and valid % 8 == 0:
                    put_lines(valid, place, dst[6], source, 4 * lanes, run)
                    continue
                start = 0
                while dst[7] != size and dst[6] == size and run >= 8 and start < run:
                    start = min(start, run - 8)  # a last block that is not full starts earlier
                    target, origin = place + size * start, source + 4 * start * lanes
                    whole = valid // 8 * 8 if kind == F32 else 0
                    if whole > 0:
                        _transpose(target, dst[7], origin, whole // 8, 4 * lanes, 7)
                    for first in range(whole, valid, 8):
                        _transpose(spare, 32, origin + 4 * first, 1, 4 * lanes, 7)
                        for lane in range(first, min(first + 8, valid)):
                            _put(kind, target + lane * dst[7], spare + 32 * (lane - first), 8)
                    start += 8
                # what is left goes in the longest runs that lie together on both sides
                pixels, values, count = run - start, valid, 1
                if dst[7] == size:
                    values, count = 1, valid
                    if valid == lanes and dst[6] == valid * size:
                        pixels, count = 1, run * valid
                for p in range(pixels):
                    for lane in range(values):
                        _put(kind, place + p * dst[6] + lane * dst[7], source + 4 * (p * lanes + lane), count)


@jit
def _clip(classes: Table, low: int, high: int, stride: int, live: Table) -> int:
    """Keep what the dst positions ``low..high`` have of each class, counted from `low`; give the number of classes."""
    count = 0
    for i in range(classes.shape[0]):
        first = max(0, (low - classes[i, 2] + stride - 1) // stride)
        last = min(classes[i, 3], (high - classes[i, 2] + stride - 1) // stride)
        if first < last:
            live[count, 0], live[count, 1], live[count, 5] = classes[i, 0], classes[i, 1], classes[i, 5]
            live[count, 2], live[count, 3] = classes[i, 2] + first * stride - low, last - first
            live[count, 4] = classes[i, 4] + first
            count += 1
    return count


@jit
def _pixels(live: Table, count: int) -> int:
    """Count the dst positions of some classes."""
    total = 0
    for i in range(count):
        total += live[i, 3]
    return total


@jit
def _reach(live: Table, first: int, last: int, tap_step: int, axis: int, box: Vector) -> None:
    """Note in `box` the src positions of an axis that some classes meet."""
    low, high = live[first, 4], live[first, 4]
    for i in range(first, last):
        low = min(low, live[i, 4])
        high = max(high, live[i, 4] + live[i, 3] + (live[i, 1] - 1) * tap_step)
    box[axis], box[4 + axis] = low, high - low


@jit
def bring_source(
    kind: int, lanewise: bool, left: int, packed: bool, channels: int, src: Vector, box: Vector, steps: Vector,
    scratch: int,
) -> int:  # fmt: skip
    """Bring a box of one group's src to where tiles read it; give the address of position 0 and its byte steps.

    `box` has the first positions (n, d, h, w) and their numbers; `steps` are for (n, d, h, w, channel).
    """
    if not packed:
        for axis in range(4):
            steps[axis] = src[3 + axis]
        steps[4] = src[8]
        return src[0]  # type: ignore[no-any-return]
    lanes = WIDTH if lanewise else channels if channels < 8 else (channels + 7) // 8 * 8
    steps[3], steps[4] = 4 * lanes * (channels if lanewise else 1), 4 * lanes if lanewise else 4
    source, start = src[0], scratch
    for axis in range(3, -1, -1):
        if axis < 3:
            steps[axis] = steps[axis + 1] * box[5 + axis]
        source += box[axis] * src[3 + axis]
        start -= box[axis] * steps[axis]
    for c in range(channels if lanewise else 1):
        valid = min(WIDTH, left) if lanewise else channels
        place = source + c * src[8]
        pack_panel(kind, lanes, valid, scratch + 4 * lanes * c, box[4:], steps, place, src[3:7], src[7], src[1])
    return start


@jit
def _collect(box: Vector, at: Vector, count: int, offsets: Vector, places: Vector) -> None:
    """List the byte offsets of the next `count` pixels of a box, in src and in the accumulators; `at` goes along."""
    for m in range(count):
        offsets[m] = at[0] * box[4] + at[1] * box[5] + at[2] * box[6] + at[3] * box[7]
        places[m] = at[0] * box[8] + at[1] * box[9] + at[2] * box[10] + at[3] * box[11]
        at[3] += 1
        for axis in range(3, 0, -1):
            if at[axis] < box[axis]:
                break
            at[axis] = 0
            at[axis - 1] += 1


@jit
def _sum(
    table: Vector, limit: int, line: int, by_line: bool, box: Vector, walk: Vector, panel: int, src: int, acc: int,
    at: Vector, offsets: Vector, places: Vector, few: int,
) -> None:  # fmt: skip
    """Sum the pixels of one class into their accumulator lines, with one tile's worth of them in each call.

    `box` has the numbers of pixels (n, d, h, w), then their byte steps in src, then in the accumulators.
    """
    if by_line:
        pieces = (box[3] + limit - 1) // limit
        rows, more = box[3] // pieces, box[3] % pieces
        walk[9] = box[11] // line
        for m in range(limit):
            offsets[m] = m * box[7]
        for n in range(box[0]):
            for d in range(box[1]):
                for h in range(box[2]):
                    source = src + n * box[4] + d * box[5] + h * box[6]
                    sums = acc + n * box[8] + d * box[9] + h * box[10]
                    for piece in range(pieces):
                        tall = rows + (1 if piece < more else 0)
                        call_tile(table[tall], walk.ctypes.data, panel, source, offsets.ctypes.data, sums)
                        source += tall * box[7]
                        sums += tall * box[11]
        return
    total = box[0] * box[1] * box[2] * box[3]
    pieces = (total + limit - 1) // limit
    rows, more = total // pieces, total % pieces
    walk[9] = 1
    at[0], at[1], at[2], at[3] = 0, 0, 0, 0
    for piece in range(pieces):
        tall = rows + (1 if piece < more else 0)
        _collect(box, at, tall, offsets, places)
        fill_zero(few, tall * line)
        call_tile(table[tall], walk.ctypes.data, panel, src, offsets.ctypes.data, few)
        for m in range(tall):
            add_run(acc + places[m], few + m * line, line // 4)


@jit
def _sum_groups(
    box: Vector, walk: Vector, panel: int, bias: int, src: int, dst: int, groups: int, panel_bytes: int, at: Vector,
    offsets: Vector, places: Vector,
) -> None:  # fmt: skip
    """Sum the pixels of one class for all groups of lanes, straight into dst; `box` as in `_sum`."""
    left = box[0] * box[1] * box[2] * box[3]
    at[0], at[1], at[2], at[3] = 0, 0, 0, 0
    while left > 0:
        some = min(left, LANE_PIXELS)
        _collect(box, at, some, offsets, places)
        for m in range(some, LANE_PIXELS):  # too few pixels: the last one is done again
            offsets[m], places[m] = offsets[some - 1], places[some - 1]
        _lane_sums(
            walk.ctypes.data, panel, bias, src, dst, offsets.ctypes.data, places.ctypes.data, groups, panel_bytes
        )  # fmt: skip
        left -= some


@jit
def _walk(shape: Vector, planes: int, lines: int, columns: int, steps: Vector, walk: Vector) -> int:
    """Lay out the walk over a class's taps and channels (see `kernels.emit.register_tiles.fma_tile`); give the number
    of calls.

    Where the pixels of a line of taps follow each other, they and their channels are one run, and one call has all
    planes of the kernel; else each has one.
    """
    channels = shape[0]
    column, line = shape[6] * channels, shape[5] * shape[3] * channels
    if channels == 1:
        walk[2], walk[5], walk[8] = column, shape[9] * steps[3], columns
    elif columns == 1 or (shape[6] == 1 and shape[9] * steps[3] == channels * steps[4]):
        walk[2], walk[5], walk[8] = 1, steps[4], columns * channels
    else:
        walk[2], walk[5], walk[8] = 1, steps[4], channels
        walk[1], walk[4], walk[7] = column, shape[9] * steps[3], columns
        walk[0], walk[3], walk[6] = line, shape[8] * steps[2], lines
        return planes
    walk[1], walk[4], walk[7] = line, shape[8] * steps[2], lines
    walk[0], walk[3], walk[6] = shape[4] * shape[2] * shape[3] * channels, shape[7] * steps[1], planes
    return 1


@jit
def gather(
    table: Table, limits: Vector, kind: int, lanewise: bool, left: int, first: int, last: int, grid: Vector,
    shape: Vector, planes: Table, lines: Table, columns: Table, blocks: Table, groups: int, panels: int,
    panel_bytes: int, packed: bool, apart: bool, together: bool, src: Vector, dst: Vector, scratch: int, acc: int,
) -> None:  # fmt: skip
    """Compute bands ``first..last`` of the grid for some groups (or groups of lanes, of which `left` exist).

    `scratch` holds the packed src of a band, `acc` its sums [n][d][h][w][lanes] for one block. With `apart` src is
    packed class by class: where taps reach far, all that they meet would be too much. With `together` groups of lanes
    are done together, straight in dst: pixels and groups then lie as they are read and written.
    """
    channels = shape[0]
    live_d = np.empty((planes.shape[0], 6), np.int64)
    live_h = np.empty((lines.shape[0], 6), np.int64)
    live_w = np.empty((columns.shape[0], 6), np.int64)
    band, counts, reach, steps = (
        np.empty(8, np.int64),
        np.empty(4, np.int64),
        np.zeros(8, np.int64),
        np.empty(5, np.int64),
    )
    box, walk, offsets, places = (
        np.empty(12, np.int64),
        np.ones(11, np.int64),
        np.empty(9, np.int64),
        np.empty(9, np.int64),
    )
    few, here, at = np.empty(9 * 2 * WIDTH + 64, np.float32), src.copy(), np.empty(4, np.int64)
    dense = np.empty(7, np.int64)
    walk[10] = SEGMENT_LOG
    for item in range(first, last):
        rest, base = item, dst[0]
        for axis in range(3, -1, -1):
            low, high, step = grid[3 * axis], grid[3 * axis + 1], grid[3 * axis + 2]
            parts = (high - low + step - 1) // step
            low += rest % parts * step
            rest //= parts
            band[axis], counts[axis] = low, min(high, low + step) - low
            base += low * dst[3 + axis]
        nd = _clip(planes, band[1], band[1] + counts[1], shape[10], live_d)
        nh = _clip(lines, band[2], band[2] + counts[2], shape[11], live_h)
        nw = _clip(columns, band[3], band[3] + counts[3], shape[12], live_w)
        reach[0], reach[4] = band[0], counts[0]
        covered = _pixels(live_d, nd) * _pixels(live_h, nh) * _pixels(live_w, nw) == counts[1] * counts[2] * counts[3]
        for g in range(1 if together else groups):
            here[0] = src[0] + g * src[2]
            start, brought = 0, False
            for b in range(blocks.shape[0]):
                tile = LANEWISE if lanewise else blocks[b, 2]
                limit, lanes = limits[tile], WIDTH * blocks[b, 2]
                line, panel = 4 * lanes, panels + (g * blocks.shape[0] + b) * panel_bytes
                valid = min(blocks[b, 1], left - g * WIDTH) if lanewise else blocks[b, 1]
                place = base + g * dst[2] + blocks[b, 0] * dst[8]
                direct = kind == F32 and dst[7] == 4 and valid == lanes and dst[6] % line == 0
                sums = place if direct else acc
                ways = dst if direct else dense
                dense[6] = line
                for axis in range(5, 2, -1):
                    dense[axis] = dense[axis + 1] * counts[axis - 2]
                bias = panel + panel_bytes - 8 * WIDTH
                for i in range(groups if together else 1):
                    if not (together and covered):
                        _fill(lanes, sums + i * line, bias + i * panel_bytes, counts, ways)
                for axis in range(3):
                    box[9 + axis] = ways[4 + axis] * shape[10 + axis]
                box[8] = ways[3]
                for i in range(nd):
                    for j in range(nh):
                        for k in range(nw):
                            if apart or not brought:
                                _reach(live_d, i if apart else 0, i + 1 if apart else nd, shape[7], 1, reach)
                                _reach(live_h, j if apart else 0, j + 1 if apart else nh, shape[8], 2, reach)
                                _reach(live_w, k if apart else 0, k + 1 if apart else nw, shape[9], 3, reach)
                                start = bring_source(
                                    kind, lanewise, left - g * WIDTH, packed, channels, here, reach, steps, scratch
                                )  # fmt: skip
                                brought = True
                            number = (live_d[i, 0] * shape[2] + live_h[j, 0]) * shape[3] + live_w[k, 0]
                            source = (
                                start + band[0] * steps[0] + live_d[i, 4] * steps[1] + live_h[j, 4] * steps[2]
                                + live_w[k, 4] * steps[3]
                            )  # fmt: skip
                            box[0], box[1], box[2], box[3] = counts[0], live_d[i, 3], live_h[j, 3], live_w[k, 3]
                            box[4], box[5], box[6], box[7] = steps[0], steps[1], steps[2], steps[3]
                            begin = (
                                sums + live_d[i, 2] * ways[4] + live_h[j, 2] * ways[5]
                                + live_w[k, 2] * ways[6]
                            )  # fmt: skip
                            first_line = panel + number * channels * line
                            calls = _walk(shape, live_d[i, 1], live_h[j, 1], live_w[k, 1], steps, walk)
                            if together:
                                _sum_groups(
                                    box, walk, first_line, bias, source, begin, groups, panel_bytes, at, offsets, places
                                )  # fmt: skip
                                continue
                            for _ in range(calls):
                                _sum(
                                    table[tile], limit, line, live_w[k, 5] == 1, box, walk, first_line, source, begin,
                                    at, offsets, places, few.ctypes.data,
                                )  # fmt: skip
                                first_line += shape[4] * shape[2] * shape[3] * channels * line
                                source += shape[7] * steps[1]
                if not direct:
                    write(kind, acc, lanes, valid, counts, place, dst, few.ctypes.data + 9 * 8 * WIDTH)
