"""Packing for products of bf16 pairs: from tensors in any layout to channel planes, or to panels of pairs.

A plane holds one channel's pixels one after the other, a panel 16 channels' pixels two by two, [pair][channel][2];
lines are a common pitch apart, zeros between them. Values of 16 bits are moved as they are; f16 is then split into two
bf16 whose sum it is. An f32 becomes three of them on its way (`kernels.pack.split`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir

from kernels.emit import simd
from kernels.emit.compiler import emitted, jit
from kernels.emit.intrinsics import F32, transpose_panel
from kernels.pack.split import Pixels, below

__all__ = ["SPREAD", "pack_line", "pack_line_pairs", "split_f16", "spread1", "spread3", "transpose16"]

_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_EIGHT, _SIXTEEN = ir.VectorType(_I16, 8), ir.VectorType(_I16, 16)


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
    """Move `count` (at least 1) values of 16 bits that lie some bytes apart."""

    def body(carried: list[Any]) -> list[Any]:
        simd.store(builder, simd.load(builder, carried[1], _I16, 2), carried[0], 2)
        return [builder.add(carried[0], dst_step), builder.add(carried[1], src_step)]

    def four(carried: list[Any]) -> list[Any]:
        for _ in range(4):
            carried = body(carried)
        return carried

    moved = simd.some(builder, builder.lshr(count, _I64(2)), [dst, src], four, "move")
    simd.some(builder, builder.and_(count, _I64(3)), moved, body, "move")


def _every(builder: Any, address: Any, step: int) -> Any:
    """Read `PICKED` values, each the first of `step` adjacent ones, by shuffles of at most two registers."""
    kind, index = ir.VectorType(_I16, 32), ir.VectorType(_I32, PICKED)
    places = [i * step for i in range(PICKED)]
    found = ir.Constant(_SIXTEEN, ir.Undefined)
    for first in range(0, step * PICKED, 64):
        starts = [min(at, step * PICKED - 32) for at in (first, first + 32)]  # nothing behind the values is read
        parts = [simd.load(builder, builder.add(address, _I64(2 * at)), kind, 2) for at in starts]
        at = [place - starts[0] if place < first + 32 else 32 + place - starts[1] for place in places]
        mine = [first <= place < first + 64 for place in places]
        here = [place if inside else 0 for place, inside in zip(at, mine, strict=True)]
        some = builder.shuffle_vector(*parts, ir.Constant(index, here))
        found = builder.shuffle_vector(found, some, ir.Constant(index, [i + PICKED * mine[i] for i in range(PICKED)]))
    return found


def _pick(step: int, builder: Any, dst: Any, src: Any, count: Any) -> None:
    """Move `count` (more than `PICKED`) values, each the first of `step` adjacent ones."""
    last = builder.sub(count, _I64(1))  # what follows this value is not read

    def some(to: Any, first: Any) -> None:
        simd.store(builder, _every(builder, first, step), to, 2)

    def body(carried: list[Any]) -> list[Any]:
        some(*carried)
        return [builder.add(carried[0], _I64(2 * PICKED)), builder.add(carried[1], _I64(2 * PICKED * step))]

    simd.loop(builder, builder.udiv(last, _I64(PICKED)), [dst, src], body, "pick")
    to, first = (builder.add(place, builder.mul(last, _I64(size))) for place, size in ((dst, 2), (src, 2 * step)))
    some(builder.sub(to, _I64(2 * PICKED)), builder.sub(first, _I64(2 * PICKED * step)))
    simd.store(builder, simd.load(builder, first, _I16, 2), to, 2)


PICKED = 16
"""Values that are picked at a time."""

_pick2, _pick3, _pick4, _pick6 = (emitted(partial(_pick, step)) for step in (2, 3, 4, 6))

_PAIR = 64  # bytes of a pair of pixels of 16 channels


def _interleave(channels: int, builder: Any, *values: Any) -> None:
    """Interleave adjacent channels of `count` (at least 1) pairs of pixels as [channel][2].

    Arguments: destination, its byte step, source, its byte step, bytes from a pixel to the next, count.
    """
    dst, dst_step, src, src_step, pixel, count = values
    kind = ir.VectorType(_I16, channels)
    order = ir.Constant(ir.VectorType(_I32, 2 * channels), [c + p * channels for c in range(channels) for p in (0, 1)])

    def body(carried: list[Any]) -> list[Any]:
        to, first = carried
        pixels = (simd.load(builder, place, kind, 2) for place in (first, builder.add(first, pixel)))
        simd.store(builder, builder.shuffle_vector(*pixels, order), to, 2)
        return [builder.add(to, dst_step), builder.add(first, src_step)]

    simd.loop(builder, count, [dst, src], body, "interleave")


def _copy(width: int, builder: Any, dst: Any, src: Any, count: Any) -> None:
    """Copy `count` (at least `width`) adjacent values; the last ones overlap."""
    kind = ir.VectorType(_I16, width)

    def body(carried: list[Any]) -> list[Any]:
        simd.store(builder, simd.load(builder, carried[1], kind, 2), carried[0], 2)
        return [builder.add(place, _I64(2 * width)) for place in carried]

    simd.loop(builder, builder.udiv(count, _I64(width)), [dst, src], body, "copy")
    last = builder.mul(builder.sub(count, _I64(width)), _I64(2))
    body([builder.add(place, last) for place in (dst, src)])


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


SPREAD = 32
"""Values that are spread at a time, zeros included."""

_interleave16, _interleave8 = (emitted(partial(_interleave, channels)) for channels in (16, 8))
_copy16, _copy8 = (emitted(partial(_copy, width)) for width in (16, 8))
spread1, spread3 = (emitted(partial(_spread, channels)) for channels in (1, 3))


@emitted
def _pairs_apart(builder: Any, dst: Any, src: Any, pixel: Any, channel: Any, valid: Any, count: Any) -> None:
    """Bring `count` (at least 1) pairs of pixels of `valid` channels that lie anywhere; other channels become zero.

    Each value is read with the aligned 32 bits that it is in, which no page ends in.
    """

    longs, ints = ir.VectorType(_I64, 16), ir.VectorType(_I32, 16)
    mask = below(builder, valid)
    offsets = builder.mul(simd.splat(builder, channel, 16), ir.Constant(longs, list(range(16))))
    zero = ir.Constant(ints, [0] * 16)

    def read(place: Any) -> Any:
        places = builder.add(offsets, simd.splat(builder, place, 16))
        words = builder.and_(places, ir.Constant(longs, [~3] * 16))
        pointers = builder.inttoptr(words, ir.VectorType(_I32.as_pointer(), 16))
        found = simd.call(builder, "llvm.masked.gather.v16i32.v16p0", ints, pointers, _I32(4), mask, zero)
        odd = builder.trunc(builder.and_(places, ir.Constant(longs, [2] * 16)), ints)
        return builder.lshr(found, builder.shl(odd, ir.Constant(ints, [3] * 16)))

    def body(carried: list[Any]) -> list[Any]:
        to, first = carried
        even = builder.and_(read(first), ir.Constant(ints, [0xFFFF] * 16))
        odd = builder.shl(read(builder.add(first, pixel)), ir.Constant(ints, [16] * 16))
        simd.store(builder, builder.or_(even, odd), to, 2)
        return [builder.add(to, _I64(_PAIR)), builder.add(first, builder.mul(pixel, _I64(2)))]

    simd.loop(builder, count, [dst, src], body, "apart")


@emitted
def split_f16(builder: Any, place: Any, rest: Any, count: Any) -> None:
    """Turn `count` (at least 1) times 32 f16 into their first 8 digits, in place, and the others into bf16 at `rest`.

    Both are exact: 11 digits are 8 and 3. Where a first part is Inf or NaN, the value was one of them.
    """

    ints, floats = ir.VectorType(_I32, 16), ir.VectorType(ir.FloatType(), 16)

    def upper(bits: Any) -> Any:
        return builder.trunc(builder.lshr(bits, ir.Constant(ints, [16] * 16)), _SIXTEEN)

    def body(carried: list[Any]) -> list[Any]:
        for half in (0, 32):
            place, rest = (builder.add(to, _I64(half)) for to in carried)
            value = simd.widen(builder, simd.load(builder, place, _SIXTEEN, 2), "f16")
            first = builder.and_(builder.bitcast(value, ints), ir.Constant(ints, [0xFFFF0000] * 16))
            left = builder.fsub(value, builder.bitcast(first, floats))
            simd.store(builder, upper(first), place, 2)
            simd.store(builder, upper(builder.bitcast(left, ints)), rest, 2)
        return [builder.add(to, _I64(64)) for to in carried]

    simd.loop(builder, count, [place, rest], body, "split")


@jit
def pack_line(channels: int, dst: int, plane: int, pixels: Pixels) -> None:
    """Move one line of pixels into each channel's plane."""
    src, pixel, channel, run = pixels
    done = 0
    if channel == 2 and channels >= 8:
        while run - done >= 8:
            c = 0
            while c < channels:
                c = min(c, channels - 8)
                transpose16(dst + c * plane + 2 * done, plane, src + 2 * c + done * pixel, pixel)
                c += 8
            done += 8
    elif pixel == 2 and run >= 8:
        for c in range(channels):
            if run >= 16:
                _copy16(dst + c * plane, src + c * channel, run)
            else:
                _copy8(dst + c * plane, src + c * channel, run)
        done = run
    elif run > PICKED and (pixel == 4 or pixel == 6 or pixel == 8 or pixel == 12):
        for c in range(channels):
            to, first = dst + c * plane, src + c * channel
            if pixel == 4:
                _pick2(to, first, run)
            elif pixel == 6:
                _pick3(to, first, run)
            elif pixel == 8:
                _pick4(to, first, run)
            else:
                _pick6(to, first, run)
        done = run
    if done < run:
        for c in range(channels):
            move16(dst + c * plane + 2 * done, 2, src + c * channel + done * pixel, pixel, run - done)


@jit
def _pack_pixel(valid: int, panel: int, position: int, src: int, channel: int) -> None:
    """Move one pixel's channels into their half of a pair."""
    move16(panel + position // 2 * _PAIR + position % 2 * 2, 4, src, channel, valid)


@jit
def pack_line_pairs(channels: int, panel: int, block: int, position: int, pixels: Pixels) -> None:
    """Move one line of pixels into the panels of 16 channels each, `block` bytes apart, from a position on."""
    src, pixel, channel, run = pixels
    odd = min(position % 2, run)
    pairs, whole, first = (run - odd) // 2, channels // 16, 0
    if channel == 2 and whole > 1:  # in the order of memory
        for pair in range(pairs):
            _interleave16(
                panel + ((position + 1) // 2 + pair) * _PAIR, block, src + (odd + 2 * pair) * pixel, 32, pixel, whole
            )
        first = 16 * whole if odd == 0 and run % 2 == 0 else 0
    for base in range(first, channels, 16):
        valid, to, start = min(16, channels - base), panel + base // 16 * block, src + base * channel
        if odd == 1:
            _pack_pixel(valid, to, position, start, channel)
            start += pixel
        here, done = to + (position + odd) // 2 * _PAIR, 0
        if channel == 2 and valid >= 8 and pairs > 0:
            if valid < 16:
                last = 2 * (valid - 8)
                _interleave8(here, _PAIR, start, 2 * pixel, pixel, pairs)
                _interleave8(here + 2 * last, _PAIR, start + last, 2 * pixel, pixel, pairs)
            elif whole == 1:
                _interleave16(here, _PAIR, start, 2 * pixel, pixel, pairs)
            done = 2 * pairs
        elif pixel == 2 and pairs >= 4:
            last = pairs - (8 if pairs >= 8 else 4)
            for half in range(0, valid, 8):
                rows, lanes, most = start + half * channel, here + 4 * half, min(7, valid - half - 1)
                if pairs >= 8:
                    transpose_panel(F32, lanes, _PAIR, rows, pairs // 8, channel, most)
                    if pairs % 8 > 0:
                        transpose_panel(F32, lanes + last * _PAIR, _PAIR, rows + 4 * last, 1, channel, most)
                else:
                    _four_pairs(lanes, _PAIR, rows, channel, most)
                    _four_pairs(lanes + last * _PAIR, _PAIR, rows + 4 * last, channel, most)
            done = 2 * pairs
        elif pairs > 0:
            _pairs_apart(here, start, pixel, channel, valid, pairs)
            done = 2 * pairs
        for x in range(done, run - odd):
            _pack_pixel(valid, to, position + odd + x, start + x * pixel, channel)
