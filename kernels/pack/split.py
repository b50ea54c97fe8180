"""Packing of f32 for products of bf16: each value as three bf16, in three planes or three panels of pairs.

The first holds a value's first 8 binary digits, the second the nearest to what is left, the third the rest of that:
their sum is the value, but for digits below 2**-133, the smallest bf16. A value with such digits has a third part that
is not zero, so that its magnitude shows them. Of the nine products of two values' parts, six are kept
(`kernels.emit.dots`). Wherever a product of two f32 fits f32, what is left out is zero: if one value has a third part,
its digits span more than 16, and if the other has a second one, its digits span more than 8.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir

from kernels.blocks import STEPS
from kernels.emit import simd
from kernels.emit.compiler import emitted, jit, together
from kernels.emit.intrinsics import F32, transpose_panel

__all__ = ["SPLIT_BYTES", "Pixels", "below", "split_line", "split_line_pairs", "touch"]

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTS, _LONGS, _FLOATS = (ir.VectorType(kind, 16) for kind in (_I32, _I64, _F32))
_HALVES = ir.VectorType(_I16, 32)
_SOME_HALVES = ir.VectorType(ir.IntType(1), 32)

SPLIT_BYTES = 2048
"""Scratch of one call: 32 pixels of 16 channels."""

_CHUNK, AHEAD = 32, STEPS.ahead_bytes

_PAIR = 64  # bytes of a pair of pixels of 16 channels


def _upper(value: int) -> Any:
    return ir.Constant(_INTS, [value] * 16)


def below(builder: Any, count: Any) -> Any:
    """Mask the first `count` of 16 lanes."""
    return builder.icmp_signed("<", ir.Constant(_LONGS, list(range(16))), simd.splat(builder, count, 16))


def _read(builder: Any, address: Any, step: Any, mask: Any) -> Any:
    """Load 16 f32 that lie `step` bytes apart (None: side by side), zeros where the mask is unset: nothing is read."""
    zero = ir.Constant(_FLOATS, [0.0] * 16)
    if step is None:
        pointer = builder.inttoptr(address, _FLOATS.as_pointer())
        return simd.call(builder, "llvm.masked.load.v16f32.p0", _FLOATS, pointer, _I32(4), mask, zero)
    offsets = builder.mul(simd.splat(builder, step, 16), ir.Constant(_LONGS, list(range(16))))
    places = builder.add(offsets, simd.splat(builder, address, 16))
    pointers = builder.inttoptr(places, ir.VectorType(_F32.as_pointer(), 16))
    return simd.call(builder, "llvm.masked.gather.v16f32.v16p0", _FLOATS, pointers, _I32(4), mask, zero)


def _write(builder: Any, value: Any, address: Any, mask: Any) -> None:
    """Store those of 16 or 32 halves that the mask names."""
    pointer = builder.inttoptr(address, value.type.as_pointer())
    name = f"llvm.masked.store.v{value.type.count}i16.p0"
    simd.call(builder, name, ir.VoidType(), value, pointer, _I32(2), mask)


def _parts(builder: Any, value: Any) -> list[Any]:
    """Return 16 f32 as three vectors whose upper halves are bf16; Inf has no rest, that of NaN is NaN."""
    whole = builder.bitcast(value, _INTS)
    first = builder.and_(whole, _upper(0xFFFF0000))
    known = builder.bitcast(first, _FLOATS)
    rest = builder.select(
        builder.fcmp_ordered("==", value, known), ir.Constant(_FLOATS, [0.0] * 16), builder.fsub(value, known)
    )
    near = builder.add(builder.bitcast(rest, _INTS), _upper(0x8000))
    second = builder.and_(near, _upper(0xFFFF0000))
    third = builder.bitcast(builder.fsub(rest, builder.bitcast(second, _FLOATS)), _INTS)
    digits = builder.add(builder.and_(third, _upper(0xFFFF)), _upper(0xFFFF))  # those below 2**-133 carry into bit 16
    return [first, second, builder.or_(third, digits)]


def _split(strided: bool, builder: Any, *values: Any) -> None:
    """Split a run of `count` (at least 1) pixels, `step` bytes apart, into parts of a plane.

    Arguments: destination, bytes to its next part, source, step, count.
    """
    dst, part, src, step, count = values
    size = step if strided else _I64(4)
    odd = ir.Constant(ir.VectorType(_I32, 32), list(range(1, 64, 2)))

    def half(origin: Any, left: Any, number: int) -> tuple[list[Any], Any]:
        mask = below(builder, builder.sub(left, _I64(16 * number)))
        start = builder.add(origin, builder.mul(size, _I64(16 * number)))
        return _parts(builder, _read(builder, start, step if strided else None, mask)), mask

    def move(to: Any, origin: Any, left: Any) -> None:
        (lows, low_mask), (highs, high_mask) = (half(origin, left, number) for number in range(2))
        every = ir.Constant(ir.VectorType(_I32, 32), list(range(32)))
        mask = builder.shuffle_vector(low_mask, high_mask, every)
        for number, (low, high) in enumerate(zip(lows, highs, strict=True)):
            both = builder.shuffle_vector(builder.bitcast(low, _HALVES), builder.bitcast(high, _HALVES), odd)
            _write(builder, both, builder.add(to, builder.mul(part, _I64(number))), mask)

    def move_few(to: Any, origin: Any, left: Any) -> None:
        values, mask = half(origin, left, 0)
        for number, value in enumerate(values):
            few = builder.trunc(builder.lshr(value, _upper(16)), ir.VectorType(_I16, 16))
            _write(builder, few, builder.add(to, builder.mul(part, _I64(number))), mask)

    def body(carried: list[Any]) -> list[Any]:
        to, origin = carried
        if not strided:
            for line in (0, 64):
                simd.prefetch(builder, builder.add(origin, _I64(AHEAD + line)))
        move(to, origin, _I64(32))
        return [builder.add(to, _I64(64)), builder.add(origin, builder.mul(size, _I64(32)))]

    simd.some(builder, builder.lshr(count, _I64(5)), [dst, src], body, "split")
    left = builder.and_(count, _I64(31))
    done = builder.sub(count, left)
    rest = builder.add(dst, builder.mul(done, _I64(2))), builder.add(src, builder.mul(done, size)), left
    with builder.if_then(builder.icmp_signed(">", left, _I64(16))):
        move(*rest)
    with builder.if_then(builder.icmp_unsigned("<=", builder.sub(left, _I64(1)), _I64(15))):
        move_few(*rest)


def _split_pairs(strided: bool, builder: Any, *values: Any) -> None:
    """Split `count` (at least 1) pairs of pixels of 16 channels into parts of a panel.

    Arguments: destination, its byte step, bytes to its next part, source, its byte step, bytes from a pixel to the
    next, bytes from a channel to the next, channels (at most 16), which pixels of a pair there are (bits 1 and 2), and
    count. Nothing is written in the place of a pixel that there is not.
    """
    dst, dst_step, part, src, src_step, pixel, channel, valid, which, count = values
    step = channel if strided else None
    masks, write = [], _I32(0)
    for bit, lanes in ((1, 0x55555555), (2, 0xAAAAAAAA)):
        there = builder.icmp_unsigned("!=", builder.and_(which, _I64(bit)), _I64(0))
        masks.append(below(builder, builder.select(there, valid, _I64(0))))
        write = builder.or_(write, builder.select(there, _I32(lanes), _I32(0)))
    mask = builder.bitcast(write, _SOME_HALVES)

    def body(carried: list[Any]) -> list[Any]:
        to, first = carried
        if not strided:
            simd.prefetch(builder, builder.add(first, _I64(AHEAD)))
            simd.prefetch(builder, builder.add(builder.add(first, pixel), _I64(AHEAD)))
        even, odd = (
            _parts(builder, _read(builder, place, step, some))
            for place, some in zip((first, builder.add(first, pixel)), masks, strict=True)
        )
        for number, (low, high) in enumerate(zip(even, odd, strict=True)):
            pair = builder.or_(builder.lshr(low, _upper(16)), builder.and_(high, _upper(0xFFFF0000)))
            place = builder.add(to, builder.mul(part, _I64(number)))
            _write(builder, builder.bitcast(pair, _HALVES), place, mask)
        return [builder.add(to, dst_step), builder.add(first, src_step)]

    simd.loop(builder, count, [dst, src], body, "split")


@together
class Pixels(NamedTuple):
    """A run of pixels of a tensor, from the address of the first one on: bytes to the next, and between channels."""

    place: int
    step: int
    channel: int
    run: int


_split_run, _split_strided = (emitted(partial(_split, strided)) for strided in (False, True))
_split_adjacent, _split_apart = (emitted(partial(_split_pairs, strided)) for strided in (False, True))


@emitted
def touch(builder: Any, address: Any) -> None:
    """Ask for a line of memory."""

    simd.prefetch(builder, address)


@jit
def split_line(channels: int, dst: int, plane: int, part: int, src: Pixels, scratch: int) -> None:
    """Split one line of pixels into each channel's planes, `part` bytes apart; the rest is as for 16 bits."""
    if src.channel == 4 and channels >= 8 and src.step != 4:
        for done in range(0, src.run, _CHUNK):
            some = min(_CHUNK, src.run - done)
            c = 0
            while c < channels:
                c = min(c, channels - 8)
                here = src.place + 4 * c + done * src.step
                for x in range(some):
                    touch(here + (x + _CHUNK) * src.step)
                count = 2 if channels - c >= 16 else 1
                for x in range(0, some, 8):
                    last = min(7, some - x - 1)
                    transpose_panel(F32, scratch + 4 * x, 4 * _CHUNK, here + x * src.step, count, src.step, last)
                for row in range(8 * count):
                    _split_run(dst + (c + row) * plane + 2 * done, part, scratch + 4 * _CHUNK * row, 4, some)
                c += 8 * count
    elif src.step == 4:
        for c in range(channels):
            _split_run(dst + c * plane, part, src.place + c * src.channel, 4, src.run)
    else:
        for c in range(channels):
            _split_strided(dst + c * plane, part, src.place + c * src.channel, src.step, src.run)


@jit
def _split_some_pairs(channels: int, panel: int, block: int, part: int, position: int, src: Pixels) -> None:
    """Split pixels into pairs, from a position that may be odd on, in the order of memory where it is of channels."""
    pixel, channel, odd = src.step, src.channel, position % 2
    if odd == 1:
        for c in range(0, channels, 16):
            # the pixel before it is in the pair but not in the line
            _split_apart(
                panel + c // 16 * block + position // 2 * _PAIR, 0, part, src.place + c * channel - pixel, 0, pixel,
                channel, min(16, channels - c), 2, 1,
            )  # fmt: skip
    pairs, whole = (src.run - odd) // 2, channels // 16 if channel == 4 else 0
    first, start = (position + odd) // 2, src.place + odd * pixel
    for pair in range(pairs if whole > 0 else 0):
        _split_adjacent(
            panel + (first + pair) * _PAIR, block, part, start + 2 * pair * pixel, _PAIR, pixel, 4, 16, 3, whole
        )
    for c in range(16 * whole, channels if pairs > 0 else 0, 16):
        to, here, valid = panel + c // 16 * block + first * _PAIR, start + c * channel, min(16, channels - c)
        if channel == 4:
            _split_adjacent(to, _PAIR, part, here, 2 * pixel, pixel, 4, valid, 3, pairs)
        else:
            _split_apart(to, _PAIR, part, here, 2 * pixel, pixel, channel, valid, 3, pairs)
    if odd + 2 * pairs < src.run:
        for c in range(0, channels, 16):
            _split_apart(
                panel + c // 16 * block + (first + pairs) * _PAIR, 0, part, start + 2 * pairs * pixel + c * channel, 0,
                pixel, channel, min(16, channels - c), 1, 1,
            )  # fmt: skip


@jit
def split_line_pairs(
    channels: int, panel: int, block: int, part: int, position: int, src: Pixels, scratch: int
) -> None:
    """Split one line of pixels into the panels of 16 channels each, `part` bytes apart; the rest is as for 16 bits."""
    if src.channel == 4 or src.step != 4 or src.run < 8:
        _split_some_pairs(channels, panel, block, part, position, src)
        return
    for c in range(0, channels, 16):
        valid, done = min(16, channels - c), 0
        while done < src.run:
            some = min(_CHUNK, src.run - done)
            if some < 8:  # whole blocks of pixels are read, so the last one reaches back
                done, some = src.run - 8, 8
            for row in range(valid):
                ahead = src.place + (c + row) * src.channel + 4 * done + AHEAD
                touch(ahead)
                touch(ahead + 64)
            for half in range(0, valid, 8):
                start, last = src.place + (c + half) * src.channel + 4 * done, min(7, valid - half - 1)
                transpose_panel(F32, scratch + 4 * half, _PAIR, start, some // 8, src.channel, last)
                if some % 8 > 0:
                    at = some - 8
                    transpose_panel(F32, scratch + 4 * half + _PAIR * at, _PAIR, start + 4 * at, 1, src.channel, last)
            turned = Pixels(scratch, _PAIR, 4, some)
            _split_some_pairs(valid, panel + c // 16 * block, block, part, position + done, turned)
            done += some
