"""Loads, stores, conversions and transpositions as Numba intrinsics, on the vectors of `kernels.emit.simd`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from kernels.dtypes import DTYPES, KINDS
from kernels.emit import simd
from kernels.emit.compiler import emitted

__all__ = [
    "F32", "PICKED", "add_run", "address_of", "by_kind", "call_entry", "copy_bytes", "copy_panel", "fence",
    "fill_zero", "interleave2", "interleave3", "keep_alive", "load", "load_wide", "pick_panel", "put", "put_value",
    "size_of", "stack_array", "stack_record", "store_lines", "store_narrow", "store_value", "stored_size", "touch",
    "touch_all", "transpose_panel", "untranspose",
]  # fmt: skip

F32 = KINDS["f32"]

_typed_intrinsic: Any = intrinsic
"""Numba's decorator takes the typing context away from the parameters, which its type stubs do not know."""


def by_kind(emit: Callable[..., Any], result: Any = types.void) -> Any:
    """Make an intrinsic of ``emit(builder, kind, *values)``, as `emitted` does; its first argument is of `KINDS`.

    There is no case for f64, the last one.
    """

    def choose(builder: Any, number: Any, *values: Any) -> Any:
        def case(kind: str) -> list[Any]:
            value = emit(builder, kind, *values)
            return [] if value is None else [value]

        cases = {place: partial(case, kind) for kind, place in KINDS.items() if kind != "f64"}
        found = simd.switch(builder, number, cases)
        return found[0] if found else None

    return emitted(choose, result)


def size_of(kind: str) -> int:
    """Return the bytes of a stored value."""
    return DTYPES[kind].size


@partial(by_kind, result=types.int64)
def stored_size(builder: Any, kind: str) -> Any:
    """Return the bytes of a stored value, in compiled code."""
    return simd.I64(size_of(kind))


@by_kind
def copy_panel(builder: Any, kind: str, *values: Any) -> None:
    """Copy positions of adjacent channels, converted to f32.

    Arguments: channels, a multiple of 8; where they go, bytes from a position to the next there; where they lie, bytes
    from a position to the next there; positions, at least 1.
    """
    _copy_every(builder, kind, 1, *values)


PICKED = 2, 4, 8
"""Steps of `pick_panel`."""


@by_kind
def pick_panel(builder: Any, kind: str, step: Any, *values: Any) -> None:
    """Copy every second, fourth or eighth channel likewise, as `step` says; the channels between are read, too."""
    simd.switch(builder, step, {each: partial(_copy_every, builder, kind, each, *values) for each in PICKED})


def _copy_every(builder: Any, kind: str, step: int, *values: Any) -> list[Any]:
    lanes, dst, dst_step, src, src_step, count = values
    size, evens = size_of(kind), ir.Constant(ir.VectorType(ir.IntType(32), 8), list(range(0, 16, 2)))

    def some(width: int, origins: list[Any]) -> None:
        def position(places: list[Any]) -> list[Any]:
            to, origin = places
            for j in range(0, width, 8):
                at = [builder.add(origin, simd.I64(size * (j * step + 8 * i))) for i in range(step)]
                vectors = [load_wide(builder, each, kind, 8) for each in at]
                while len(vectors) > 1:
                    pairs = zip(vectors[::2], vectors[1::2], strict=True)
                    vectors = [builder.shuffle_vector(*pair, evens) for pair in pairs]
                simd.store(builder, vectors[0], builder.add(to, simd.I64(4 * j)))
            return [builder.add(to, dst_step), builder.add(origin, src_step)]

        simd.loop(builder, count, origins, position, "copy")

    simd.each_run(builder, lanes, (dst, src), (4, size * step), (16, 8), some)
    return []


def _columns(builder: Any, rows: list[Any]) -> list[Any]:
    """Turn 8 vectors of 8 values into those of their first, second, .. values."""
    index = ir.VectorType(ir.IntType(32), 8)
    for step in (1, 2, 4):  # swap the off-diagonal blocks of size 1, 2, 4
        for i in range(8):
            if i & step:
                continue
            a, b = rows[i], rows[i + step]
            low = [8 + j - step if j & step else j for j in range(8)]
            high = [8 + j if j & step else j + step for j in range(8)]
            rows[i] = builder.shuffle_vector(a, b, ir.Constant(index, low))
            rows[i + step] = builder.shuffle_vector(a, b, ir.Constant(index, high))
    return rows


def _joined(builder: Any, parts: list[Any]) -> Any:
    """Return vectors of a size, a power of two of them, as one."""
    while len(parts) > 1:
        width = 2 * parts[0].type.count
        order = ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(width)))
        parts = [builder.shuffle_vector(low, high, order) for low, high in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _transpose(
    builder: Any, kinds: tuple[str, str], dst: Any, dst_step: Any, src: Any, count: Any, row_step: Any, last: Any
) -> None:
    """Turn 8 rows of `count` blocks of 8 values into rows of 8, converted from the first of two kinds to the other."""
    kind, stored = kinds
    numbers = [builder.select(builder.icmp_signed("<", simd.I64(m), last), simd.I64(m), last) for m in range(8)]
    row_offsets = [builder.mul(number, row_step) for number in numbers]

    def body(carried: list[Any]) -> list[Any]:
        to, origin = carried
        rows = [load_wide(builder, builder.add(origin, offset), kind, 8) for offset in row_offsets]
        for row in _columns(builder, rows):
            store_narrow(builder, row, to, stored)
            to = builder.add(to, dst_step)
        return [to, builder.add(origin, simd.I64(8 * size_of(kind)))]

    simd.loop(builder, count, [dst, src], body, "transpose")


@by_kind
def transpose_panel(builder: Any, kind: str, *values: Any) -> None:
    """Turn 8 channel rows of `count` (at least 1) blocks of 8 pixels into rows of 8 channels, as f32.

    Arguments: destination, its byte step for a pixel, source, count, byte step between channel rows, and the last row
    that exists: it is repeated in place of those past it.
    """
    _transpose(builder, (kind, "f32"), *values)


def _interleave(channels: int, builder: Any, kind: str, *values: Any) -> None:
    """Turn rows of 2 to 4 `channels` of `count` (at least 1) blocks of 8 pixels into pixels that follow each other.

    Arguments: destination, source, count, byte step between channel rows.
    """
    dst, src, count, row_step = values
    order = [8 * c + pixel for pixel in range(8) for c in range(channels)]
    index = ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order)

    def body(carried: list[Any]) -> list[Any]:
        to, origin = carried
        rows = [
            load_wide(builder, simd.nth(builder, origin, row_step, min(c, channels - 1)), kind, 8) for c in range(4)
        ]
        every = _joined(builder, rows)
        pixels = builder.shuffle_vector(every, every, index)
        simd.store(builder, pixels, to)
        return [builder.add(to, simd.I64(4 * len(order))), builder.add(origin, simd.I64(8 * size_of(kind)))]

    simd.loop(builder, count, [dst, src], body, "interleave")


interleave2, interleave3 = (by_kind(partial(_interleave, channels)) for channels in (2, 3))


@by_kind
def untranspose(builder: Any, kind: str, *values: Any) -> None:
    """Do what `transpose_panel` does, from f32 to stored values, rounded once."""
    _transpose(builder, ("f32", kind), *values)


@by_kind
def store_lines(builder: Any, kind: str, streams: Any, *values: Any) -> None:
    """Do what `untranspose` does, for pixels of 8 channels that fill `count` lines of memory of each.

    If they `stream` (not 0), aligned lines go past the caches, and memory is not read for them; a `fence` follows the
    last ones. Other arguments: destination, its byte step for a channel, source, its step for a pixel, count.
    """
    dst, dst_step, src, src_step, count = values
    blocks = 64 // size_of(kind) // 8

    def line(carried: list[Any]) -> list[Any]:
        to, origin = carried
        pixels = [simd.nth(builder, origin, src_step, m) for m in range(8 * blocks)]
        rows = [load_wide(builder, pixel, "f32", 8) for pixel in pixels]
        columns = [_columns(builder, rows[8 * b : 8 * b + 8]) for b in range(blocks)]
        lines = [_joined(builder, list(parts)) for parts in zip(*columns, strict=True)]
        with builder.if_else(builder.icmp_signed("!=", streams, simd.I64(0))) as both:
            for past, branch in zip((True, False), both, strict=True):
                with branch:
                    for m, whole in enumerate(lines):
                        store_narrow(builder, whole, simd.nth(builder, to, dst_step, m), kind, streams=past)
        return [builder.add(to, simd.I64(64)), simd.nth(builder, origin, src_step, 8 * blocks)]

    simd.loop(builder, count, [dst, src], line, "lines", rolled=True)


@emitted
def fence(builder: Any) -> None:
    """Complete all stores before any that follows."""
    builder.fence("seq_cst")


@by_kind
def put(builder: Any, kind: str, target: Any, source: Any, count: Any) -> None:
    """Store `count` adjacent f32 at `source` as adjacent values at `target`, rounded once."""

    def some(width: int, places: list[Any]) -> None:
        store_narrow(builder, simd.load(builder, places[1], ir.VectorType(simd.F32, width)), places[0], kind)

    simd.each_run(builder, count, (target, source), (size_of(kind), 4), (16, 8, 1), some)


def load_wide(builder: Any, place: Any, kind: str, width: int) -> Any:
    """Load `width` stored values as f32."""
    raw = simd.load(builder, place, ir.VectorType(simd.storage(kind), width), size_of(kind))
    return simd.widen(builder, raw, kind)


def store_narrow(builder: Any, value: Any, place: Any, kind: str, *, streams: bool = False) -> None:
    """Store a vector of f32 as `kind`, rounded once; where it `streams`, aligned and past the caches."""
    stored = value if kind == "f32" else simd.narrow(builder, value, kind)
    simd.store(builder, stored, place, size_of(kind) * (value.type.count if streams else 1), streams=streams)


@partial(by_kind, result=types.float32)
def load(builder: Any, kind: str, address: Any) -> Any:
    """Read one stored value as f32."""
    return builder.extract_element(load_wide(builder, address, kind, 1), ir.IntType(32)(0))


@emitted
def add_run(builder: Any, target: Any, source: Any, count: Any) -> None:
    """Add `count` f32 at `source` to those at `target`, four at a time while there are four."""

    def some(width: int, places: list[Any]) -> None:
        total = builder.fadd(*(simd.load(builder, place, ir.VectorType(simd.F32, width)) for place in places))
        simd.store(builder, total, places[0])

    simd.each_run(builder, count, (target, source), (4, 4), (4, 1), some)


@emitted
def fill_zero(builder: Any, address: Any, count: Any) -> None:
    """Write `count` zero bytes from an address on."""
    cgutils.memset(builder, builder.inttoptr(address, ir.IntType(8).as_pointer()), count, 0)


@emitted
def copy_bytes(builder: Any, to: Any, source: Any, count: Any) -> None:
    """Copy `count` bytes."""
    first, second = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in (to, source))
    cgutils.raw_memcpy(builder, first, second, count, 1)


@by_kind
def put_value(builder: Any, kind: str, address: Any, value: Any) -> None:
    """Write one f32 as a stored value, rounded once."""
    store_narrow(builder, builder.bitcast(value, ir.VectorType(simd.F32, 1)), address, kind)


@emitted
def store_value(builder: Any, address: Any, value: Any) -> None:
    """Write one f32 at an address."""
    simd.store(builder, value, address)


@emitted
def touch(builder: Any, address: Any) -> None:
    """Prefetch a line of memory."""
    simd.prefetch(builder, address)


@emitted
def touch_all(builder: Any, address: Any, step: Any) -> None:
    """Prefetch 8 lines of memory, `step` bytes apart."""
    for number in range(8):
        simd.prefetch(builder, simd.nth(builder, address, step, number))


@emitted
def call_entry(builder: Any, entry: Any, *values: Any) -> None:
    """Call a compiled callback by its address."""
    kind = ir.FunctionType(ir.VoidType(), [simd.I64] * len(values))
    builder.call(builder.inttoptr(entry, kind.as_pointer()), values)


@_typed_intrinsic
def address_of(typingctx: Any, part: Any) -> Any:
    """Return the address of an array or a record, or of a record or vector inside one."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        vector = isinstance(part, types.Array)
        pointer = context.make_array(part)(context, builder, values[0]).data if vector else values[0]
        return builder.ptrtoint(pointer, simd.I64)

    return types.int64(part), codegen


@_typed_intrinsic
def keep_alive(typingctx: Any, table: Any) -> Any:
    """Keep a function's own array until here, the last use of its name: rows and addresses of it do not count."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return context.get_dummy_value()

    return types.void(table), codegen


@_typed_intrinsic
def stack_record(typingctx: Any, dtype: Any) -> Any:
    """Return a record of zeros on the stack, of the dtype of a `Record`; it lives until the function returns."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _on_stack(builder, dtype.dtype.size)

    return dtype.dtype(dtype), codegen


@_typed_intrinsic(prefer_literal=True)
def stack_array(typingctx: Any, count: Any, dtype: Any) -> Any:
    """Return an array of `count`, a constant, zeros on the stack: records or numbers. It lives as a record does."""
    array, literal = types.Array(dtype.dtype, 1, "C"), count.literal_value

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        size = context.get_abi_sizeof(context.get_data_type(dtype.dtype))
        place, made = _on_stack(builder, literal * size), context.make_array(array)(context, builder)
        one, many = context.get_constant(types.intp, size), context.get_constant(types.intp, literal)
        data = builder.bitcast(place, made.data.type)
        populate_array(made, data, shape=[many], strides=[one], itemsize=one, meminfo=None)
        return made._getvalue()

    return array(count, dtype), codegen


def _on_stack(builder: Any, size: int) -> Any:
    """Return a pointer to `size` bytes of the stack, at a line of memory, and fill them with zeros."""
    kind = ir.ArrayType(ir.IntType(8), size)
    with builder.goto_entry_block():
        place = builder.alloca(kind)
        place.align = 64
    cgutils.memset(builder, place, simd.I64(size), 0)
    return place
