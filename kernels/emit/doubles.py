"""Products of float64 matrices: each sum is one chain over its terms, so that its order is the same on every target.

Products of f32, f16 and bf16 are exact in float64, so it makes no difference either whether multiply-adds are fused.

Products of float64 have up to 106 bits. They are summed as three float64, whose sum is the result (Ogita, Rump and
Oishi, "Accurate sum and dot product", 2005, with K = 3): a product is split into its rounded value and the error of
that, and what rounding takes away from the first sum is added to the second, and from the second to the third. Of n
products, the sum is wrong by at most n^3 2^-159 of the sum of their magnitudes. The error of a product is the same
whether one multiply-add gives it or Dekker's products of halves do, both exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.emit import simd
from kernels.emit.compiler import Record, Rows, Vector, jit, numbers
from kernels.emit.intrinsics import fill_zero
from kernels.emit.simd import I64
from kernels.target import target

__all__ = ["PARTS", "Factors", "add_outer_products", "room_doubles"]

ROWS, COLUMNS = 6, target().lanes
"""Sums that a register tile holds: of 32 registers of 8 doubles it takes 15, and as many of 16 registers of 4."""

PARTS, EXACT_ROWS, EXACT_COLUMNS = 3, 2, target().lanes // 2
"""Float64 values of an exact sum, and the sums of a register tile, where 22 operations a product hide every latency."""

TERMS = 256
"""Terms of a panel, which stays in the first cache."""


_typed_intrinsic: Any = intrinsic
"""Numba's decorator takes the typing context away from the parameters, which its type stubs do not know."""


class Factors(Record):
    """A matrix for each group: its address and the byte steps of group, line (row or column of the product), term."""

    place: int
    steps: Vector = numbers(3)


@_typed_intrinsic
def _tile(typingctx: Any, terms: Any, rows: Any, columns: Any, to: Any, line: Any) -> Any:
    """Add the outer products of two panels, of at least one term, to ROWS lines of COLUMNS sums, `line` bytes apart."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        terms, rows, columns, to, line = values
        lane = ir.VectorType(ir.DoubleType(), COLUMNS)
        places = [builder.add(to, builder.mul(line, I64(row))) for row in range(ROWS)]
        sums = [simd.load(builder, place, lane, 8) for place in places]

        def term(carried: list[Any]) -> list[Any]:
            row, column, *sums = carried
            vector = simd.load(builder, column, lane, 8)
            for number in range(ROWS):
                single = simd.load(builder, builder.add(row, I64(8 * number)), ir.DoubleType(), 8)
                factor = simd.splat(builder, single, COLUMNS)
                sums[number] = simd.multiply_add(builder, factor, vector, sums[number])
            return [builder.add(row, I64(8 * ROWS)), builder.add(column, I64(8 * COLUMNS)), *sums]

        _, _, *sums = simd.loop(builder, terms, [rows, columns, *sums], term, "term")
        for place, value in zip(places, sums, strict=True):
            simd.store(builder, value, place, 8)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


def _two_sum(builder: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """Return a + b rounded, and the rounding error (Knuth)."""
    total = builder.fadd(a, b)
    of_b = builder.fsub(total, a)
    of_a = builder.fsub(total, of_b)
    return total, builder.fadd(builder.fsub(a, of_a), builder.fsub(b, of_b))


def _halves(builder: Any, value: Any) -> tuple[Any, Any]:
    """Split vectors of doubles into the nearest of 26 bits and the rest, of 26 bits at most."""
    bits = ir.VectorType(I64, value.type.count)
    half, mask = (ir.Constant(bits, [number] * bits.count) for number in (1 << 26, -1 << 27))
    top = builder.and_(builder.add(builder.bitcast(value, bits), half), mask)
    high = builder.bitcast(top, value.type)
    return high, builder.fsub(value, high)


def _error(builder: Any, a: Any, b: Any, product: Any) -> Any:
    """Return a * b - product, where that is the product rounded."""
    if target().fused or target().imitated:
        return builder.call(simd.fma(builder, a.type), [a, b, builder.fneg(product)])
    (a, a_rest), (b, b_rest) = _halves(builder, a), _halves(builder, b)
    error = builder.fsub(builder.fmul(a, b), product)
    for x, y in ((a, b_rest), (a_rest, b), (a_rest, b_rest)):
        error = builder.fadd(error, builder.fmul(x, y))
    return error


@_typed_intrinsic
def _exact_tile(typingctx: Any, terms: Any, rows: Any, columns: Any, to: Any, line: Any, part: Any) -> Any:
    """Add products to a tile of EXACT_ROWS x EXACT_COLUMNS sums, as `_tile` does.

    Each sum is PARTS float64 values, `part` bytes apart.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        terms, rows, columns, to, line, part = values
        lane = ir.VectorType(ir.DoubleType(), EXACT_COLUMNS)
        firsts = [builder.add(to, builder.mul(line, I64(row))) for row in range(EXACT_ROWS)]
        places = [builder.add(first, builder.mul(part, I64(at))) for first in firsts for at in range(PARTS)]
        sums = [simd.load(builder, place, lane, 8) for place in places]

        def term(carried: list[Any]) -> list[Any]:
            row, column, *sums = carried
            vector = simd.load(builder, column, lane, 8)
            for number in range(EXACT_ROWS):
                single = simd.load(builder, builder.add(row, I64(8 * number)), ir.DoubleType(), 8)
                factor = simd.splat(builder, single, EXACT_COLUMNS)
                high, middle, low = sums[PARTS * number :][:PARTS]
                product = builder.fmul(factor, vector)
                high, lost = _two_sum(builder, high, product)
                middle, of_lost = _two_sum(builder, middle, lost)
                middle, of_error = _two_sum(builder, middle, _error(builder, factor, vector, product))
                low = builder.fadd(low, builder.fadd(of_lost, of_error))
                sums = [*sums[: PARTS * number], high, middle, low, *sums[PARTS * (number + 1) :]]
            return [builder.add(row, I64(8 * EXACT_ROWS)), builder.add(column, I64(8 * EXACT_COLUMNS)), *sums]

        _, _, *sums = simd.loop(builder, terms, [rows, columns, *sums], term, "term")
        for place, value in zip(places, sums, strict=True):
            simd.store(builder, value, place, 8)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


@_typed_intrinsic
def _move(typingctx: Any, source: Any, to: Any) -> Any:
    """Copy a float64 from one address to another."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        simd.store(builder, simd.load(builder, values[0], ir.DoubleType(), 8), values[1], 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@jit
def _pack(factors: Factors, group: int, first: int, lines: int, width: int, terms: Vector, to: int) -> None:
    """Pack `width` lines of some terms, term by term; those beyond `lines` are zeros."""
    place = factors.place + group * factors.steps[0] + first * factors.steps[1] + terms[0] * factors.steps[2]
    line, step, count = factors.steps[1], factors.steps[2], terms[1] - terms[0]
    if lines < width:
        fill_zero(to, 8 * width * count)
    if line == 8:
        for t in range(count):
            for i in range(lines):
                _move(place + t * step + 8 * i, to + 8 * (t * width + i))
    else:
        for i in range(lines):
            for t in range(count):
                _move(place + i * line + t * step, to + 8 * (t * width + i))


@jit
def _move_sums(shape: Vector, source: Vector, to: Vector) -> None:
    """Copy sums; `shape` counts rows, columns and parts.

    `source` and `to` are an address, the step between rows and the step between parts, in bytes.
    """
    for part in range(shape[2]):
        for i in range(shape[0]):
            for j in range(shape[1]):
                _move(source[0] + i * source[1] + part * source[2] + 8 * j, to[0] + i * to[1] + part * to[2] + 8 * j)


@jit
def add_outer_products(sides: Rows[Factors], counts: Vector, sums: int, room: int) -> None:
    """Add to each sum of the groups' rows and columns its terms, in their order.

    `sides` are rows and columns, `counts` those of groups, rows, columns, terms and the float64 values of a sum (1, or
    PARTS where sums are exact), `sums` the address of a float64 array of (values, groups, rows, columns), `room` that
    of `room_doubles`.
    """
    groups, rows, columns, terms, parts = counts[0], counts[1], counts[2], counts[3], counts[4]
    tall, broad = (ROWS, COLUMNS) if parts == 1 else (EXACT_ROWS, EXACT_COLUMNS)
    panel, edge = room, room + 8 * TERMS * broad
    blocks, span = edge + 8 * parts * tall * broad, np.zeros(2, np.int64)
    shape, place, aside = np.zeros(3, np.int64), np.zeros(3, np.int64), np.zeros(3, np.int64)
    shape[2], place[1], place[2] = parts, 8 * columns, 8 * groups * rows * columns
    aside[0], aside[1], aside[2] = edge, 8 * broad, 8 * tall * broad
    for g in range(groups):
        for first in range(0, terms, TERMS):
            span[0], span[1] = first, min(terms, first + TERMS)
            for r in range(0, rows, tall):
                _pack(sides[0], g, r, min(tall, rows - r), tall, span, blocks + 8 * r * TERMS)
            for c in range(0, columns, broad):
                shape[1] = min(broad, columns - c)
                _pack(sides[1], g, c, shape[1], broad, span, panel)
                for r in range(0, rows, tall):
                    shape[0], place[0] = min(tall, rows - r), sums + 8 * ((g * rows + r) * columns + c)
                    whole = shape[0] == tall and shape[1] == broad
                    if not whole:
                        _move_sums(shape, place, aside)
                    to = place if whole else aside
                    if parts == 1:
                        _tile(span[1] - first, blocks + 8 * r * TERMS, panel, to[0], to[1])
                    else:
                        _exact_tile(span[1] - first, blocks + 8 * r * TERMS, panel, to[0], to[1], to[2])
                    if not whole:
                        _move_sums(shape, aside, place)


def room_doubles(rows: int) -> int:
    """Return how many float64 values of scratch `add_outer_products` needs for so many rows."""
    return (COLUMNS + rows + 2 * ROWS) * TERMS + PARTS * ROWS * COLUMNS
