"""Write sums from scratch memory to dst, rounded once and transposed for NCX; bring the bias, lay out packed src."""

from __future__ import annotations

import numpy as np

from kernels.blocks import CACHES
from kernels.emit.compiler import Vector, jit
from kernels.emit.intrinsics import (
    F32,
    copy_panel,
    fence,
    load,
    put,
    store_lines,
    store_value,
    stored_size,
    touch_all,
    transpose_panel,
    untranspose,
)
from kernels.forward.records import Call, Pass, Work
from kernels.pack.lines import Pixels, pack_line
from kernels.pack.panels import Values, merged_runs

STRIP = 128
"""Bytes of a channel's positions that are written at a time."""

AHEAD = 128
"""Positions: the lines that many later are prefetched, as stores wait for one line of memory after the other."""

KEPT_BYTES = CACHES.l3

__all__ = ["bring_bias", "fill", "lay_out", "write", "write_rounded"]


@jit
def bring_bias(kind: int, one: Pass, call: Call, g: int, first: int, lanes: int, to: int) -> None:
    """Bring the bias of a group's dst channels from the `first` on to `lanes` f32: zeros where there is none."""
    size, each = stored_size(kind), one.dst.group // one.dst.channel  # channels of a group
    place = call.bias + one.bias + size * (g * each + first)
    valid = one.channels - first if call.bias != 0 else 0
    for lane in range(lanes):
        value = load(kind, place + lane * size) if lane < valid else 0.0
        store_value(to + 4 * lane, np.float32(value))


@jit
def lay_out(work: Work, pitch: int, scratch: int) -> None:
    """Set the strides of the src positions at hand, packed in scratch memory with `pitch` bytes between them."""
    steps, first, sizes = work.src, work.band.first, work.band.sizes
    steps[3], work.start = pitch, scratch
    for axis in range(2, -1, -1):
        steps[axis] = steps[axis + 1] * sizes[axis + 1]
    for axis in range(4):
        work.start -= first[axis] * steps[axis]


@jit
def fill(kind: int, line: int, count: int, sizes: Vector, to: int, steps: Vector) -> None:
    """Write `count` adjacent values, stored as `kind` and given as f32 at `line`, to each position of a box."""
    for n in range(sizes[0]):
        for d in range(sizes[1]):
            for h in range(sizes[2]):
                place = to + n * steps[0] + d * steps[1] + h * steps[2]
                for w in range(sizes[3]):
                    put(kind, place + w * steps[3], line, count)


@jit
def write(dst: Values, acc: int, lanes: int, valid: int, counts: Vector, buffer: int) -> None:
    """Write a dense box of sums [n][d][h][w][lanes] to dst; `buffer` has room for 64 f32.

    Where dst has an `end`, that of the tensor, what is far from it is not kept in the caches.
    """
    kind, steps, lane_step, size = dst.kind, dst.steps, dst.channel, stored_size(dst.kind)
    run, lines, planes = merged_runs(counts, steps, steps)
    for n in range(counts[0]):
        for d in range(planes):
            for h in range(lines):
                source = acc + ((n * planes + d) * lines + h) * run * 4 * lanes
                place = dst.place + n * steps[0] + d * steps[1] + h * steps[2]
                if lane_step == size and kind == F32 and valid % 8 == 0:
                    copy_panel(F32, valid, place, steps[3], source, 4 * lanes, run)
                    continue
                turns = lane_step != size and steps[3] == size and run >= 8
                whole, pixels, first = valid // 8 * 8 if turns else 0, STRIP // size, 0
                streams = lane_step % 64 == 0 and place < dst.end - KEPT_BYTES
                while whole > 0 and first < run:
                    count = min(pixels, run - first)
                    if streams and (place + size * first) % 64 != 0:
                        count = min(count, 64 // size - (place + size * first) % 64 // size)
                    for lane in range(0, whole, 8):
                        target, origin = place + size * first + lane * lane_step, source + 4 * (first * lanes + lane)
                        for ahead in range(size * AHEAD, 0 if streams else size * (AHEAD + count), 64):
                            touch_all(target + ahead, lane_step)
                        if count == pixels:
                            store_lines(kind, int(streams), target, lane_step, origin, 4 * lanes, STRIP // 64)
                            continue
                        for pixel in range(0, count, 8):
                            back = min(0, run - 8 - first - pixel)  # a last block that is not full starts earlier
                            at = pixel + back
                            untranspose(kind, target + size * at, lane_step, origin + 4 * lanes * at, 1, 4 * lanes, 7)
                    first += count
                start = 0 if turns and whole < valid else run
                while start < run:
                    start = min(start, run - 8)
                    target, origin = place + size * start, source + 4 * start * lanes
                    for first in range(whole, valid, 8):
                        transpose_panel(F32, buffer, 32, origin + 4 * first, 1, 4 * lanes, 7)
                        for lane in range(first, min(first + 8, valid)):
                            put(kind, target + lane * lane_step, buffer + 32 * (lane - first), 8)
                    start += 8
                # otherwise values go in the longest runs that lie together on both sides
                pixels, values, count = 0 if turns else run, valid, 1
                if lane_step == size:
                    values, count = 1, valid
                    if valid == lanes and steps[3] == valid * size:
                        pixels, count = 1, run * valid
                for p in range(pixels):
                    for lane in range(values):
                        put(kind, place + p * steps[3] + lane * lane_step, source + 4 * (p * lanes + lane), count)
    if lane_step % 64 == 0 and dst.place < dst.end - KEPT_BYTES:
        fence()


@jit
def write_rounded(dst: Values, sums: int, lanes: int, valid: int, counts: Vector) -> None:
    """Write a dense box of sums [n][d][h][w][lanes] that have 16 bits to dst, whose positions are adjacent."""
    steps = dst.steps
    run, lines, planes = merged_runs(counts, steps, steps)
    for n in range(counts[0]):
        for d in range(planes):
            for h in range(lines):
                source = sums + ((n * planes + d) * lines + h) * run * 2 * lanes
                place = dst.place + n * steps[0] + d * steps[1] + h * steps[2]
                # 8 channels at a time: lines a power of two apart compete for the same sets of the caches
                for first in range(0, run, STRIP // 2):
                    count, follows = min(STRIP // 2, run - first), first + STRIP // 2 < run
                    for block in range(0, valid, 8):
                        lane = max(0, min(block, valid - 8))
                        target, channels = place + 2 * first + lane * dst.channel, min(8, valid)
                        for ahead in range(STRIP, 2 * STRIP if follows else STRIP, 64):
                            touch_all(target + ahead, dst.channel)
                        pixels = Pixels(source + 2 * (lanes * first + lane), 2 * lanes, 2, count)
                        pack_line(channels, target, dst.channel, pixels)
