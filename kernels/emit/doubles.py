"""Micro-kernels with sums of float64: each sum is one chain over its terms, so its order is the same on every target.

They read the lists of `kernels.emit.brgemm`: vectors have as many bytes, so half as many lanes. The second set of sums
stays in registers. Sums go on from those at `totals`; without that address they begin at zero. Both `a` and `b` are
float64; in `wide` tiles `a` holds vectors, and each lane is a separate problem. `Element.case` is not read: all rows
take part.

Products of f32, f16 and bf16 are exact in float64, so it makes no difference either whether multiply-adds are fused.

Products of float64 have up to 106 bits. They are summed as three float64, whose sum is the result (Ogita, Rump and
Oishi, "Accurate sum and dot product", 2005, with K = 3): a product is split into its rounded value and the error of
that, and what rounding takes away from the first sum is added to the second, and from the second to the third. Of n
products, the sum is wrong by at most n^3 2^-159 of the sum of their magnitudes. The error of a product is the same
whether one multiply-add gives it or Dekker's products of halves do, both exact.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from kernels.emit import simd
from kernels.emit.brgemm import Batch, sum_elements
from kernels.emit.compiler import emitted, emitted_entry
from kernels.emit.simd import I64
from kernels.target import target

__all__ = ["CHAINS", "EXACT", "LANES", "PARTS", "SHAPES", "WIDE", "chain_table", "widen_run"]

LANES = target().lanes // 2
"""Float64 values of a vector."""

PARTS = 3
"""Float64 values of an exact sum."""

SHAPES = ((6, 2, 1), (6, 2, 1), (2, 1, PARTS))
"""Rows of the tallest tile, vectors of a row, and float64 values of each sum, row after row in memory.

The sums, a line of `b` and a factor take 15 registers of 16, or of 32 wider ones, where two multiply-adds are done
at a time. Where sums are exact, 22 operations a product hide every latency.
"""

CHAINS, WIDE, EXACT = range(3)
"""Places in `SHAPES`."""

_VECTOR = ir.VectorType(ir.DoubleType(), LANES)


def _two_sum(builder: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """Return a + b rounded, and the rounding error (Knuth)."""
    total = builder.fadd(a, b)
    of_b = builder.fsub(total, a)
    of_a = builder.fsub(total, of_b)
    return total, builder.fadd(builder.fsub(a, of_a), builder.fsub(b, of_b))


def _halves(builder: Any, value: Any) -> tuple[Any, Any]:
    """Split vectors of doubles into the nearest of 26 bits and the rest, of 26 bits at most."""
    bits = ir.VectorType(I64, value.type.count)
    half, mask = (simd.constant(bits, number) for number in (1 << 26, -1 << 27))
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


def _add_product(builder: Any, sums: list[Any], a: Any, b: Any) -> list[Any]:
    """Add a product to a sum of one float64 or PARTS."""
    if len(sums) == 1:
        return [simd.multiply_add(builder, a, b, sums[0])]
    product = builder.fmul(a, b)
    high, lost = _two_sum(builder, sums[0], product)
    middle, of_lost = _two_sum(builder, sums[1], lost)
    middle, of_error = _two_sum(builder, middle, _error(builder, a, b, product))
    return [high, middle, builder.fadd(sums[2], builder.fadd(of_lost, of_error))]


def _add(builder: Any, sums: list[Any], more: list[Any]) -> list[Any]:
    """Add two sums of one float64 or PARTS (`kernels.expansion.add`)."""
    if len(sums) == 1:
        return [builder.fadd(sums[0], more[0])]
    high, lost = _two_sum(builder, sums[0], more[0])
    middle, of_more = _two_sum(builder, sums[1], more[1])
    middle, of_lost = _two_sum(builder, middle, lost)
    return [high, middle, builder.fadd(sums[2], builder.fadd(more[2], builder.fadd(of_more, of_lost)))]


def _emit_rows(builder: Any, batch: Any, number: int, rows: int) -> list[Any]:
    """Emit a tile of so many rows: its sums, as lists of parts by row and vector, stay in registers over the list."""
    _, vectors, parts = SHAPES[number]
    line = 8 * LANES

    def places(base: Any, row: Any) -> list[Any]:
        return [
            builder.add(simd.nth(builder, base, row, m), I64(line * (vectors * part + j)))
            for m in range(rows)
            for j in range(vectors)
            for part in range(parts)
        ]

    zeros = [simd.constant(_VECTOR, 0.0)] * rows * vectors * parts
    start = simd.when(
        builder,
        batch.totals,
        zeros,
        lambda: [simd.load(builder, each, _VECTOR, 8) for each in places(batch.totals, batch.totals_row)],
    )
    apart = builder.icmp_signed("!=", batch.apart, I64(0))
    begin = [builder.select(apart, *pair) for pair in zip([*start, *zeros], [*zeros, *start], strict=True)]

    def add(sums: list[Any], more: list[Any]) -> list[Any]:
        firsts = range(0, len(sums), parts)
        return [each for i in firsts for each in _add(builder, sums[i : i + parts], more[i : i + parts])]

    def step(carried: list[Any]) -> list[Any]:
        a, b, *sums = carried
        lines = [simd.load(builder, simd.nth(builder, b, batch.b_vector, j), _VECTOR, 8) for j in range(vectors)]
        for m in range(rows):
            place = simd.nth(builder, a, batch.a_row, m)
            if number == WIDE:
                factors = [simd.load(builder, builder.add(place, I64(line * j)), _VECTOR, 8) for j in range(vectors)]
            else:
                factors = [simd.splat(builder, simd.load(builder, place, ir.DoubleType(), 8), LANES)] * vectors
            for j in range(vectors):
                first = (m * vectors + j) * parts
                sums[first : first + parts] = _add_product(builder, sums[first : first + parts], factors[j], lines[j])
        return [builder.add(a, batch.a_step), builder.add(b, batch.b_step), *sums]

    def element(found: Any, sums: list[Any]) -> list[Any]:
        totals, begins = sums[: len(zeros)], [builder.add(batch.a, found.a), builder.add(batch.b, found.b)]
        chains = simd.loop(builder, found.steps, [*begins, *sums[len(zeros) :]], step, "step")[2:]
        return simd.when(builder, found.flush, [*totals, *chains], lambda: [*add(totals, chains), *zeros])

    sums = sum_elements(builder, batch, begin, element)
    totals, chains = sums[: len(zeros)], sums[len(zeros) :]
    whole = simd.when(builder, batch.apart, chains, lambda: add(totals, chains))
    for value, to in zip(whole, places(batch.c, batch.c_row), strict=True):
        simd.store(builder, value, to, 8)
    return []


def _emit(builder: Any, place: Any, number: int) -> None:
    """Emit the tiles of a shape."""
    batch = simd.fields(builder, place, Batch)
    sizes = range(1, 1 + SHAPES[number][0])
    simd.switch(builder, batch.rows, {rows: partial(_emit_rows, builder, batch, number, rows) for rows in sizes})


_ENTRIES = [emitted_entry(f"chains_{number}", partial(_emit, number=number), 1) for number in range(len(SHAPES))]


@cache
def chain_table(number: int) -> npt.NDArray[np.int64]:
    """Return the address of the tiles at a place in `SHAPES`, as a table that the loops take."""
    return np.full(2, _ENTRIES[number](), np.int64)


@emitted
def widen_run(builder: Any, to: Any, source: Any, count: Any) -> None:
    """Convert `count` adjacent f32 to float64."""

    def some(width: int, places: list[Any]) -> None:
        value = simd.load(builder, places[1], ir.VectorType(simd.F32, width))
        simd.store(builder, builder.fpext(value, ir.VectorType(ir.DoubleType(), width)), places[0], 8)

    simd.each_run(builder, count, (to, source), (8, 4), (2 * LANES, 1), some)
