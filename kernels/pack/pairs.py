"""Packing of boxes of positions for products of bf16 pairs: from tensors in any layout to planes or panels of pairs.

Lines, which `kernels.pack.halves` and `kernels.pack.split` move, are runs of the last of four axes; they are a common
pitch apart, zeros between them. Where that axis is the images and channels lie apart, values are turned first: of a few
channels and images from the order of memory into rows of images.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from kernels.emit.compiler import ENTRIES, Entry, Table, Vector, callback, jit
from kernels.emit.intrinsics import fill_zero, transpose_panel
from kernels.pack.halves import move16, pack_line, pack_line_pairs, transpose16
from kernels.pack.split import SPLIT_BYTES, split_line, split_line_pairs, touch

__all__ = ["PACK_BYTES", "call_turned", "pack_pairs", "pack_planes", "turned"]

_typed_intrinsic: Any = intrinsic

_transpose = transpose_panel("f32")

_PAIR = 64  # bytes of a pair of pixels of 16 channels

TURNED = 32
"""Images that are turned at a time."""

MOST_STRIDE = 4
"""Stride up to which turning all values between the wanted ones is faster than to pick these one by one."""

_VALUES = 64  # adjacent values of a channel that are turned at a time; where 16 channels are, 32 bytes of each

PACK_BYTES = 16 * 32 * TURNED + SPLIT_BYTES
"""Scratch of `call_turned`."""

_AHEAD = 256
"""Bytes that memory is asked for before they are needed, of each image."""


@jit
def _holds(box: Vector, steps: Vector, place: int, run: int) -> bool:
    """Say whether a box has a line of at least `run` positions at a place."""
    offset = place - box[1]
    if offset < 0 or box[5] < run:
        return False
    n, d, h = offset // steps[0], offset % steps[0] // steps[1], offset % steps[0] % steps[1] // steps[2]
    inside: bool = n < box[2] and d < box[3] and h < box[4]
    return inside and bool(n * steps[0] + d * steps[1] + h * steps[2] == offset)


@jit
def _clear(boxes: Table, before: Table, steps: Vector, dst: int, count: int, plane: int, pairs: bool) -> None:
    """Write zeros where `before` has lines and `boxes` has none, in `count` planes or panels of `plane` bytes.

    With nothing `before`, everything becomes zero. Of panels whole pairs are cleared: what is packed now is so later.
    """
    if boxes.shape[0] != before.shape[0]:
        fill_zero(dst, count * plane)
        return
    for b in range(boxes.shape[0]):
        was, now, same = before[b], boxes[b], True
        for column in range(1, 6):
            same &= was[column] == now[column]
        for n in range(was[2] if was[5] > 0 and not same else 0):
            for d in range(was[3]):
                for h in range(was[4]):
                    place = was[1] + n * steps[0] + d * steps[1] + h * steps[2]
                    if not _holds(now, steps, place, was[5]):
                        first, last = place, place + 2 * was[5]
                        if pairs:
                            first, last = first // 4 * _PAIR, (last + 2) // 4 * _PAIR
                        for p in range(count):
                            fill_zero(dst + p * plane + first, last - first)


@jit
def _turn(
    size: int, channels: int, images: int, count: int, src: int, image: int, channel: int, dst: int, plane: int,
    row: int,
) -> None:  # fmt: skip
    """Bring `count` (at least 8) adjacent values of some channels and images to rows of images, `row` bytes apart.

    `image` and `channel` are bytes of the tensor, `plane` those from a channel's rows to the next one's. Of f32, rows
    are written up to a multiple of 8 images.
    """
    for c in range(channels):
        first, to = src + c * channel, dst + c * plane
        for n in range(0, images, 8):
            for line in range(0, min(8, images - n) * 64, 64):
                for part in range(0, count * size, 64):
                    touch(first + (n + line // 64) * image + _AHEAD + part)
            if size == 4:
                _transpose(to + 4 * n, row, first + n * image, count // 8, image, min(7, images - n - 1))
                if count % 8 > 0:
                    last = count - 8
                    _transpose(
                        to + last * row + 4 * n, row, first + n * image + 4 * last, 1, image, min(7, images - n - 1)
                    )
            elif images < 8:
                for some in range(images):
                    move16(to + 2 * some, row, first + some * image, 2, count)
            else:
                start = min(n, images - 8)
                for value in range(0, count, 8):
                    here = min(value, count - 8)
                    transpose16(to + here * row + 2 * start, row, first + start * image + 2 * here, image)


@jit
def _turns(size: int, box: Vector, steps: Vector) -> int:
    """Say how many lines of a box are turned together, so that at least 8 values are adjacent; 0 if it should not be.

    It should where neither images nor channels are adjacent in memory, but the values between two wanted ones are few.
    """
    values, width = box[3] * box[4], 1
    if steps[3] == size or steps[4] == size or box[2] * values * box[5] == 0:
        return 0
    if box[4] > 1:
        if steps[2] < size or steps[2] > MOST_STRIDE * size:
            return 0
        width += (box[4] - 1) * (steps[2] // size)
    if width >= 8:
        return 1
    if box[3] == 1 or steps[1] < size or steps[1] > 2 * MOST_STRIDE * size * box[4]:
        return 0
    return int(box[3]) if (box[3] - 1) * (steps[1] // size) + width >= 8 else 0


@jit
def _pack_turned(
    parts: int, pairs: bool, channels: int, lines: int, box: Vector, src: int, steps: Vector, dst: int, plane: int,
    part: int, dst_steps: Vector, scratch: int,
) -> None:  # fmt: skip
    """Pack a box, `lines` of it together, to planes or panels of `pairs`, `plane` bytes apart, their parts `part`."""
    size = 4 if parts == 3 else 2
    together, most = (16, 32 // size) if pairs else (1, _VALUES)
    row, spare = size * TURNED, scratch + 16 * 32 * TURNED
    across, down = steps[2] // size if box[4] > 1 else 1, steps[1] // size if lines > 1 else 0
    span = (lines - 1) * down + (box[4] - 1) * across + 1
    for first in range(0, channels, together):
        some = min(together, channels - first)
        panel = dst + first // together * plane
        for line in range(0, box[2] * box[3], lines):
            d, h = divmod(line, box[3])
            start = src + first * steps[4] + d * steps[0] + h * steps[1]
            to = box[1] + d * dst_steps[0] + h * dst_steps[1]
            for image in range(0, box[5], TURNED):
                images = min(TURNED, box[5] - image)
                if size == 2 and not pairs and lines == 1 and across == 1:  # rows are where they belong at once
                    place = panel + to + 2 * image
                    _turn(size, 1, images, span, start + image * steps[3], steps[3], steps[4], place, 0, dst_steps[2])
                    continue
                for at in range(0, span, most):
                    begin = max(0, min(at, span - 8))
                    count = min(at + most, span) - begin
                    _turn(
                        size, some, images, count, start + image * steps[3] + size * begin, steps[3], steps[4], scratch,
                        most * row, row,
                    )  # fmt: skip
                    for k in range(lines):
                        left = begin - k * down
                        for w in range(
                            max(0, (left + across - 1) // across), min(box[4], (left + count - 1) // across + 1)
                        ):
                            origin = scratch + (w * across - left) * row
                            place = to + k * dst_steps[1] + w * dst_steps[2] + 2 * image
                            if not pairs and parts == 3:
                                split_line(1, panel + place, plane, part, origin, size, 0, images, spare)
                            elif not pairs:
                                pack_line(1, panel + place, plane, origin, size, 0, images)
                            elif parts == 3:
                                split_line_pairs(
                                    some, panel, plane, part, place // 2, origin, size, most * row, images, spare
                                )
                            else:
                                pack_line_pairs(some, panel, plane, place // 2, origin, size, most * row, images)


@jit
def _pack_all_turned(
    parts: int, pairs: bool, channels: int, planes: int, boxes: Table, before: Table, src: int, src_steps: Vector,
    dst: int, plane: int, dst_steps: Vector, scratch: int,
) -> bool:  # fmt: skip
    """Pack boxes whose last axis is the images as `pack_planes` or `pack_pairs` does, if they should be turned.

    `scratch` holds `PACK_BYTES`.
    """
    size, count = 4 if parts == 3 else 2, (3 if parts == 3 else 1) * planes
    for b in range(boxes.shape[0]):
        if boxes[b, 2] * boxes[b, 3] * boxes[b, 4] * boxes[b, 5] > 0 and _turns(size, boxes[b], src_steps) == 0:
            return False
    _clear(boxes, before, dst_steps, dst, count, plane, pairs)
    for b in range(boxes.shape[0]):
        lines = _turns(size, boxes[b], src_steps)
        if lines > 0:
            _pack_turned(
                parts, pairs, channels, lines, boxes[b], src + boxes[b, 0], src_steps, dst, plane, planes * plane,
                dst_steps, scratch,
            )  # fmt: skip
    return True


def _turned(
    parts: Any, pairs: Any, channels: Any, planes: Any, boxes: Any, count: Any, before: Any, earlier: Any, src: Any,
    src_steps: Any, dst: Any, plane: Any, dst_steps: Any, scratch: Any,
) -> Any:  # fmt: skip
    return _pack_all_turned(
        parts, pairs != 0, channels, planes, carray(boxes, (count, 6)), carray(before, (earlier, 6)), src,
        carray(src_steps, (5,)), dst, plane, carray(dst_steps, (4,)), scratch,
    )  # fmt: skip


_POINTERS = 4, 6, 9, 12


@cache
def turned() -> int:
    """Give the address of what `call_turned` calls: as a callback it is compiled once, and not in all its callers."""
    kinds = ["CPointer(int64)" if i in _POINTERS else "int64" for i in range(14)]
    return int(callback(f"boolean({', '.join(kinds)})", _turned).address)


ENTRIES.append(Entry("pack.pairs.turned", turned, _turned))


@_typed_intrinsic
def call_turned(
    typingctx: Any, entry: Any, parts: Any, pairs: Any, channels: Any, planes: Any, boxes: Any, count: Any,
    before: Any, earlier: Any, src: Any, src_steps: Any, dst: Any, plane: Any, dst_steps: Any, scratch: Any,
) -> Any:  # fmt: skip
    """Pack boxes whose last axis is the images, as `pack_planes` does or `pack_pairs`, if they should be turned.

    `entry` is `turned`. Tables and steps go as addresses, tables with the number of their rows. `scratch` holds
    `PACK_BYTES`. Gives 1 if it packed them, else 0.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        long = ir.IntType(64)
        kind = ir.FunctionType(ir.IntType(8), [long] * 14)
        done = builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return builder.zext(done, long)

    return types.int64(*[types.int64] * 15), codegen


@jit
def pack_pairs(
    parts: int, channels: int, blocks: int, boxes: Table, before: Table, src: int, src_steps: Vector, dst: int,
    block: int, dst_steps: Vector, scratch: int,
) -> None:  # fmt: skip
    """Pack boxes of positions of a tensor into `blocks` panels of `block` bytes, as `pack_planes` does planes."""
    split = parts == 3
    _clear(boxes, before, dst_steps, dst, (3 if split else 1) * blocks, block, True)
    span = channels if src_steps[4] == (4 if split else 2) else 16
    for first in range(0, channels, span):
        for b in range(boxes.shape[0]):
            box, some, to = boxes[b], min(span, channels - first), dst + first // 16 * block
            start = src + first * src_steps[4] + box[0]
            for n in range(box[2] if box[5] > 0 else 0):
                for d in range(box[3]):
                    for h in range(box[4]):
                        position = (box[1] + n * dst_steps[0] + d * dst_steps[1] + h * dst_steps[2]) // 2
                        line = start + n * src_steps[0] + d * src_steps[1] + h * src_steps[2]
                        if split:
                            split_line_pairs(
                                some, to, block, blocks * block, position, line, src_steps[3], src_steps[4], box[5],
                                scratch,
                            )  # fmt: skip
                        else:
                            pack_line_pairs(some, to, block, position, line, src_steps[3], src_steps[4], box[5])


@jit
def pack_planes(
    parts: int, channels: int, planes: int, boxes: Table, before: Table, src: int, src_steps: Vector, dst: int,
    plane: int, dst_steps: Vector, scratch: int,
) -> None:  # fmt: skip
    """Pack boxes of positions of a tensor into the first of `planes` planes of `plane` bytes, zeros elsewhere.

    A row of `boxes`: byte offset in the tensor, byte offset in the plane, then the number of positions along
    (n, d, h, w); `src_steps` are the bytes between those, then between channels, `dst_steps` the same in the plane.
    `before` are the boxes that were packed there last, if any. Where channels are adjacent, all of a line are packed
    before the next line, else all lines of a few channels. Three `parts` say that the tensor is of f32; the planes of
    its parts follow each other. `scratch` holds `SPLIT_BYTES` then.
    """
    split = parts == 3
    _clear(boxes, before, dst_steps, dst, (3 if split else 1) * planes, plane, False)
    span = channels if src_steps[4] == (4 if split else 2) else 8
    for first in range(0, channels, span):
        for b in range(boxes.shape[0]):
            box, some, to = boxes[b], min(span, channels - first), dst + first * plane
            start = src + first * src_steps[4] + box[0]
            for n in range(box[2] if box[5] > 0 else 0):
                for d in range(box[3]):
                    for h in range(box[4]):
                        at = to + box[1] + n * dst_steps[0] + d * dst_steps[1] + h * dst_steps[2]
                        line = start + n * src_steps[0] + d * src_steps[1] + h * src_steps[2]
                        if split:
                            split_line(
                                some, at, plane, planes * plane, line, src_steps[3], src_steps[4], box[5], scratch
                            )
                        else:
                            pack_line(some, at, plane, line, src_steps[3], src_steps[4], box[5])
