"""Vector instructions for Numba, emitted as LLVM IR.

Numba's loop vectoriser keeps no accumulators in registers across a loop nest; an intrinsic may emit any LLVM IR,
so what is here and in `kernels.walks` is written as vectors, phi nodes and `llvm.fma`, for whatever vector length the
processor has. LLVM lowers them to AVX-512, AVX2 or NEON instructions; a length the processor lacks still runs, only
slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu import cpu

__all__ = [
    "add_run",
    "all_finite",
    "call_tile",
    "copy_panel",
    "fill_zero",
    "load_value",
    "put_run",
    "round_bits",
    "store_value",
    "transpose_panel",
]

_I64 = ir.IntType(64)
_F32 = ir.FloatType()

SEGMENT_LOG = 6
SEGMENT = 1 << SEGMENT_LOG
"""Positions that are summed in registers before the sums are added to memory, where nothing asks for others."""

_typed_intrinsic: Any = intrinsic
"""Numba's decorator takes the typing context away from the parameters, which its type stubs do not know."""


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's type of bf16, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def _loop(
    builder: Any, count: Any, carried: list[Any], body: Callable[[list[Any]], list[Any]], tag: str, rolled: bool = False
) -> list[Any]:
    """Emit ``for _ in range(count): carried = body(carried)`` with the carried values in phi nodes; count >= 1.

    A `rolled` loop is not unrolled: where counts are small, that costs more than it gives.
    """
    before = builder.block
    block = builder.append_basic_block(tag)
    after = builder.append_basic_block(tag + ".end")
    builder.branch(block)
    builder.position_at_end(block)
    index = builder.phi(_I64, "i")
    index.add_incoming(_I64(0), before)
    phis = []
    for value in carried:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        phis.append(phi)
    results = body(phis)
    if rolled:  # an empty instruction that must not be copied
        nothing = ir.FunctionType(ir.VoidType(), [])
        builder.call(ir.InlineAsm(nothing, "", "", side_effect=True), [], attrs=("convergent",))
    following = builder.add(index, _I64(1))
    latch = builder.block
    index.add_incoming(following, latch)
    for phi, value in zip(phis, results, strict=True):
        phi.add_incoming(value, latch)
    builder.cbranch(builder.icmp_signed("<", following, count), block, after)
    builder.position_at_end(after)
    return results


def _load(builder: Any, address: Any, kind: Any, align: int = 4) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def _store(builder: Any, value: Any, address: Any, align: int = 4) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def _splat(builder: Any, value: Any, width: int) -> Any:
    vector = ir.VectorType(value.type, width)
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
    return builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), mask)


def _join(builder: Any, before: list[Any], here: Any, after: list[Any], inside: Any) -> list[Any]:
    """Give the values behind an optional block: those from `inside` it, or those from `before` it."""
    joined = []
    for old, new in zip(before, after, strict=True):
        phi = builder.phi(old.type)
        phi.add_incoming(old, here)
        phi.add_incoming(new, inside)
        joined.append(phi)
    return joined


def _opaque(builder: Any, value: Any) -> Any:
    """Hide from LLVM where an address comes from.

    It would unroll the loop with one moving address for every row, more than there are registers; so the rows stay
    offsets, in registers, of one address.
    """
    nothing = ir.InlineAsm(ir.FunctionType(_I64, [_I64]), "", "=r,0")
    return builder.call(nothing, [value])


def _fma(builder: Any, lane: Any) -> Any:
    kind = ir.FunctionType(lane, [lane, lane, lane])
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{lane.count}f32")


def _prefetch(builder: Any, address: Any) -> None:
    """Ask for the line at an address, to be used soon."""
    pointer, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, pointer), i32(0), i32(3), i32(1)])


def _widen(builder: Any, raw: Any, kind: str, width: int) -> Any:
    """Convert loaded lanes to f32: bf16 by shifting, f16 by its instruction.

    Where there is none, f16 is converted by rescaling the exponent (exact, denormals included).
    """
    if kind == "f32":
        return raw
    ints = ir.VectorType(ir.IntType(32), width)
    floats = ir.VectorType(_F32, width)
    if kind == "f16" and "f16c" in cpu().features:
        return builder.fpext(builder.bitcast(raw, ir.VectorType(ir.HalfType(), width)), floats)

    def const(value: int) -> Any:
        return ir.Constant(ints, [value] * width)

    bits = builder.zext(raw, ints)
    if kind == "bf16":
        return builder.bitcast(builder.shl(bits, const(16)), floats)
    sign = builder.shl(builder.and_(bits, const(0x8000)), const(16))
    magnitude = builder.shl(builder.and_(bits, const(0x7FFF)), const(13))
    scaled = builder.fmul(builder.bitcast(magnitude, floats), ir.Constant(floats, [2.0**112] * width))
    special = builder.icmp_unsigned(">=", magnitude, const(0x7C00 << 13))
    infinite = builder.or_(magnitude, const(0x7F800000))
    value = builder.select(special, infinite, builder.bitcast(scaled, ints))
    return builder.bitcast(builder.or_(value, sign), floats)


def _storage(kind: str) -> Any:
    return _F32 if kind == "f32" else ir.IntType(16)


def copy_panel(kind: str, vectors: int) -> Any:
    """Make an intrinsic that copies `count` positions of ``vectors * 8`` adjacent channels, converted to f32.

    Arguments: destination, its byte step, source, its byte step, count (at least 1). Whole vectors are read and
    written: the caller keeps both inside their buffers.
    """
    raw = ir.VectorType(_storage(kind), 8)
    size = 4 if kind == "f32" else 2
    lane = ir.VectorType(_F32, 8)

    def copy(typingctx: Any, dst: Any, dst_step: Any, src: Any, src_step: Any, count: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            dst, dst_step, src, src_step, count = values

            def body(carried: list[Any]) -> list[Any]:
                to, origin = carried
                for j in range(vectors):
                    loaded = _load(builder, builder.add(origin, _I64(8 * size * j)), raw, size)
                    target = builder.inttoptr(builder.add(to, _I64(32 * j)), lane.as_pointer())
                    builder.store(_widen(builder, loaded, kind, 8), target, align=4)
                return [builder.add(to, dst_step), builder.add(origin, src_step)]

            _loop(builder, count, [dst, src], body, "copy")
            return context.get_dummy_value()

        return types.void(*([types.int64] * 5)), codegen

    return intrinsic(copy)


def transpose_panel(kind: str, stored: str = "f32") -> Any:
    """Make an intrinsic that turns 8 channel rows of `count` blocks of 8 pixels into rows of 8 channels.

    Rows are read as `kind` and written as `stored`, one of which is f32.
    Arguments: destination, its byte step for a pixel, source, count (at least 1), byte step between channel rows,
    and the last row that exists: it is repeated in place of those past it.
    """
    raw = ir.VectorType(_storage(kind), 8)
    size, width = (4 if name == "f32" else 2 for name in (kind, stored))
    index = ir.VectorType(ir.IntType(32), 8)

    def transpose(typingctx: Any, dst: Any, dst_step: Any, src: Any, count: Any, row_step: Any, last: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            dst, dst_step, src, count, row_step, last = values
            numbers = [builder.select(builder.icmp_signed("<", _I64(m), last), _I64(m), last) for m in range(8)]
            row_offsets = [builder.mul(number, row_step) for number in numbers]

            def body(carried: list[Any]) -> list[Any]:
                to, origin = carried
                rows = [
                    _widen(builder, _load(builder, builder.add(origin, offset), raw, size), kind, 8)
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
                    value = row if stored == "f32" else _narrow(builder, row, stored, 8)
                    _store(builder, value, to, width)
                    to = builder.add(to, dst_step)
                return [to, builder.add(origin, _I64(8 * size))]

            _loop(builder, count, [dst, src], body, "transpose")
            return context.get_dummy_value()

        return types.void(*([types.int64] * 6)), codegen

    return intrinsic(transpose)


def _narrow(builder: Any, value: Any, kind: str, width: int) -> Any:
    """Round f32 lanes to the 16 bits of f16 or bf16, to nearest even; NaN stays NaN."""
    ints = ir.VectorType(ir.IntType(32), width)
    floats = ir.VectorType(_F32, width)

    def const(value: int) -> Any:
        return ir.Constant(ints, [value] * width)

    bits = builder.bitcast(value, ints)
    magnitude = builder.and_(bits, const(0x7FFFFFFF))
    nan = builder.icmp_unsigned(">", magnitude, const(0x7F800000))
    drop = 16 if kind == "bf16" else 13
    odd = builder.and_(builder.lshr(magnitude, const(drop)), const(1))
    nearest = builder.add(magnitude, builder.add(odd, const((1 << (drop - 1)) - 1)))
    if kind == "bf16":
        rounded = builder.lshr(nearest, const(16))
        rounded = builder.select(nan, const(0x7FC0), rounded)
    else:
        normal = builder.lshr(builder.sub(nearest, const(112 << 23)), const(13))
        # the last bit of 0.5 is worth 2**-24, an f16 denormal's: the addition rounds to it
        half = ir.Constant(floats, [0.5] * width)
        shifted = builder.bitcast(builder.fadd(builder.bitcast(magnitude, floats), half), ints)
        denormal = builder.sub(shifted, builder.bitcast(half, ints))
        rounded = builder.select(builder.icmp_unsigned("<", magnitude, const(0x38800000)), denormal, normal)
        large = builder.icmp_unsigned(">=", magnitude, const(0x47800000))
        rounded = builder.select(large, const(0x7C00), rounded)
        rounded = builder.select(nan, const(0x7E00), rounded)
    sign = builder.lshr(builder.and_(bits, const(0x80000000)), const(16))
    return builder.trunc(builder.or_(rounded, sign), ir.VectorType(ir.IntType(16), width))


def round_bits(kind: str) -> Any:
    """Make an intrinsic that rounds an f32 to the 16 bits of f16 or bf16, to nearest even; NaN stays NaN."""

    def round_(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            single = builder.bitcast(values[0], ir.VectorType(_F32, 1))
            return builder.extract_element(_narrow(builder, single, kind, 1), ir.IntType(32)(0))

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
                    value = _load(builder, origin, ir.VectorType(_F32, width))
                    stored = value if kind == "f32" else _narrow(builder, value, kind, width)
                    _store(builder, stored, to, size)
                    return [builder.add(to, _I64(size * width)), builder.add(origin, _I64(4 * width))]

                return put_some

            target, source, count = values
            _runs(builder, count, [target, source], (16, 8, 1), body)
            return context.get_dummy_value()

        return types.void(*([types.int64] * 3)), codegen

    return intrinsic(put)


def _runs(
    builder: Any,
    count: Any,
    start: list[Any],
    widths: tuple[int, ...],
    body: Callable[[int], Callable[[list[Any]], list[Any]]],
) -> list[Any]:
    """Emit a loop over `count` values for each width, falling powers of two: each takes what it can of what is left."""
    carried = start
    for size in widths:
        number, count = builder.lshr(count, _I64(size.bit_length() - 1)), builder.and_(count, _I64(size - 1))
        here = builder.block
        with builder.if_then(builder.icmp_signed(">", number, _I64(0))):
            after, inside = _loop(builder, number, carried, body(size), "vector"), builder.block
        carried = _join(builder, carried, here, after, inside)
    return carried


def _twice(
    builder: Any, count: Any, start: list[Any], width: int, body: Callable[[int], Callable[[list[Any]], list[Any]]]
) -> list[Any]:
    """Emit a loop over whole vectors of `count` values (a power of two each), then one over those that are left."""
    return _runs(builder, count, start, (width, 1), body)


def load_value(kind: str) -> Any:
    """Make an intrinsic that reads one stored value at an address as f32."""

    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            raw = _load(builder, values[0], ir.VectorType(_storage(kind), 1), 4 if kind == "f32" else 2)
            return builder.extract_element(_widen(builder, raw, kind, 1), ir.IntType(32)(0))

        return types.float32(types.int64), codegen

    return intrinsic(load)


@_typed_intrinsic
def all_finite(typingctx: Any, address: Any, count: Any) -> Any:
    """Say whether `count` (at least 1) vectors of 8 f32 hold neither Inf nor NaN."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        lane = ir.VectorType(_F32, 8)
        zero = ir.Constant(lane, [0.0] * 8)

        def body(carried: list[Any]) -> list[Any]:
            # a finite number times zero is zero, anything else is NaN, and NaN stays
            place, *totals = carried
            for i, total in enumerate(totals):
                product = builder.fmul(_load(builder, builder.add(place, _I64(32 * i)), lane), zero)
                totals[i] = builder.fadd(total, product)
            return [builder.add(place, _I64(32 * len(totals))), *totals]

        # four sums at a time, then those that are left one by one: an addition takes four cycles
        address, count = values
        fours, rest = builder.lshr(count, _I64(2)), builder.and_(count, _I64(3))
        start, here = [address, zero, zero, zero, zero], builder.block
        with builder.if_then(builder.icmp_unsigned(">", fours, _I64(0))):
            many, inside = _loop(builder, fours, start, body, "finite"), builder.block
        many = _join(builder, start, here, many, inside)
        start, here = [many[0], many[1]], builder.block
        with builder.if_then(builder.icmp_unsigned(">", rest, _I64(0))):
            one, inside = _loop(builder, rest, start, body, "finite.rest"), builder.block
        one = _join(builder, start, here, one, inside)
        total = builder.fadd(builder.fadd(one[1], many[2]), builder.fadd(many[3], many[4]))
        finite = builder.bitcast(builder.fcmp_ordered("==", total, zero), ir.IntType(8))
        return builder.icmp_unsigned("==", finite, ir.IntType(8)(255))

    return types.boolean(types.int64, types.int64), codegen


@_typed_intrinsic
def add_run(typingctx: Any, target: Any, source: Any, count: Any) -> Any:
    """Add `count` f32 at `source` to those at `target`, four at a time while there are four."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        def body(width: int) -> Callable[[list[Any]], list[Any]]:
            kind = ir.VectorType(_F32, width)

            def add(carried: list[Any]) -> list[Any]:
                to, origin = carried
                total = builder.fadd(_load(builder, to, kind), _load(builder, origin, kind))
                _store(builder, total, to)
                return [builder.add(to, _I64(4 * width)), builder.add(origin, _I64(4 * width))]

            return add

        target, source, count = values
        _twice(builder, count, [target, source], 4, body)
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
        _store(builder, values[1], values[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@_typed_intrinsic
def call_tile(typingctx: Any, tile: Any, walk: Any, v: Any, s: Any, offsets: Any, acc: Any) -> Any:
    """Call the compiled tile at address `tile`; the other arguments are those of `kernels.walks.fma_tile`."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64] * 5)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*([types.int64] * 6)), codegen
