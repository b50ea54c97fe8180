"""Products of float64 matrices: each sum is one chain over its terms, so that its order is the same on every target.

Products of f32, f16 and bf16 are exact in float64, so it makes no difference either whether multiply-adds are fused.
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
from kernels.target import target

__all__ = ["Factors", "add_outer_products", "room_doubles"]

ROWS, COLUMNS = 6, target().lanes
"""Sums that a register tile holds: of 32 registers of 8 doubles it takes 15, and as many of 16 registers of 4."""

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
        places = [builder.add(to, builder.mul(line, simd.I64(row))) for row in range(ROWS)]
        sums = [simd.load(builder, place, lane, 8) for place in places]

        def term(carried: list[Any]) -> list[Any]:
            row, column, *sums = carried
            vector = simd.load(builder, column, lane, 8)
            for number in range(ROWS):
                single = simd.load(builder, builder.add(row, simd.I64(8 * number)), ir.DoubleType(), 8)
                factor = simd.splat(builder, single, COLUMNS)
                sums[number] = simd.multiply_add(builder, factor, vector, sums[number])
            return [builder.add(row, simd.I64(8 * ROWS)), builder.add(column, simd.I64(8 * COLUMNS)), *sums]

        _, _, *sums = simd.loop(builder, terms, [rows, columns, *sums], term, "term")
        for place, value in zip(places, sums, strict=True):
            simd.store(builder, value, place, 8)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


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
def add_outer_products(sides: Rows[Factors], counts: Vector, sums: int, room: int) -> None:
    """Add to each sum of the groups' rows and columns its terms, in their order.

    `sides` are rows and columns, `counts` those of groups, rows, columns and terms, `sums` the address of a float64
    array of (groups, rows, columns), `room` that of `room_doubles`.
    """
    groups, rows, columns, terms = counts[0], counts[1], counts[2], counts[3]
    panel, edge = room, room + 8 * TERMS * COLUMNS
    blocks, span = edge + 8 * ROWS * COLUMNS, np.zeros(2, np.int64)
    for g in range(groups):
        for first in range(0, terms, TERMS):
            span[0], span[1] = first, min(terms, first + TERMS)
            for r in range(0, rows, ROWS):
                _pack(sides[0], g, r, min(ROWS, rows - r), ROWS, span, blocks + 8 * r * TERMS)
            for c in range(0, columns, COLUMNS):
                wide = min(COLUMNS, columns - c)
                _pack(sides[1], g, c, wide, COLUMNS, span, panel)
                for r in range(0, rows, ROWS):
                    high, count = min(ROWS, rows - r), span[1] - span[0]
                    place, line = sums + 8 * ((g * rows + r) * columns + c), 8 * columns
                    if wide == COLUMNS and high == ROWS:
                        _tile(count, blocks + 8 * r * TERMS, panel, place, line)
                        continue
                    for i in range(high):
                        for j in range(wide):
                            _move(place + i * line + 8 * j, edge + 8 * (i * COLUMNS + j))
                    _tile(count, blocks + 8 * r * TERMS, panel, edge, 8 * COLUMNS)
                    for i in range(high):
                        for j in range(wide):
                            _move(edge + 8 * (i * COLUMNS + j), place + i * line + 8 * j)


def room_doubles(rows: int) -> int:
    """Return how many float64 values of scratch `add_outer_products` needs for so many rows."""
    return (COLUMNS + rows + 2 * ROWS) * TERMS + ROWS * COLUMNS
