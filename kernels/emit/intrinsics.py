"""Loads, stores, conversions and transpositions as Numba intrinsics, on the vectors of `kernels.emit.simd`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.emit import simd

__all__ = [
    "add_run",
    "address_of",
    "all_finite",
    "call_tile",
    "copy_panel",
    "fill_zero",
    "load_value",
    "load_wide",
    "put_run",
    "round_bits",
    "store_value",
    "transpose_panel",
]

SEGMENT_LOG = 6
"""Logarithm of the positions that are summed in registers before the sums are added to memory."""

_typed_intrinsic: Any = intrinsic
"""Numba's decorator takes the typing context away from the parameters, which its type stubs do not know."""


def copy_panel(kind: str) -> Any:
    """Make an intrinsic that copies `count` positions of `lanes` (a multiple of 8) adjacent channels, converted to f32.

    Arguments: lanes, destination, its byte step, source, its byte step, count (at least 1).
    """
    raw = ir.VectorType(simd.storage(kind), 8)
    size = 4 if kind == "f32" else 2

    def copy(typingctx: Any, lanes: Any, dst: Any, dst_step: Any, src: Any, src_step: Any, count: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            lanes, dst, dst_step, src, src_step, count = values

            def some(width: int) -> Callable[[list[Any]], list[Any]]:
                def position(places: list[Any]) -> list[Any]:
                    to, origin = places
                    for j in range(0, width, 8):
                        loaded = simd.load(builder, builder.add(origin, simd.I64(size * j)), raw, size)
                        simd.store(builder, simd.widen(builder, loaded, kind, 8), builder.add(to, simd.I64(4 * j)))
                    return [builder.add(to, dst_step), builder.add(origin, src_step)]

                def positions(places: list[Any]) -> list[Any]:
                    simd.loop(builder, count, places, position, "copy")
                    to, origin = places
                    return [builder.add(to, simd.I64(4 * width)), builder.add(origin, simd.I64(size * width))]

                return positions

            simd.runs(builder, lanes, [dst, src], (16, 8), some)
            return context.get_dummy_value()

        return types.void(*([types.int64] * 6)), codegen

    return intrinsic(copy)


def transpose_panel(kind: str, stored: str = "f32") -> Any:
    """Make an intrinsic that turns 8 channel rows of `count` blocks of 8 pixels into rows of 8 channels.

    Rows are read as `kind` and written as `stored`, one of which is f32.
    Arguments: destination, its byte step for a pixel, source, count (at least 1), byte step between channel rows,
    and the last row that exists: it is repeated in place of those past it.
    """
    raw = ir.VectorType(simd.storage(kind), 8)
    size, width = (4 if name == "f32" else 2 for name in (kind, stored))
    index = ir.VectorType(ir.IntType(32), 8)

    def transpose(typingctx: Any, dst: Any, dst_step: Any, src: Any, count: Any, row_step: Any, last: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            dst, dst_step, src, count, row_step, last = values
            numbers = [builder.select(builder.icmp_signed("<", simd.I64(m), last), simd.I64(m), last) for m in range(8)]
            row_offsets = [builder.mul(number, row_step) for number in numbers]

            def body(carried: list[Any]) -> list[Any]:
                to, origin = carried
                rows = [
                    simd.widen(builder, simd.load(builder, builder.add(origin, offset), raw, size), kind, 8)
                    for offset in row_offsets
                ]
                for step in (1, 2, 4):  # swap the off-diagonal blocks of size 1, 2, 4
                    for i in range(8):
                        if i & step:
                            continue
                        a, b = rows[i], rows[i + step]
                        low = [8 + j - step if j & step else j for j in range(8)]
                        high = [8 + j if j & step else j + step for j in range(8)]
                        rows[i] = builder.shuffle_vector(a, b, ir.Constant(index, low))
                        rows[i + step] = builder.shuffle_vector(a, b, ir.Constant(index, high))
                for row in rows:
                    value = row if stored == "f32" else simd.narrow(builder, row, stored, 8)
                    simd.store(builder, value, to, width)
                    to = builder.add(to, dst_step)
                return [to, builder.add(origin, simd.I64(8 * size))]

            simd.loop(builder, count, [dst, src], body, "transpose")
            return context.get_dummy_value()

        return types.void(*([types.int64] * 6)), codegen

    return intrinsic(transpose)


def round_bits(kind: str) -> Any:
    """Make an intrinsic that rounds an f32 to the 16 bits of f16 or bf16, to nearest even; NaN stays NaN."""

    def round_(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            single = builder.bitcast(values[0], ir.VectorType(simd.F32, 1))
            return builder.extract_element(simd.narrow(builder, single, kind, 1), ir.IntType(32)(0))

        return types.uint16(types.float32), codegen

    return intrinsic(round_)


def put_run(kind: str) -> Any:
    """Make an intrinsic that stores `count` adjacent f32 at `source` as adjacent values at `target`, rounded once."""
    size = 4 if kind == "f32" else 2

    def put(typingctx: Any, target: Any, source: Any, count: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            def body(width: int) -> Callable[[list[Any]], list[Any]]:
                def put_some(carried: list[Any]) -> list[Any]:
                    to, origin = carried
                    value = simd.load(builder, origin, ir.VectorType(simd.F32, width))
                    stored = value if kind == "f32" else simd.narrow(builder, value, kind, width)
                    simd.store(builder, stored, to, size)
                    return [builder.add(to, simd.I64(size * width)), builder.add(origin, simd.I64(4 * width))]

                return put_some

            target, source, count = values
            simd.runs(builder, count, [target, source], (16, 8, 1), body)
            return context.get_dummy_value()

        return types.void(*([types.int64] * 3)), codegen

    return intrinsic(put)


def load_wide(builder: Any, place: Any, kind: str, width: int) -> Any:
    """Load `width` stored values as f32."""
    raw = simd.load(builder, place, ir.VectorType(simd.storage(kind), width), 4 if kind == "f32" else 2)
    return simd.widen(builder, raw, kind, width)


def load_value(kind: str) -> Any:
    """Make an intrinsic that reads one stored value at an address as f32."""

    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.extract_element(load_wide(builder, values[0], kind, 1), ir.IntType(32)(0))

        return types.float32(types.int64), codegen

    return intrinsic(load)


@_typed_intrinsic
def all_finite(typingctx: Any, address: Any, count: Any) -> Any:
    """Return whether `count` (at least 1) vectors of 8 f32 hold neither Inf nor NaN."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        lane = ir.VectorType(simd.F32, 8)
        zero = ir.Constant(lane, [0.0] * 8)

        def body(carried: list[Any]) -> list[Any]:
            # a finite number times zero is zero, anything else is NaN, and NaN stays
            place, *totals = carried
            for i, total in enumerate(totals):
                product = builder.fmul(simd.load(builder, builder.add(place, simd.I64(32 * i)), lane), zero)
                totals[i] = builder.fadd(total, product)
            return [builder.add(place, simd.I64(32 * len(totals))), *totals]

        # four sums at a time, then those that are left one by one: an addition takes four cycles
        address, count = values
        fours, rest = builder.lshr(count, simd.I64(2)), builder.and_(count, simd.I64(3))
        start, here = [address, zero, zero, zero, zero], builder.block
        with builder.if_then(builder.icmp_unsigned(">", fours, simd.I64(0))):
            many, inside = simd.loop(builder, fours, start, body, "finite"), builder.block
        many = simd.join(builder, start, here, many, inside)
        start, here = [many[0], many[1]], builder.block
        with builder.if_then(builder.icmp_unsigned(">", rest, simd.I64(0))):
            one, inside = simd.loop(builder, rest, start, body, "finite.rest"), builder.block
        one = simd.join(builder, start, here, one, inside)
        total = builder.fadd(builder.fadd(one[1], many[2]), builder.fadd(many[3], many[4]))
        finite = builder.bitcast(builder.fcmp_ordered("==", total, zero), ir.IntType(8))
        return builder.icmp_unsigned("==", finite, ir.IntType(8)(255))

    return types.boolean(types.int64, types.int64), codegen


@_typed_intrinsic
def add_run(typingctx: Any, target: Any, source: Any, count: Any) -> Any:
    """Add `count` f32 at `source` to those at `target`, four at a time while there are four."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        def body(width: int) -> Callable[[list[Any]], list[Any]]:
            kind = ir.VectorType(simd.F32, width)

            def add(carried: list[Any]) -> list[Any]:
                to, origin = carried
                total = builder.fadd(simd.load(builder, to, kind), simd.load(builder, origin, kind))
                simd.store(builder, total, to)
                return [builder.add(to, simd.I64(4 * width)), builder.add(origin, simd.I64(4 * width))]

            return add

        target, source, count = values
        simd.twice(builder, count, [target, source], 4, body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@_typed_intrinsic
def fill_zero(typingctx: Any, address: Any, count: Any) -> Any:
    """Write `count` zero bytes from an address on."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        cgutils.memset(builder, builder.inttoptr(values[0], ir.IntType(8).as_pointer()), values[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@_typed_intrinsic
def store_value(typingctx: Any, address: Any, value: Any) -> Any:
    """Write one f32 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        simd.store(builder, values[1], values[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@_typed_intrinsic
def call_tile(typingctx: Any, tile: Any, walk: Any, v: Any, s: Any, offsets: Any, acc: Any) -> Any:
    """Call the compiled tile at address `tile`; the other arguments are those of
    `kernels.emit.register_tiles.fma_tile`."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [simd.I64] * 5)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*([types.int64] * 6)), codegen


@_typed_intrinsic
def address_of(typingctx: Any, part: Any) -> Any:
    """Return the address of a record, or of a record or vector inside one."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        vector = isinstance(part, types.Array)
        pointer = context.make_array(part)(context, builder, values[0]).data if vector else values[0]
        return builder.ptrtoint(pointer, simd.I64)

    return types.int64(part), codegen
