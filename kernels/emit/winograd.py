"""The transforms of Winograd's F(3, 2) for weight gradients and of F(2, 3) for forward operations, along both axes.

A tile has two narrow positions g0, g1 and the four wide positions d0..d3 that they meet. Its three taps y, sums of
``d[i + k] * g[i]``, take four products instead of six (Winograd, 1980; Lavin and Gray,
https://arxiv.org/abs/1509.09308):

    V = (d0 - d2, d1 + d2, d2 - d1, d3 - d1)      U = (g0, g0 + g1, g0 - g1, g1)      M[i] = sum over tiles V[i] U[i]
    y0 = M0 + (M1 + M2) / 2       y1 = (M1 - M2) / 2       y2 = (M1 + M2) / 2 + M3

Halves come last, so integers stay integers. F(2, 3) has the same V, the taps g0..g2 and two outputs:

    U = (g0, (g0 + g1 + g2) / 2, (g0 - g1 + g2) / 2, g2)      M[i] = sum over channels V[i] U[i]
    y0 = M0 + M1 + M2       y1 = M1 - M2 + M3

Along the vertical axis V and U have two summands at the most, so that a
line of tiles reads two lines of a tensor: its rows.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.emit import simd
from kernels.target import target

__all__ = ["FACTORS", "TAPS", "count_taps", "integer_peak", "put_outputs", "transform_line", "transform_taps"]

FACTORS, TAPS = 4, 3
"""Products of a tile and its taps along one axis."""

_LANES = target().lanes
_VECTOR = ir.VectorType(simd.F32, _LANES)
_LINE = 4 * _LANES

_typed_intrinsic: Any = intrinsic


def transform_line(wide: bool, vectors: int) -> Any:
    """Make an intrinsic that transforms a line of tiles of a + sign * b, for `vectors` adjacent vectors of channels.

    `a` and `b` are the addresses of column 0 of both rows, `a_step` and `b_step` the bytes between their columns. The
    first tile begins at column `first`; outside of the `columns` that exist, `zero` is read, the address of `vectors`
    vectors of zeros. `count` (at least 1) tiles are written from `to` on, `step` bytes apart, and their four factors
    `plane` bytes apart.
    """

    def typer(
        typingctx: Any, a: Any, b: Any, a_step: Any, b_step: Any, sign: Any, first: Any, columns: Any, zero: Any,
        count: Any, to: Any, step: Any, plane: Any,
    ) -> Any:  # fmt: skip
        whole = [types.int64] * 4
        return types.void(*whole, types.float32, *whole, *whole[1:]), codegen

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        a, b, a_step, b_step, sign, first, columns, zero, count, to, step, plane = values
        signs = simd.splat(builder, sign, _LANES)

        def column(x: Any) -> list[Any]:
            inside = builder.icmp_unsigned("<", x, columns)
            rows = [
                builder.select(inside, builder.add(row, builder.mul(x, pixel)), zero)
                for row, pixel in ((a, a_step), (b, b_step))
            ]
            loaded = []
            for vector in range(vectors):
                one, other = (simd.load(builder, builder.add(row, simd.I64(_LINE * vector)), _VECTOR) for row in rows)
                loaded.append(simd.multiply_add(builder, signs, other, one))
            return loaded

        def put(to: Any, vector: int, factors: list[Any]) -> None:
            for number, value in enumerate(factors):
                place = builder.add(to, builder.mul(plane, simd.I64(number)))
                simd.store(builder, value, builder.add(place, simd.I64(_LINE * vector)))

        def wide_tile(carried: list[Any]) -> list[Any]:
            x, to, *held = carried
            following = column(x) + column(builder.add(x, simd.I64(1)))
            for vector in range(vectors):
                d0, d1, d2, d3 = (each[vector + vectors * i] for each in (held, following) for i in range(2))
                factors = [
                    builder.fsub(d0, d2), builder.fadd(d1, d2), builder.fsub(d2, d1), builder.fsub(d3, d1)
                ]  # fmt: skip
                put(to, vector, factors)
            return [builder.add(x, simd.I64(2)), builder.add(to, step), *following]

        def narrow_tile(carried: list[Any]) -> list[Any]:
            x, to = carried
            for vector, (g0, g1) in enumerate(zip(column(x), column(builder.add(x, simd.I64(1))), strict=True)):
                put(to, vector, [g0, builder.fadd(g0, g1), builder.fsub(g0, g1), g1])
            return [builder.add(x, simd.I64(2)), builder.add(to, step)]

        if wide:
            held = column(first) + column(builder.add(first, simd.I64(1)))
            start = [builder.add(first, simd.I64(2)), to, *held]
            simd.loop(builder, count, start, wide_tile, "tile", rolled=True)
        else:
            simd.loop(builder, count, [first, to], narrow_tile, "tile", rolled=True)
        return context.get_dummy_value()

    return intrinsic(typer)


@_typed_intrinsic
def count_taps(typingctx: Any, source: Any, plane: Any, vectors: Any, to: Any, tap: Any) -> Any:
    """Turn the sums of 16 products into 9 taps, for `vectors` (at least 1) adjacent vectors of channels.

    The sums lie `plane` bytes apart from `source` on, the taps are written `tap` bytes apart from `to` on.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, plane, vectors, to, tap = values
        half = ir.Constant(_VECTOR, [0.5] * _LANES)

        def along(m: list[Any]) -> list[Any]:
            both = builder.fmul(builder.fadd(m[1], m[2]), half)
            return [builder.fadd(m[0], both), builder.fmul(builder.fsub(m[1], m[2]), half), builder.fadd(both, m[3])]

        def vector(carried: list[Any]) -> list[Any]:
            place, to = carried
            rows = []
            for y in range(FACTORS):
                places = [builder.add(place, builder.mul(plane, simd.I64(FACTORS * y + x))) for x in range(FACTORS)]
                rows.append(along([simd.load(builder, each, _VECTOR) for each in places]))
            for x in range(TAPS):
                for y, value in enumerate(along([row[x] for row in rows])):
                    simd.store(builder, value, builder.add(to, builder.mul(tap, simd.I64(TAPS * y + x))))
            return [builder.add(each, simd.I64(_LINE)) for each in (place, to)]

        simd.loop(builder, vectors, [source, to], vector, "taps", rolled=True)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@_typed_intrinsic
def transform_taps(typingctx: Any, source: Any, tap: Any, vectors: Any, to: Any, plane: Any) -> Any:
    """Transform 9 taps, `tap` bytes apart from `source` on, of `vectors` (at least 1) adjacent vectors of channels.

    The 16 factors are written `plane` bytes apart from `to` on.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, tap, vectors, to, plane = values
        half = ir.Constant(_VECTOR, [0.5] * _LANES)

        def along(g: list[Any]) -> list[Any]:
            outer = builder.fmul(builder.fadd(g[0], g[2]), half)
            inner = builder.fmul(g[1], half)
            return [g[0], builder.fadd(outer, inner), builder.fsub(outer, inner), g[2]]

        def vector(carried: list[Any]) -> list[Any]:
            place, to = carried
            rows = []
            for y in range(TAPS):
                places = [builder.add(place, builder.mul(tap, simd.I64(TAPS * y + x))) for x in range(TAPS)]
                rows.append(along([simd.load(builder, each, _VECTOR) for each in places]))
            for x in range(FACTORS):
                for y, value in enumerate(along([row[x] for row in rows])):
                    simd.store(builder, value, builder.add(to, builder.mul(plane, simd.I64(FACTORS * y + x))))
            return [builder.add(each, simd.I64(_LINE)) for each in (place, to)]

        simd.loop(builder, vectors, [source, to], vector, "filter", rolled=True)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@_typed_intrinsic
def put_outputs(
    typingctx: Any, source: Any, last: Any, plane: Any, vectors: Any, bias: Any, to: Any, right: Any, down: Any
) -> Any:
    """Turn the sums of 16 products into 2x2 outputs plus `bias`, for `vectors` (at least 1) vectors of channels.

    The sums lie `plane` bytes apart from `source` on, those of the fourth vertical product from `last` on. The outputs
    are written from `to` on, `right` bytes and `down` bytes apart; a step of 0 leaves out those which don't exist.
    Returns whether those which are written are finite.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, last, plane, vectors, bias, to, right, down = values
        zero = ir.Constant(_VECTOR, [0.0] * _LANES)
        beside, below = (builder.icmp_signed("!=", step, simd.I64(0)) for step in (right, down))

        def along(m: list[Any]) -> list[Any]:
            one = builder.fadd(m[0], builder.fadd(m[1], m[2]))
            return [one, builder.fadd(builder.fsub(m[1], m[2]), m[3])]

        def vector(carried: list[Any]) -> list[Any]:
            *places, total = carried
            source, last, bias, to = places
            rows = []
            for y in range(FACTORS):
                begin, first = (source, FACTORS * y) if y < FACTORS - 1 else (last, 0)
                at = [builder.add(begin, builder.mul(plane, simd.I64(first + x))) for x in range(FACTORS)]
                rows.append(along([simd.load(builder, each, _VECTOR) for each in at]))
            added = simd.load(builder, bias, _VECTOR)
            columns = [[builder.fadd(each, added) for each in along([row[x] for row in rows])] for x in range(2)]
            # an output that doesn't exist is its neighbour once more, at the same place
            columns[1] = [builder.select(beside, *each) for each in zip(columns[1], columns[0], strict=True)]
            for x, step in enumerate((simd.I64(0), right)):
                columns[x][1] = builder.select(below, columns[x][1], columns[x][0])
                for y, value in enumerate(columns[x]):
                    place = builder.add(to, builder.add(step, down)) if y else builder.add(to, step)
                    simd.store(builder, value, place)
                    total = builder.fadd(total, builder.fmul(value, zero))  # finite times zero is zero, other are NaN
            return [*(builder.add(each, simd.I64(_LINE)) for each in places), total]

        total = simd.loop(builder, vectors, [source, last, bias, to, zero], vector, "outputs", rolled=True)[-1]
        bits = ir.IntType(_LANES)
        return builder.icmp_unsigned(
            "==", builder.bitcast(builder.fcmp_ordered("==", total, zero), bits), bits((1 << _LANES) - 1)
        )

    return types.boolean(*[types.int64] * 8), codegen


def integer_peak(kind: str) -> Any:
    """Make an intrinsic that returns the largest magnitude of `count` (at least 1) times 8 values, from an address on.

    It is -1 where they are not all integers. Inf and NaN are infinite ones.
    """
    lanes = ir.VectorType(simd.F32, 8)
    raw = ir.VectorType(simd.storage(kind), 8)
    size = 4 if kind == "f32" else 2

    def peak(typingctx: Any, address: Any, count: Any) -> Any:
        return types.float32(types.int64, types.int64), codegen

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        # from 2**23 on f32 are integers; smaller magnitudes lose their fraction where 2**23 is added
        large = ir.Constant(lanes, [float(1 << 23)] * 8)
        ints = ir.VectorType(ir.IntType(32), 8)
        whole = ir.IntType(8)(255)

        def body(carried: list[Any]) -> list[Any]:
            place, most, all_integers = carried
            value = simd.widen(builder, simd.load(builder, place, raw, size), kind, 8)
            bits = builder.and_(builder.bitcast(value, ints), ir.Constant(ints, [0x7FFFFFFF] * 8))
            infinite = ir.Constant(ints, [0x7F800000] * 8)
            bits = builder.select(builder.icmp_unsigned("<", bits, infinite), bits, infinite)
            value = builder.bitcast(bits, lanes)
            rounded = builder.fsub(builder.fadd(value, large), large)
            integer = builder.or_(
                builder.fcmp_ordered("==", rounded, value), builder.fcmp_ordered(">=", value, large)
            )  # fmt: skip
            most = builder.select(builder.fcmp_ordered(">", value, most), value, most)
            all_integers = builder.and_(all_integers, builder.bitcast(integer, ir.IntType(8)))
            return [builder.add(place, simd.I64(8 * size)), most, all_integers]

        start = [values[0], ir.Constant(lanes, [0.0] * 8), whole]
        _, most, all_integers = simd.loop(builder, values[1], start, body, "peak", rolled=True)
        total = builder.extract_element(most, ir.IntType(32)(0))
        for lane in range(1, 8):
            other = builder.extract_element(most, ir.IntType(32)(lane))
            total = builder.select(builder.fcmp_ordered(">", other, total), other, total)
        return builder.select(builder.icmp_unsigned("==", all_integers, whole), total, simd.F32(-1.0))

    return intrinsic(peak)
