"""Packing of boxes of positions for products of bf16 pairs: from tensors in any layout to planes or panels of pairs.

Lines, which `kernels.pack.halves` and `kernels.pack.split` move, are runs of the last of four axes; they are a common
pitch apart, zeros between them. Where that axis is the images and channels lie apart, values are turned first: of a few
channels and images from the order of memory into rows of images.
"""

from __future__ import annotations

import numpy as np

from kernels.blocks import STEPS
from kernels.emit.compiler import Record, Records, Rows, Vector, inlined, jit, numbers
from kernels.emit.intrinsics import F32, fill_zero, transpose_panel
from kernels.pack.halves import move16, pack_line, pack_line_pairs, transpose16
from kernels.pack.split import SPLIT_BYTES, Pixels, split_line, split_line_pairs, touch
from kernels.problem import ConvProblem, storage_dtype

__all__ = ["PACK_BYTES", "PackedBox", "Packing", "pack_boxes", "weight_boxes"]

_PAIR = 64  # bytes of a pair of pixels of 16 channels

TURNED, AHEAD = STEPS.turned_images, STEPS.ahead_bytes

MOST_STRIDE = 4
"""Stride up to which turning all values between the wanted ones is faster than to pick these one by one."""

_VALUES = 64  # adjacent values of a channel that are turned at a time; where 16 channels are, 32 bytes of each

PACK_BYTES = 16 * 32 * TURNED + SPLIT_BYTES
"""Scratch of `_pack_turned`."""


class PackedBox(Record):
    """A box of positions: the bytes from which on it lies in a channel and in a plane, and its `sizes`."""

    source: int
    place: int
    sizes: Vector = numbers(4)


class Packing(Record):
    """Channels of a tensor, and the planes or panels of `pairs` that boxes of their positions are packed to.

    `source` is the address of the first channel; `channel` leads to the next one, `strides` along (n, d, h, w), all in
    bytes. From `target` on lie so many `planes` for each part of a value, each of `plane` bytes, in which `steps` lead
    along (n, d, h, w). A panel of pairs has 16 channels and counts as a plane: its places and steps are those in a
    channel's plane. With three `parts` the tensor is of f32, else its values are moved as they are, to the first part.
    `scratch` is the address of `PACK_BYTES` bytes; `images` says that w is the images.
    """

    parts: int
    channels: int
    source: int
    channel: int
    strides: Vector = numbers(4)
    target: int
    planes: int
    plane: int
    steps: Vector = numbers(4)
    scratch: int
    pairs: bool
    images: bool


def weight_boxes(problem: ConvProblem, taps: Vector, places: Vector, step: int) -> Records:
    """Return the boxes of the weights of some taps and their places in a plane, in values.

    A box has a tap, or where taps are adjacent in memory, `step` src channels of one.
    """
    dims, (_, wide, narrow, tap_step) = problem.dims, problem.weights_strides
    channel_step, channels = wide if dims.gathers else narrow, dims.src_channels
    step = step if tap_step < channel_step else channels
    firsts = np.arange(0, channels, step)
    boxes = np.zeros((len(firsts), len(taps)), PackedBox.dtype)
    boxes["source"] = storage_dtype(problem.dtype).itemsize * (taps * tap_step + channel_step * firsts[:, None])
    boxes["place"], boxes["sizes"] = 2 * (places + firsts[:, None]), 1
    boxes["sizes"][..., 3] = np.minimum(step, channels - firsts)[:, None]
    return boxes.reshape(-1)


@jit
def _holds(box: PackedBox, steps: Vector, place: int, run: int) -> bool:
    """Return whether a box has a line of at least `run` positions at a place."""
    offset, sizes = place - box.place, box.sizes
    if offset < 0 or sizes[3] < run:
        return False
    n, d, h = offset // steps[0], offset % steps[0] // steps[1], offset % steps[0] % steps[1] // steps[2]
    inside: bool = n < sizes[0] and d < sizes[1] and h < sizes[2]
    return inside and bool(n * steps[0] + d * steps[1] + h * steps[2] == offset)


@inlined
def _value_bytes(packing: Packing) -> int:
    """Return the bytes of a value of the tensor."""
    return 4 if packing.parts == 3 else 2


@jit
def _clear(packing: Packing, boxes: Rows[PackedBox], before: Rows[PackedBox]) -> None:
    """Write zeros where `before` has lines and `boxes` has none.

    With nothing `before`, everything becomes zero. Of panels whole pairs are cleared: what is packed now is so later.
    """
    count, plane, steps = (3 if packing.parts == 3 else 1) * packing.planes, packing.plane, packing.steps
    if boxes.shape[0] != before.shape[0]:
        fill_zero(packing.target, count * plane)
        return
    for b in range(boxes.shape[0]):
        was, now = before[b], boxes[b]
        same, sizes = was.place == now.place, was.sizes
        for axis in range(4):
            same &= sizes[axis] == now.sizes[axis]
        run = sizes[3]
        for n in range(sizes[0] if run > 0 and not same else 0):
            for d in range(sizes[1]):
                for h in range(sizes[2]):
                    place = was.place + n * steps[0] + d * steps[1] + h * steps[2]
                    if not _holds(now, steps[:], place, run):
                        first, last = place, place + 2 * run
                        if packing.pairs:
                            first, last = first // 4 * _PAIR, (last + 2) // 4 * _PAIR
                        for p in range(count):
                            fill_zero(packing.target + p * plane + first, last - first)


@jit
def _pack_line(packing: Packing, channels: int, to: int, place: int, src: Pixels, scratch: int) -> None:
    """Pack one line of pixels of some channels to their planes from `to` on, at a place in them."""
    plane, part = packing.plane, packing.planes * packing.plane
    if packing.pairs:
        if packing.parts == 3:
            split_line_pairs(channels, to, plane, part, place // 2, src, scratch)
        else:
            pack_line_pairs(channels, to, plane, place // 2, src)
    elif packing.parts == 3:
        split_line(channels, to + place, plane, part, src, scratch)
    else:
        pack_line(channels, to + place, plane, src)


@jit
def _turn(size: int, channels: int, images: Pixels, count: int, dst: int, plane: int, row: int) -> None:
    """Bring `count` (at least 8) adjacent values of some channels and images to rows of images, `row` bytes apart.

    From a channel's rows to the next one's it is `plane` bytes. Of f32, rows are written up to a multiple of 8 images.
    """
    for c in range(channels):
        first, to = images.place + c * images.channel, dst + c * plane
        for n in range(0, images.run, 8):
            last = min(7, images.run - n - 1)
            for line in range(last + 1):
                for part in range(0, count * size, 64):
                    touch(first + (n + line) * images.step + AHEAD + part)
            if size == 4:
                here = first + n * images.step
                transpose_panel(F32, to + 4 * n, row, here, count // 8, images.step, last)
                if count % 8 > 0:
                    rest = count - 8
                    transpose_panel(F32, to + rest * row + 4 * n, row, here + 4 * rest, 1, images.step, last)
            elif images.run < 8:
                for some in range(images.run):
                    move16(to + 2 * some, row, first + some * images.step, 2, count)
            else:
                start = min(n, images.run - 8)
                for value in range(0, count, 8):
                    at = min(value, count - 8)
                    transpose16(to + at * row + 2 * start, row, first + start * images.step + 2 * at, images.step)


@inlined
def _turns(packing: Packing, box: PackedBox) -> int:
    """Return how many lines of a box are transposed together, so that at least 8 values are adjacent; 0 for none.

    It should where neither images nor channels are adjacent in memory, but the values between two wanted ones are few.
    """
    size, strides, sizes = _value_bytes(packing), packing.strides, box.sizes
    values, width = sizes[1] * sizes[2], 1
    if strides[3] == size or packing.channel == size or sizes[0] * values * sizes[3] == 0:
        return 0
    if sizes[2] > 1:
        if strides[2] < size or strides[2] > MOST_STRIDE * size:
            return 0
        width += (sizes[2] - 1) * (strides[2] // size)
    if width >= 8:
        return 1
    if sizes[1] == 1 or strides[1] < size or strides[1] > 2 * MOST_STRIDE * size * sizes[2]:
        return 0
    return int(sizes[1]) if (sizes[1] - 1) * (strides[1] // size) + width >= 8 else 0


@jit
def _pack_turned(packing: Packing, box: PackedBox, lines: int) -> None:
    """Pack a box, `lines` of it together."""
    pairs, strides, steps, sizes = packing.pairs, packing.strides, packing.steps, box.sizes
    image, channel, size = strides[3], packing.channel, _value_bytes(packing)
    together, most = (16, 32 // size) if pairs else (1, _VALUES)
    row, scratch = size * TURNED, packing.scratch
    spare = scratch + 16 * 32 * TURNED
    across, down = strides[2] // size if sizes[2] > 1 else 1, strides[1] // size if lines > 1 else 0
    span = (lines - 1) * down + (sizes[2] - 1) * across + 1
    for first in range(0, packing.channels, together):
        some = min(together, packing.channels - first)
        panel = packing.target + first // together * packing.plane
        for line in range(0, sizes[0] * sizes[1], lines):
            d, h = divmod(line, sizes[1])
            start = packing.source + box.source + first * channel + d * strides[0] + h * strides[1]
            to = box.place + d * steps[0] + h * steps[1]
            for n in range(0, sizes[3], TURNED):
                images, source = min(TURNED, sizes[3] - n), start + n * image
                if size == 2 and not pairs and lines == 1 and across == 1:  # rows are where they belong at once
                    _turn(size, 1, Pixels(source, image, channel, images), span, panel + to + 2 * n, 0, steps[2])
                    continue
                for at in range(0, span, most):
                    begin = max(0, min(at, span - 8))
                    count = min(at + most, span) - begin
                    values = Pixels(source + size * begin, image, channel, images)
                    _turn(size, some, values, count, scratch, most * row, row)
                    for k in range(lines):
                        left = begin - k * down
                        for w in range(
                            max(0, (left + across - 1) // across), min(sizes[2], (left + count - 1) // across + 1)
                        ):
                            place = to + k * steps[1] + w * steps[2] + 2 * n
                            origin = scratch + (w * across - left) * row
                            _pack_line(packing, some, panel, place, Pixels(origin, size, most * row, images), spare)


@jit
def _all_turn(packing: Packing, boxes: Rows[PackedBox]) -> bool:
    """Return whether all boxes whose last axis is the images should be transposed."""
    for b in range(boxes.shape[0]):
        sizes = boxes[b].sizes
        if sizes[0] * sizes[1] * sizes[2] * sizes[3] > 0 and _turns(packing, boxes[b]) == 0:
            return False
    return True


@jit
def pack_boxes(packing: Packing, boxes: Rows[PackedBox], before: Rows[PackedBox]) -> None:
    """Pack boxes of positions of a tensor, zeros elsewhere; those `before` were packed there last, if any.

    Where channels are adjacent, all of a line are packed before the next line, else all lines of a few channels.
    """
    _clear(packing, boxes, before)
    if packing.images and _all_turn(packing, boxes):
        for b in range(boxes.shape[0]):
            lines = _turns(packing, boxes[b])
            if lines > 0:
                _pack_turned(packing, boxes[b], lines)
        return
    channels, channel, strides, steps = packing.channels, packing.channel, packing.strides, packing.steps
    few = 16 if packing.pairs else 8
    span = channels if channel == _value_bytes(packing) else few
    for first in range(0, channels, span):
        some, plane = min(span, channels - first), first // 16 if packing.pairs else first
        to = packing.target + plane * packing.plane
        for b in range(boxes.shape[0]):
            box = boxes[b]
            start, sizes = packing.source + box.source + first * channel, box.sizes
            run = sizes[3]
            for n in range(sizes[0] if run > 0 else 0):
                for d in range(sizes[1]):
                    for h in range(sizes[2]):
                        place = box.place + n * steps[0] + d * steps[1] + h * steps[2]
                        line = start + n * strides[0] + d * strides[1] + h * strides[2]
                        src = Pixels(line, strides[3], channel, run)
                        _pack_line(packing, some, to, place, src, packing.scratch)
