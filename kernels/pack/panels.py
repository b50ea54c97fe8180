"""Packing: from tensors in any layout and dtype into the f32 panels that the register tiles walk.

A panel holds, position after position, `lanes` adjacent channels. No position is written twice for the kernel's
sake (there is no im2col matrix): taps, strides and dilations are steps over the panel.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernels.blocks import STEPS
from kernels.emit.compiler import Record, Rows, Vector, inlined, jit, together
from kernels.emit.intrinsics import (
    PICKED,
    copy_panel,
    interleave2,
    interleave3,
    load,
    pick_panel,
    store_value,
    stored_size,
    touch_all,
    transpose_panel,
)

__all__ = [
    "Panel",
    "Values",
    "merged_runs",
    "pack_panels",
    "padded",
    "spread",
    "transpose_run",
]


class Panel(Record):
    """Where some channels of a box of positions are packed.

    A line of the panel has so many `lanes`, the first `valid` ones channels; the first lies `source` bytes from the
    first channel of all. The box's first line is at an `address`, and steps from line to line are so many times `unit`
    bytes.
    """

    lanes: int
    valid: int
    source: int
    address: int
    unit: int


PANEL = Panel.dtype


@together
class Values(NamedTuple):
    """Stored values of a tensor, in bytes: the address of the first one, and steps along (n, d, h, w).

    `channel` leads from one channel to the next. What is read lies before the address `end`.
    """

    kind: int
    place: int
    steps: Vector
    channel: int
    end: int


STRIP = STEPS.strip_positions

PREFETCHED = 64
"""Positions of a run from which on it pays to prefetch the next channels: kernels of weights are shorter."""


def padded(channels: int) -> int:
    """Return the f32 of a packed position: whole lines of 8 where there are as many channels."""
    return channels if channels < 8 else spread(-(-channels // 8) * 8)


def spread(words: int) -> int:
    """Return the words of a packed position, so that few positions meet in the same sets of the first cache."""
    return words + 16 if words % 128 == 0 else words


@jit
def transpose_run(
    kind: int, lanes: int, valid: int, dst: int, dst_step: int, src: int, channel_step: int, run: int
) -> None:
    """Pack `run` adjacent pixels of channel-major rows; lanes past `valid` repeat the last channel.

    A line of memory of each of 8 channels is packed at a time; in long runs those of the next 8 are prefetched.
    """
    size, done = stored_size(kind), 0
    if lanes == valid and 4 * lanes == dst_step and 1 < lanes < 4 and run >= 8:
        done = run // 8 * 8
        if lanes == 2:
            interleave2(kind, dst, src, run // 8, channel_step)
        else:
            interleave3(kind, dst, src, run // 8, channel_step)
    most = 2 if size == 4 else 4  # blocks of a line of memory
    for base in range(0, lanes, 8):
        first, last = min(base, valid - 1), min(7, valid - 1 - min(base, valid - 1))
        rows, ahead = src + first * channel_step, 8 * channel_step if run >= PREFETCHED and base + 8 < valid else 0
        if run < 8:
            for p in range(run):
                for m in range(8):
                    value = load(kind, rows + min(m, last) * channel_step + p * size)
                    store_value(dst + p * dst_step + 4 * (base + m), value)
            continue
        start, left = done, run - done
        while left:
            # a last block that is not full starts earlier and writes some pixels twice
            blocks = min(left // 8, most)
            if blocks == 0:
                start, blocks = run - 8, 1
                left = 8
            if ahead != 0:
                touch_all(rows + ahead + start * size, channel_step)
            to = dst + start * dst_step + 4 * base
            transpose_panel(kind, to, dst_step, rows + start * size, blocks, channel_step, last)
            start += 8 * blocks
            left -= 8 * blocks


@jit
def _pack_run(src: Values, panel: Panel, line: int, step: int, place: int, run: int) -> None:
    """Pack `run` positions of one line, the first to a `line` of the panel and then `step` lines apart."""
    size, lanes, valid, pixel = stored_size(src.kind), panel.lanes, panel.valid, src.steps[3]
    to, to_step, source = panel.address + line * panel.unit, step * panel.unit, place + panel.source
    if src.channel != size and pixel == size:
        transpose_run(src.kind, lanes, valid, to, to_step, source, src.channel, run)
        return
    whole, vectors, every = 0, (lanes + 7) // 8 * 8, src.channel // size
    if every == 1 or (valid == vectors and every in PICKED):
        # whole vectors may read past the valid channels, but never past the tensor
        whole = run
        while whole > 0 and source + (whole - 1) * pixel + vectors * src.channel > src.end:
            whole -= 1
        if whole > 0 and every == 1:
            copy_panel(src.kind, vectors, to, to_step, source, pixel, whole)
        elif whole > 0:
            pick_panel(src.kind, every, vectors, to, to_step, source, pixel, whole)
    for p in range(whole, run):
        for c in range(valid):
            store_value(to + p * to_step + 4 * c, load(src.kind, source + p * pixel + c * src.channel))
        for c in range(valid, lanes):
            store_value(to + p * to_step + 4 * c, np.float32(0.0))


@inlined
def merged_runs(sizes: Vector, steps: Vector, others: Vector) -> tuple[int, int, int]:
    """Return positions of a run, runs of a plane, and planes: lines that follow each other on both sides are a run."""
    run, lines, planes = sizes[3], sizes[2], sizes[1]
    if steps[2] == run * steps[3] and others[2] == run * others[3]:
        run, lines = run * lines, 1
        if steps[1] == run * steps[3] and others[1] == run * others[3]:
            run, planes = run * planes, 1
    return run, lines, planes


@jit
def pack_panels(src: Values, panels: Rows[Panel], sizes: Vector, steps: Vector) -> None:
    """Pack a box of positions into f32 panels, one for each part of the channels.

    `sizes` are the box's along (n, d, h, w); `steps` lead from one position to the next in the panels, in their units.
    Lanes past the valid ones hold anything: the sums they would feed are dropped. With lanes that are no multiple of 8
    positions overlap and are written in rising order: up to 7 values past a panel are written, too.
    """
    src_steps, (run, lines, planes) = src.steps, merged_runs(sizes, src.steps, steps)
    several = src.channel == stored_size(src.kind) and panels.shape[0] > 1
    strip = STRIP if several else max(run, 1)
    for n in range(sizes[0]):
        for d in range(planes):
            for h in range(lines):
                line = n * steps[0] + d * steps[1] + h * steps[2]
                place = src.place + n * src_steps[0] + d * src_steps[1] + h * src_steps[2]
                for w in range(0, run, strip):
                    for p in range(panels.shape[0]):
                        _pack_run(
                            src, panels[p], line + w * steps[3], steps[3], place + w * src_steps[3], min(strip, run - w)
                        )
