"""Packing of lines of pixels for products of bf16 pairs: from tensors in any layout to channel planes, or to panels.

A plane holds one channel's pixels one after the other, a panel 16 channels' pixels two by two, [pair][channel][2];
lines are a common pitch apart, zeros between them. Values have a width in bytes. Those of 2 are moved as they are; f16
is then split into two bf16 whose sum it is. An f32 becomes three bf16 on its way, in three planes or panels.

Of these the first holds a value's first 8 binary digits, the second the nearest to what is left, the third the rest of
that: their sum is the value, but for digits below 2**-133, the smallest bf16. A value with such digits has a third part
that is not zero, so that its magnitude shows them. Of the nine products of two values' parts, six are kept
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
from kernels.emit.intrinsics import F32, touch, transpose_panel

__all__ = ["SPLIT_BYTES", "SPREAD", "Pixels", "move16", "pack_line", "pack_line_pairs", "split_f16", "spread1",
           "spread3", "transpose16"]  # fmt: skip

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_EIGHT, _SIXTEEN = ir.VectorType(_I16, 8), ir.VectorType(_I16, 16)
_INTS, _LONGS, _FLOATS = (ir.VectorType(kind, 16) for kind in (_I32, _I64, _F32))
_HALVES = ir.VectorType(_I16, 32)
_SOME_HALVES = ir.VectorType(ir.IntType(1), 32)
_TWO_BY_TWO = ir.Constant(ir.VectorType(_I32, 32), [lane + 16 * half for lane in range(16) for half in (0, 1)])

SPLIT_BYTES = 2048
"""Scratch of one call: 32 pixels of 16 channels."""

_CHUNK, AHEAD = 32, STEPS.ahead_bytes

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


def _upper(value: int) -> Any:
    return ir.Constant(_INTS, [value] * 16)


def _below(builder: Any, count: Any) -> Any:
    """Mask the first `count` of 16 lanes."""
    return builder.icmp_signed("<", ir.Constant(_LONGS, list(range(16))), simd.splat(builder, count, 16))


def _load(builder: Any, width: int, address: Any, mask: Any) -> Any:
    """Load 16 adjacent values, zeros where the mask is unset."""
    kind = _INTS if width == 4 else _SIXTEEN
    pointer, name = builder.inttoptr(address, kind.as_pointer()), f"llvm.masked.load.v16i{8 * width}.p0"
    return simd.call(builder, name, kind, pointer, _I32(width), mask, ir.Constant(kind, [0] * 16))


def _read(builder: Any, width: int, address: Any, step: Any, mask: Any) -> list[Any]:
    """Load the parts of 16 values that lie `step` bytes apart (None: side by side), as bf16 in upper halves.

    They are zeros where the mask is unset: nothing is read there. Halves that are not side by side are read with the
    aligned 32 bits that they are in, which no page ends in.
    """
    if step is None:
        found = _load(builder, width, address, mask)
        return _parts(builder, found) if width == 4 else [builder.shl(builder.zext(found, _INTS), _upper(16))]
    offsets = builder.mul(simd.splat(builder, step, 16), ir.Constant(_LONGS, list(range(16))))
    places = builder.add(offsets, simd.splat(builder, address, 16))
    words = places if width == 4 else builder.and_(places, ir.Constant(_LONGS, [~3] * 16))
    pointers = builder.inttoptr(words, ir.VectorType(_I32.as_pointer(), 16))
    found = simd.call(builder, "llvm.masked.gather.v16i32.v16p0", _INTS, pointers, _I32(4), mask, _upper(0))
    if width == 4:
        return _parts(builder, found)
    second = builder.trunc(builder.and_(places, ir.Constant(_LONGS, [2] * 16)), _INTS)
    shift = builder.sub(_upper(16), builder.shl(second, _upper(3)))
    return [builder.and_(builder.shl(found, shift), _upper(0xFFFF0000))]


def _parts(builder: Any, whole: Any) -> list[Any]:
    """Return the bits of 16 f32 as three vectors whose upper halves are bf16; Inf has no rest, that of NaN is NaN."""
    value, first = builder.bitcast(whole, _FLOATS), builder.and_(whole, _upper(0xFFFF0000))
    known = builder.bitcast(first, _FLOATS)
    rest = builder.select(
        builder.fcmp_ordered("==", value, known), ir.Constant(_FLOATS, [0.0] * 16), builder.fsub(value, known)
    )
    near = builder.add(builder.bitcast(rest, _INTS), _upper(0x8000))
    second = builder.and_(near, _upper(0xFFFF0000))
    third = builder.bitcast(builder.fsub(rest, builder.bitcast(second, _FLOATS)), _INTS)
    digits = builder.add(builder.and_(third, _upper(0xFFFF)), _upper(0xFFFF))  # those below 2**-133 carry into bit 16
    return [first, second, builder.or_(third, digits)]


def _write(builder: Any, value: Any, address: Any, mask: Any) -> None:
    """Store those of 16 or 32 halves that the mask names."""
    pointer = builder.inttoptr(address, value.type.as_pointer())
    name = f"llvm.masked.store.v{value.type.count}i16.p0"
    simd.call(builder, name, ir.VoidType(), value, pointer, _I32(2), mask)


def _run(width: int, strided: bool, builder: Any, *values: Any) -> None:
    """Pack a run of `count` (at least 1) pixels, `step` bytes apart, into a plane.

    Arguments: destination, bytes to its next part, source, step, count.
    """
    dst, part, src, step, count = values
    size = step if strided else _I64(width)
    upper = ir.Constant(ir.VectorType(_I32, 32), list(range(1, 64, 2)))

    def half(origin: Any, left: Any, number: int) -> tuple[list[Any], Any]:
        mask = _below(builder, builder.sub(left, _I64(16 * number)))
        start = builder.add(origin, builder.mul(size, _I64(16 * number)))
        return _read(builder, width, start, step if strided else None, mask), mask

    def move(to: Any, origin: Any, left: Any) -> None:
        (lows, low_mask), (highs, high_mask) = (half(origin, left, number) for number in range(2))
        every = ir.Constant(ir.VectorType(_I32, 32), list(range(32)))
        mask = builder.shuffle_vector(low_mask, high_mask, every)
        for number, (low, high) in enumerate(zip(lows, highs, strict=True)):
            both = builder.shuffle_vector(builder.bitcast(low, _HALVES), builder.bitcast(high, _HALVES), upper)
            _write(builder, both, builder.add(to, builder.mul(part, _I64(number))), mask)

    def move_few(to: Any, origin: Any, left: Any) -> None:
        values, mask = half(origin, left, 0)
        for number, value in enumerate(values):
            few = builder.trunc(builder.lshr(value, _upper(16)), _SIXTEEN)
            _write(builder, few, builder.add(to, builder.mul(part, _I64(number))), mask)

    def body(carried: list[Any]) -> list[Any]:
        to, origin = carried
        if not strided:
            for line in range(0, 32 * width, 64):
                simd.prefetch(builder, builder.add(origin, _I64(AHEAD + line)))
        move(to, origin, _I64(32))
        return [builder.add(to, _I64(64)), builder.add(origin, builder.mul(size, _I64(32)))]

    simd.some(builder, builder.lshr(count, _I64(5)), [dst, src], body, "run")
    left = builder.and_(count, _I64(31))
    done = builder.sub(count, left)
    rest = builder.add(dst, builder.mul(done, _I64(2))), builder.add(src, builder.mul(done, size)), left
    with builder.if_then(builder.icmp_signed(">", left, _I64(16))):
        move(*rest)
    with builder.if_then(builder.icmp_unsigned("<=", builder.sub(left, _I64(1)), _I64(15))):
        move_few(*rest)


def _pairs(width: int, strided: bool, builder: Any, *values: Any) -> None:
    """Pack `count` (at least 1) pairs of pixels of 16 channels into a panel.

    Arguments: destination, its byte step, bytes to its next part, source, its byte step, bytes from a pixel to the
    next, bytes from a channel to the next, channels (at most 16), which pixels of a pair there are (bits 1 and 2), and
    count. Nothing is written in the place of a pixel that there is not.
    """
    dst, dst_step, part, src, src_step, pixel, channel, valid, which, count = values
    step = channel if strided else None
    masks, write = [], _I32(0)
    for bit, lanes in ((1, 0x55555555), (2, 0xAAAAAAAA)):
        there = builder.icmp_unsigned("!=", builder.and_(which, _I64(bit)), _I64(0))
        masks.append(_below(builder, builder.select(there, valid, _I64(0))))
        write = builder.or_(write, builder.select(there, _I32(lanes), _I32(0)))
    mask = builder.bitcast(write, _SOME_HALVES)

    def body(carried: list[Any]) -> list[Any]:
        to, first = carried
        if not strided and width == 4:
            simd.prefetch(builder, builder.add(first, _I64(AHEAD)))
            simd.prefetch(builder, builder.add(builder.add(first, pixel), _I64(AHEAD)))
        places = first, builder.add(first, pixel)
        if width == 2 and not strided:
            halves = [_load(builder, 2, place, some) for place, some in zip(places, masks, strict=True)]
            _write(builder, builder.shuffle_vector(*halves, _TWO_BY_TWO), to, mask)
        else:
            parts = [_read(builder, width, place, step, some) for place, some in zip(places, masks, strict=True)]
            for number, (low, high) in enumerate(zip(*parts, strict=True)):
                pair = builder.or_(builder.lshr(low, _upper(16)), builder.and_(high, _upper(0xFFFF0000)))
                place = builder.add(to, builder.mul(part, _I64(number)))
                _write(builder, builder.bitcast(pair, _HALVES), place, mask)
        return [builder.add(to, dst_step), builder.add(first, src_step)]

    simd.loop(builder, count, [dst, src], body, "pairs")


_run2, _run4, _strided4 = (
    emitted(partial(_run, width, strided)) for width, strided in ((2, False), (4, False), (4, True))
)
_adjacent_pairs2, _strided_pairs2, _adjacent_pairs4, _strided_pairs4 = (
    emitted(partial(_pairs, width, strided)) for width in (2, 4) for strided in (False, True)
)


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

spread1, spread3 = (emitted(partial(_spread, channels)) for channels in (1, 3))


@emitted
def split_f16(builder: Any, place: Any, rest: Any, count: Any) -> None:
    """Turn `count` (at least 1) times 32 f16 into their first 8 digits, in place, and the others into bf16 at `rest`.

    Both are exact: 11 digits are 8 and 3. Where a first part is Inf or NaN, the value was one of them.
    """

    def upper(bits: Any) -> Any:
        return builder.trunc(builder.lshr(bits, _upper(16)), _SIXTEEN)

    def body(carried: list[Any]) -> list[Any]:
        for half in (0, 32):
            place, rest = (builder.add(to, _I64(half)) for to in carried)
            value = simd.widen(builder, simd.load(builder, place, _SIXTEEN, 2), "f16")
            first = builder.and_(builder.bitcast(value, _INTS), _upper(0xFFFF0000))
            left = builder.fsub(value, builder.bitcast(first, _FLOATS))
            simd.store(builder, upper(first), place, 2)
            simd.store(builder, upper(builder.bitcast(left, _INTS)), rest, 2)
        return [builder.add(to, _I64(64)) for to in carried]

    simd.loop(builder, count, [place, rest], body, "split")


@jit
def pack_line(width: int, channels: int, dst: int, plane: int, part: int, src: Pixels, scratch: int) -> None:
    """Pack one line of pixels into each channel's planes, `part` bytes apart; adjacent channels are transposed."""
    place, pixel, channel, run = src
    done, transposed = 0, channel == width and channels >= 8 and pixel != width
    while transposed and width == 4 and done < run:
        some, c = min(_CHUNK, run - done), 0
        while c < channels:
            c = min(c, channels - 8)
            here = place + 4 * c + done * pixel
            for x in range(some):
                touch(here + (x + _CHUNK) * pixel)
            count = 2 if channels - c >= 16 else 1
            for x in range(0, some, 8):
                last = min(7, some - x - 1)
                transpose_panel(F32, scratch + 4 * x, 4 * _CHUNK, here + x * pixel, count, pixel, last)
            for row in range(8 * count):
                _run4(dst + (c + row) * plane + 2 * done, part, scratch + 4 * _CHUNK * row, 4, some)
            c += 8 * count
        done += some
    while transposed and width == 2 and run - done >= 8:
        c = 0
        while c < channels:
            c = min(c, channels - 8)
            transpose16(dst + c * plane + 2 * done, plane, place + 2 * c + done * pixel, pixel)
            c += 8
        done += 8
    left = run - done
    for c in range(channels if left > 0 else 0):
        to, here = dst + c * plane + 2 * done, place + c * channel + done * pixel
        if width == 2 and pixel != 2:
            move16(to, 2, here, pixel, left)
        elif width == 2:
            _run2(to, part, here, 2, left)
        elif pixel == 4:
            _run4(to, part, here, 4, left)
        else:
            _strided4(to, part, here, pixel, left)


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
def _pack_pixel(width: int, channels: int, panel: int, block: int, part: int, position: int, src: Pixels) -> None:
    """Pack the first of some pixels into its half of a pair: the other half is not the line's."""
    second = position % 2
    for c in range(0, channels, 16):
        to, place = panel + c // 16 * block + position // 2 * _PAIR, src.place + c * src.channel - second * src.step
        valid = min(16, channels - c)
        if width == 4:
            _strided_pairs4(to, 0, part, place, 0, src.step, src.channel, valid, 1 + second, 1)
        elif src.channel == 2:
            _adjacent_pairs2(to, 0, part, place, 0, src.step, 2, valid, 1 + second, 1)
        else:
            move16(to + 2 * second, 4, src.place + c * src.channel, src.channel, valid)


@jit
def _pack_pairs(width: int, channels: int, panel: int, block: int, part: int, position: int, src: Pixels) -> None:
    """Pack pixels two by two, from a position that may be odd on, in the order of memory where it is of channels."""
    place, pixel, channel, run = src
    odd, adjacent = position % 2, channel == width
    if odd == 1:
        _pack_pixel(width, channels, panel, block, part, position, src)
    pairs, whole = (run - odd) // 2, channels // 16 if adjacent and channels >= 32 else 0
    first, start = panel + (position + odd) // 2 * _PAIR, place + odd * pixel
    for pair in range(pairs if whole > 0 else 0):
        to, here = first + pair * _PAIR, start + 2 * pair * pixel
        if width == 4:
            _adjacent_pairs4(to, block, part, here, 64, pixel, 4, 16, 3, whole)
        else:
            _adjacent_pairs2(to, block, part, here, 32, pixel, 2, 16, 3, whole)
    for c in range(16 * whole, channels if pairs > 0 else 0, 16):
        to, here, valid = first + c // 16 * block, start + c * channel, min(16, channels - c)
        if width == 4 and adjacent:
            _adjacent_pairs4(to, _PAIR, part, here, 2 * pixel, pixel, 4, valid, 3, pairs)
        elif width == 4:
            _strided_pairs4(to, _PAIR, part, here, 2 * pixel, pixel, channel, valid, 3, pairs)
        elif adjacent:
            _adjacent_pairs2(to, _PAIR, part, here, 2 * pixel, pixel, 2, valid, 3, pairs)
        elif pixel == 2 and pairs >= 4:
            _transpose_pairs(to, here, channel, valid, pairs)
        else:
            _strided_pairs2(to, _PAIR, part, here, 2 * pixel, pixel, channel, valid, 3, pairs)
    done = odd + 2 * pairs
    if done < run:
        rest = Pixels(place + done * pixel, pixel, channel, 1)
        _pack_pixel(width, channels, panel, block, part, position + done, rest)


@jit
def pack_line_pairs(
    width: int, channels: int, panel: int, block: int, part: int, position: int, src: Pixels, scratch: int
) -> None:
    """Pack one line of pixels into the panels of 16 channels each, `block` bytes apart, from a position on.

    Panels of the next part are `part` bytes on. Channels whose pixels are adjacent f32 are transposed first.
    """
    if width == 2 or src.channel == 4 or src.step != 4 or src.run < 8:
        _pack_pairs(width, channels, panel, block, part, position, src)
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
            transposed = Pixels(scratch, _PAIR, 4, some)
            _pack_pairs(4, valid, panel + c // 16 * block, block, part, position + done, transposed)
            done += some
