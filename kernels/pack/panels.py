"""Packing: from tensors in any layout and dtype into the f32 panels that the register tiles walk.

A panel holds, position after position, `lanes` adjacent channels. No position is written twice for the kernel's
sake (there is no im2col matrix): taps, strides and dilations are steps over the panel.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.compiler import Table, Vector, jit
from kernels.emit.intrinsics import copy_panel, load_value, store_value, transpose_panel

__all__ = ["F16", "F32", "KINDS", "copy_lines", "pack_panel", "pack_panels", "pack_planes"]

F32, F16, BF16 = 0, 1, 2
KINDS = {"f32": F32, "f16": F16, "bf16": BF16}

ACROSS = 8
"""Panels alike from which on adjacent channels are packed position by position rather than panel by panel."""

STRIP = 16
"""Positions that fewer panels, or others, take in turn."""

_copy2_f32, _copy2_f16, _copy2_bf16 = (copy_panel(kind, 2) for kind in KINDS)
_copy1_f32, _copy1_f16, _copy1_bf16 = (copy_panel(kind, 1) for kind in KINDS)
_transpose_f32, _transpose_f16, _transpose_bf16 = (transpose_panel(kind) for kind in KINDS)
_load_f32, _load_f16, _load_bf16 = (load_value(kind) for kind in KINDS)


@jit
def _copy(kind: int, lanes: int, dst: int, dst_step: int, src: int, src_step: int, count: int) -> None:
    """Copy `count` positions of `lanes` (a multiple of 8) adjacent channels."""
    size = 4 if kind == F32 else 2
    done = 0
    while lanes - done >= 16:
        if kind == F32:
            _copy2_f32(dst + 4 * done, dst_step, src + size * done, src_step, count)
        elif kind == F16:
            _copy2_f16(dst + 4 * done, dst_step, src + size * done, src_step, count)
        else:
            _copy2_bf16(dst + 4 * done, dst_step, src + size * done, src_step, count)
        done += 16
    if done < lanes:
        if kind == F32:
            _copy1_f32(dst + 4 * done, dst_step, src + size * done, src_step, count)
        elif kind == F16:
            _copy1_f16(dst + 4 * done, dst_step, src + size * done, src_step, count)
        else:
            _copy1_bf16(dst + 4 * done, dst_step, src + size * done, src_step, count)


@jit
def copy_lines(lanes: int, dst: int, src: int, count: int) -> None:
    """Copy `count` adjacent lines of `lanes` f32 (a multiple of 8)."""
    _copy(F32, 8, dst, 32, src, 32, count * lanes // 8)


@jit
def _move(kind: int, dst: int, src: int) -> None:
    """Copy one value."""
    if kind == F32:
        store_value(dst, _load_f32(src))
    elif kind == F16:
        store_value(dst, _load_f16(src))
    else:
        store_value(dst, _load_bf16(src))


@jit
def _transpose_run(
    kind: int, lanes: int, valid: int, dst: int, dst_step: int, src: int, channel_step: int, run: int
) -> None:
    """Pack `run` adjacent pixels of channel-major rows; lanes past `valid` repeat the last channel."""
    size = 4 if kind == F32 else 2
    for base in range(0, lanes, 8):
        first, last = min(base, valid - 1), min(7, valid - 1 - min(base, valid - 1))
        rows = src + first * channel_step
        if run < 8:
            for p in range(run):
                for m in range(8):
                    _move(kind, dst + p * dst_step + 4 * (base + m), rows + min(m, last) * channel_step + p * size)
            continue
        start, left = 0, run
        while left:
            # a last block that is not full starts earlier and writes some pixels twice
            blocks = left // 8
            if blocks == 0:
                start, blocks = run - 8, 1
                left = 8
            to = dst + start * dst_step + 4 * base
            if kind == F32:
                _transpose_f32(to, dst_step, rows + start * size, blocks, channel_step, last)
            elif kind == F16:
                _transpose_f16(to, dst_step, rows + start * size, blocks, channel_step, last)
            else:
                _transpose_bf16(to, dst_step, rows + start * size, blocks, channel_step, last)
            start += 8 * blocks
            left -= 8 * blocks


@jit
def _pack_run(
    kind: int,
    lanes: int,
    valid: int,
    dst: int,
    dst_step: int,
    src: int,
    channel_step: int,
    pixel_step: int,
    run: int,
    end: int,
) -> None:
    """Pack `run` positions of one line; see `pack_panel`."""
    size = 4 if kind == F32 else 2
    if channel_step != size and pixel_step == size:
        _transpose_run(kind, lanes, valid, dst, dst_step, src, channel_step, run)
        return
    whole = 0
    if channel_step == size:
        # whole vectors may read past the valid channels, but never past the tensor
        vectors = (lanes + 7) // 8 * 8
        whole = run
        while whole > 0 and src + (whole - 1) * pixel_step + vectors * size > end:
            whole -= 1
        if whole > 0:
            _copy(kind, vectors, dst, dst_step, src, pixel_step, whole)
    for p in range(whole, run):
        for c in range(valid):
            _move(kind, dst + p * dst_step + 4 * c, src + p * pixel_step + c * channel_step)
        for c in range(valid, lanes):
            store_value(dst + p * dst_step + 4 * c, np.float32(0.0))


@jit
def _alike(parts: Table, first: int) -> int:
    """Count the parts from `first` on that have the same lanes and the same distances in memory and panels."""
    count = 1
    while first + count < parts.shape[0]:
        here, last = first + count, first + count - 1
        alike = parts[here, 0] == parts[first, 0] and parts[here, 4] == parts[first, 4]
        for column in (2, 3):
            alike = (
                alike and parts[here, column] - parts[last, column] == parts[first + 1, column] - parts[first, column]
            )
        if not alike:
            break
        count += 1
    return count


@jit
def _pack_across(
    kind: int, parts: Table, first: int, count: int, line: int, step: int, src: int, operand: Vector, run: int
) -> int:
    """Pack adjacent channels position by position, so that memory is read in its order; give the positions done.

    Whole vectors are read, never past the tensor: what its end cuts off is left.
    """
    size = 4 if kind == F32 else 2
    lanes = parts[first, 0]
    vectors = (lanes + 7) // 8 * 8
    source = src + parts[first, 2]
    between = parts[first + 1, 2] - parts[first, 2]
    done = run
    while done > 0 and source + (done - 1) * operand[6] + (count - 1) * between + vectors * size > operand[1]:
        done -= 1
    target, apart = parts[first, 3] + line * parts[first, 4], parts[first + 1, 3] - parts[first, 3]
    for p in range(done):
        _copy(kind, vectors, target + p * step * parts[first, 4], apart, source + p * operand[6], between, count)
    return done


@jit
def pack_panels(kind: int, parts: Table, box: Vector, steps: Vector, src: int, operand: Vector) -> None:
    """Pack a box of positions into f32 panels, one for each part of the channels.

    `box` and `operand` are those of `kernels.gradient.tiles.driver`: sizes, byte steps and end of the tensor are read
    from them. `parts` are, row by row: lanes of a line of the panel, valid ones, byte offset of the first, address of
    the box's first line, bytes of one of `steps`; those lead from one (n, d, h, w) to the next. `src` is the address of
    the box's first value. Lanes past the valid ones hold anything: the sums they would feed are dropped. With lanes
    that are no multiple of 8 positions overlap and are written in rising order: up to 7 values past a panel are
    written, too.
    """
    run, lines, planes = box[7], box[6], box[5]
    if operand[5] == run * operand[6] and steps[2] == run * steps[3]:
        run, lines = run * lines, 1
        if operand[4] == run * operand[6] and steps[1] == run * steps[3]:
            run, planes = run * planes, 1
    adjacent = operand[7] == (4 if kind == F32 else 2)
    across = adjacent and _alike(parts, 0) >= ACROSS
    strip = STRIP if adjacent and not across and parts.shape[0] > 1 else max(run, 1)
    first = 0
    while first < parts.shape[0]:
        count = _alike(parts, first) if across else parts.shape[0]
        for n in range(box[4]):
            for d in range(planes):
                for h in range(lines):
                    line = n * steps[0] + d * steps[1] + h * steps[2]
                    place = src + n * operand[3] + d * operand[4] + h * operand[5]
                    done = 0
                    if across and count > 1:
                        done = _pack_across(kind, parts, first, count, line, steps[3], place, operand, run)
                    for w in range(done, run, strip):
                        for p in range(first, first + count):
                            unit = parts[p, 4]
                            _pack_run(
                                kind, parts[p, 0], parts[p, 1],
                                parts[p, 3] + (line + w * steps[3]) * unit, steps[3] * unit,
                                place + w * operand[6] + parts[p, 2], operand[7], operand[6],
                                min(strip, run - w), operand[1],
                            )  # fmt: skip
        first += count


@jit
def pack_panel(
    kind: int, lanes: int, valid: int, dst: int, box: Vector, dst_steps: Vector, src: int, operand: Vector
) -> None:
    """Pack a box of positions into one panel; `dst_steps` are its byte steps for (n, d, h, w), see `pack_panels`."""
    part = np.empty((1, 5), np.int64)
    part[0, 0], part[0, 1], part[0, 2], part[0, 3], part[0, 4] = lanes, valid, 0, dst, 1
    pack_panels(kind, part, box, dst_steps, src, operand)


@jit
def pack_planes(
    kind: int, channels: int, dst: int, channel_step: int, box: Vector, dst_steps: Vector, src: int, operand: Vector
) -> None:
    """Convert a box of positions to f32, channel planes kept apart (`channel_step` bytes); see `pack_panel`."""
    size = 4 if kind == F32 else 2
    whole = box[7] // 8 if operand[6] == size and dst_steps[3] == 4 else 0
    for c in range(channels):
        for n in range(box[4]):
            for d in range(box[5]):
                for h in range(box[6]):
                    to = dst + c * channel_step + n * dst_steps[0] + d * dst_steps[1] + h * dst_steps[2]
                    start = src + c * operand[7] + n * operand[3] + d * operand[4] + h * operand[5]
                    if whole > 0:
                        _copy(kind, 8, to, 32, start, 8 * size, whole)
                    for w in range(8 * whole, box[7]):
                        _move(kind, to + w * dst_steps[3], start + w * operand[6])
