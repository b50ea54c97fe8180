"""Packing of lines of pixels for products of bf16 pairs: from tensors in any layout to channel planes, or to panels.

A plane holds one channel's pixels one after the other, a panel 16 channels' pixels two by two, [pair][channel][2];
lines are a common pitch apart. Values are moved as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir

from kernels.emit import simd
from kernels.emit.compiler import emitted, jit, together
from kernels.emit.intrinsics import F32, copy_bytes, transpose_panel

__all__ = ["SPREAD", "Pixels", "join3", "move16", "pack_line", "pack_line_pairs", "spread1", "spread3", "transpose16"]

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_EIGHT, _SIXTEEN = ir.VectorType(_I16, 8), ir.VectorType(_I16, 16)
_LONGS = ir.VectorType(_I64, 16)
_TWO_BY_TWO = ir.Constant(ir.VectorType(_I32, 32), [lane + 16 * half for lane in range(16) for half in (0, 1)])

_PAIR = 64  # bytes of a pair of pixels of 16 channels


@together
class Pixels(NamedTuple):
    """A run of pixels of a tensor, from the address of the first one on: bytes to the next, and between channels."""

    place: int
    step: int
    channel: int
    run: int


@emitted
def transpose16(builder: Any, dst: Any, dst_step: Any, src: Any, src_step: Any) -> None:
    """Turn 8 pixels of 8 adjacent channels into 8 channels of 8 adjacent pixels."""

    index = ir.VectorType(_I32, 8)
    rows = [simd.load(builder, builder.add(src, builder.mul(src_step, _I64(m))), _EIGHT, 2) for m in range(8)]
    low, high = ([c + 4 * half + p * 8 for c in range(4) for p in (0, 1)] for half in (0, 1))
    for _ in range(3):  # each time the values of row i and row i + 4 in turn: after three of them rows are columns
        rows = [
            builder.shuffle_vector(rows[i], rows[i + 4], ir.Constant(index, order))
            for i in range(4) for order in (low, high)
        ]  # fmt: skip
    for m, row in enumerate(rows):
        simd.store(builder, row, builder.add(dst, builder.mul(dst_step, _I64(m))), 2)


@emitted
def _four_pairs(builder: Any, dst: Any, dst_step: Any, src: Any, row_step: Any, last: Any) -> None:
    """Turn 8 channel rows of 4 adjacent pairs into 4 pairs of 8 channels; the row `last` stands for those behind it."""

    def row(m: int) -> Any:
        number = builder.select(builder.icmp_signed("<", _I64(m), last), _I64(m), last)
        return simd.load(builder, builder.add(src, builder.mul(number, row_step)), ir.VectorType(_I32, 4), 2)

    def shuffle(a: Any, b: Any, order: list[int]) -> Any:
        return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, 8), order))

    halves = [shuffle(row(m), row(m + 4), list(range(8))) for m in range(4)]
    low, high = ([4 * half + i + p for half in (0, 1) for i in at for p in (0, 8)] for at in ((0, 1), (2, 3)))
    twos = [shuffle(halves[m], halves[m + 1], order) for m in (0, 2) for order in (low, high)]
    first, second = ([4 * half + p + i for half in (0, 1) for p in (0, 8) for i in at] for at in ((0, 1), (2, 3)))
    pairs = [shuffle(twos[at], twos[at + 2], order) for at in (0, 1) for order in (first, second)]
    for m, pair in enumerate(pairs):
        simd.store(builder, pair, builder.add(dst, builder.mul(dst_step, _I64(m))), 2)


@emitted
def move16(builder: Any, dst: Any, dst_step: Any, src: Any, src_step: Any, count: Any) -> None:
    """Move `count` (at least 1) values of 16 bits that lie some bytes apart: for few of them gathers are slower."""

    def body(carried: list[Any]) -> list[Any]:
        simd.store(builder, simd.load(builder, carried[1], _I16, 2), carried[0], 2)
        return [builder.add(carried[0], dst_step), builder.add(carried[1], src_step)]

    def four(carried: list[Any]) -> list[Any]:
        for _ in range(4):
            carried = body(carried)
        return carried

    moved = simd.some(builder, builder.lshr(count, _I64(2)), [dst, src], four, "move")
    simd.some(builder, builder.and_(count, _I64(3)), moved, body, "move")


@emitted
def _pairs(builder: Any, dst: Any, dst_step: Any, src: Any, src_step: Any, pixel: Any, valid: Any, count: Any) -> None:
    """Bring `count` (at least 1) pairs of pixels of up to 16 adjacent channels together, zeros behind the `valid` ones.

    `src_step` leads from one pair to the next, `pixel` from the first pixel of a pair to the second.
    """
    mask = builder.icmp_signed("<", ir.Constant(_LONGS, list(range(16))), simd.splat(builder, valid, 16))

    def load(place: Any) -> Any:
        pointer, zeros = builder.inttoptr(place, _SIXTEEN.as_pointer()), ir.Constant(_SIXTEEN, [0] * 16)
        return simd.call(builder, "llvm.masked.load.v16i16.p0", _SIXTEEN, pointer, _I32(2), mask, zeros)

    def body(carried: list[Any]) -> list[Any]:
        to, first = carried
        both = load(first), load(builder.add(first, pixel))
        simd.store(builder, builder.shuffle_vector(*both, _TWO_BY_TWO), to, 2)
        return [builder.add(to, dst_step), builder.add(first, src_step)]

    simd.loop(builder, count, [dst, src], body, "pairs")


def _every(apart: int, builder: Any, dst: Any, src: Any, count: Any) -> None:
    """Copy every `apart`-th value, `count` (more than 16) in all, to adjacent places.

    Nothing outside the first and the last one is read.
    """
    between, step = ir.VectorType(_I16, 16 * apart), _I64(32 * apart)

    def move(to: Any, first: Any, place: int) -> None:
        order = ir.Constant(ir.VectorType(_I32, 16), [place + apart * lane for lane in range(16)])
        values = simd.load(builder, first, between, 2)
        simd.store(builder, builder.shuffle_vector(values, ir.Constant(between, ir.Undefined), order), to, 2)

    def body(carried: list[Any]) -> list[Any]:
        to, first = carried
        move(to, first, 0)
        return [builder.add(to, _I64(32)), builder.add(first, step)]

    simd.loop(builder, builder.lshr(builder.sub(count, _I64(1)), _I64(4)), [dst, src], body, "every")
    last = builder.sub(count, _I64(16))  # some are moved twice
    to, first = (builder.add(place, builder.mul(last, _I64(size))) for place, size in ((dst, 2), (src, 2 * apart)))
    move(to, builder.sub(first, _I64(2 * apart - 2)), apart - 1)


every2, every6 = (emitted(partial(_every, apart)) for apart in (2, 6))


def _spread(channels: int, builder: Any, dst: Any, src: Any, count: Any) -> None:
    """Bring `count` (at least `SPREAD`) adjacent pixels of an odd number of channels to pairs of channels.

    A zero follows the last channel. The last pixels overlap.
    """
    width, size = SPREAD // (channels + 1), 2 * channels
    kind = ir.VectorType(_I16, channels * width)
    zero, places = ir.Constant(kind, [0] * kind.count), range(channels + 1)
    order = [p * channels + c if c < channels else kind.count for p in range(width) for c in places]

    def body(carried: list[Any]) -> list[Any]:
        pixels = simd.load(builder, carried[1], kind, 2)
        pairs = builder.shuffle_vector(pixels, zero, ir.Constant(ir.VectorType(_I32, len(order)), order))
        simd.store(builder, pairs, carried[0], 2)
        return [builder.add(carried[0], _I64(2 * SPREAD)), builder.add(carried[1], _I64(width * size))]

    simd.loop(builder, builder.udiv(count, _I64(width)), [dst, src], body, "spread")
    last = builder.sub(count, _I64(width))
    body([builder.add(dst, builder.mul(last, _I64(size + 2))), builder.add(src, builder.mul(last, _I64(size)))])


@emitted
def join3(builder: Any, dst: Any, src: Any, plane: Any, count: Any) -> None:
    """Interleave `count` (at least `SPREAD`) pixels of three planes, `plane` bytes apart, as pairs of channels.

    A zero follows the third channel. The last pixels overlap.
    """
    width = SPREAD // 2

    def mixed(a: Any, b: Any) -> Any:
        order = [each for lane in range(width) for each in (lane, width + lane)]
        joined = builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, 2 * width), order))
        return builder.bitcast(joined, ir.VectorType(_I32 if a.type == _SIXTEEN else _I64, width))

    def body(carried: list[Any]) -> list[Any]:
        to, first = carried
        a, b, c = (simd.load(builder, simd.nth(builder, first, plane, m), _SIXTEEN, 2) for m in range(3))
        pairs = mixed(a, b), mixed(c, ir.Constant(_SIXTEEN, [0] * width))
        simd.store(builder, mixed(*pairs), to, 2)
        return [builder.add(to, _I64(8 * width)), builder.add(first, _I64(2 * width))]

    simd.loop(builder, builder.udiv(count, _I64(width)), [dst, src], body, "join")
    last = builder.sub(count, _I64(width))
    body([builder.add(dst, builder.mul(last, _I64(8))), builder.add(src, builder.mul(last, _I64(2)))])


SPREAD = 32
"""Values that are spread at a time, zeros included."""

spread1, spread3 = (emitted(partial(_spread, channels)) for channels in (1, 3))


@jit
def pack_line(channels: int, dst: int, plane: int, src: Pixels) -> None:
    """Pack one line of pixels into each channel's plane; adjacent channels are transposed."""
    place, pixel, channel, run = src
    done = run // 8 * 8 if channel == 2 and channels >= 8 and pixel != 2 else 0
    # 8 channels at a time: planes a power of two apart compete for the same sets of the caches
    for first in range(0, channels if done > 0 else 0, 8):
        c = min(first, channels - 8)
        for p in range(0, done, 8):
            transpose16(dst + c * plane + 2 * p, plane, place + 2 * c + p * pixel, pixel)
    left = run - done
    for c in range(channels if left > 0 else 0):
        to, here = dst + c * plane + 2 * done, place + c * channel + done * pixel
        if pixel == 2:
            copy_bytes(to, here, 2 * left)
        elif pixel == 4 and left > 16:
            every2(to, here, left)
        elif pixel == 12 and left > 16:
            every6(to, here, left)
        else:
            move16(to, 2, here, pixel, left)


@jit
def _transpose_pairs(to: int, src: int, channel: int, valid: int, pairs: int) -> None:
    """Transpose at least 4 adjacent pairs of halves of at most 16 channels; the last ones overlap."""
    last = pairs - (8 if pairs >= 8 else 4)
    for half in range(0, valid, 8):
        rows, lanes, most = src + half * channel, to + 4 * half, min(7, valid - half - 1)
        if pairs >= 8:
            transpose_panel(F32, lanes, _PAIR, rows, pairs // 8, channel, most)
            if pairs % 8 > 0:
                transpose_panel(F32, lanes + last * _PAIR, _PAIR, rows + 4 * last, 1, channel, most)
        else:
            _four_pairs(lanes, _PAIR, rows, channel, most)
            _four_pairs(lanes + last * _PAIR, _PAIR, rows + 4 * last, channel, most)


@jit
def pack_line_pairs(channels: int, panel: int, block: int, position: int, src: Pixels) -> None:
    """Pack one line of pixels into the panels of 16 channels each, `block` bytes apart, from a position on.

    That may be odd: then the other half of the first pair is not the line's. Adjacent channels are read in the order
    of memory.
    """
    place, pixel, channel, run = src
    odd, adjacent = position % 2, channel == 2
    pairs, whole = (run - odd) // 2, channels // 16 if adjacent and channels >= 32 else 0
    first, start = panel + (position + odd) // 2 * _PAIR, place + odd * pixel
    for pair in range(pairs if whole > 0 else 0):
        _pairs(first + pair * _PAIR, block, start + 2 * pair * pixel, 32, pixel, 16, whole)
    for c in range(0, channels, 16):
        to, here, valid = first + c // 16 * block, start + c * channel, min(16, channels - c)
        if odd == 1:
            move16(to - _PAIR + 2, 4, here - pixel, channel, valid)
        if odd + 2 * pairs < run:
            move16(to + pairs * _PAIR, 4, here + 2 * pairs * pixel, channel, valid)
        if pairs == 0 or c < 16 * whole:
            continue
        if adjacent:
            _pairs(to, _PAIR, here, 2 * pixel, pixel, valid, pairs)
        elif pixel == 2 and pairs >= 4:
            _transpose_pairs(to, here, channel, valid, pairs)
        else:
            for half in range(2 * pairs):
                move16(to + half // 2 * _PAIR + half % 2 * 2, 4, here + half * pixel, channel, valid)
