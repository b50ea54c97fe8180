"""Micro-kernels with sums of float64: each sum is one chain over its terms, so its order is the same on every target.

Products of f32, f16 and bf16 are exact in float64, so it makes no difference either whether multiply-adds are fused.

Products of float64 have up to 106 bits. They are summed as three float64, whose sum is the result (Ogita, Rump and
Oishi, "Accurate sum and dot product", 2005, with K = 3): a product is split into its rounded value and the error of
that, and what rounding takes away from the first sum is added to the second, and from the second to the third. Of n
products, the sum is wrong by at most n^3 2^-159 of the sum of their magnitudes. The error of a product is the same
whether one multiply-add gives it or Dekker's products of halves do, both exact.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir

from kernels.emit import simd
from kernels.emit.compiler import Record, emitted, emitted_entry
from kernels.emit.intrinsics import by_kind
from kernels.emit.simd import I64
from kernels.target import target

__all__ = [
    "BROAD", "EXACT", "FLUSHED", "LANES", "LANEWISE", "PARTS", "SHAPES", "TALL", "ChainLine", "ChainRun", "ChainTile",
    "move", "round_lines", "tile_address", "widen_run",
]  # fmt: skip

LANES = target().lanes // 2
"""Float64 values of a vector."""

PARTS = 3
"""Float64 values of an exact sum."""

SHAPES = ((6, 2, 1), (3, 4, 1), (2, 1, PARTS), (6, 2, 1), (6, 2, 1))
"""Lines of a register tile, vectors of a line, and float64 values of each sum.

The sums, a line of columns and a factor take 15 registers of 16, or of 32 wider ones, where two multiply-adds are done
at a time. Where sums are exact, 22 operations a product hide every latency.
"""

TALL, BROAD, EXACT, LANEWISE, FLUSHED = range(5)
"""Places in `SHAPES`: broad tiles are for few lines, lanewise ones have factors for each lane, flushed ones add each
chain of a run to the sums."""


class ChainRun(Record):
    """Terms that follow each other: `steps` of them, `row` bytes after each line's first factor, and their columns."""

    row: int
    column: int
    steps: int


class ChainLine(Record):
    """A line of a tile: the addresses of its first factor and of its sums."""

    row: int
    sums: int


class ChainTile(Record):
    """Outer products of lines and columns, summed over the `count` (at least 1) runs at an address.

    From term to term factors are `row_step` bytes apart, columns `column_step`, and the float64 values of a sum `part`.
    With `begins` sums begin at zero, otherwise with those in memory. With `ends` they are added to what lies `total`
    bytes after them, otherwise they are stored.
    """

    lines: int
    runs: int
    count: int
    row_step: int
    column_step: int
    part: int
    begins: int
    ends: int
    total: int


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


def _emit(builder: Any, place: Any, number: int) -> None:
    """Emit a tile: its sums, as lists of parts by line and vector, stay in registers over all runs."""
    tall, vectors, parts = SHAPES[number]
    tile = simd.fields(builder, place, ChainTile)
    lines = [
        simd.fields(builder, builder.add(tile.lines, I64(ChainLine.dtype.itemsize * m)), ChainLine) for m in range(tall)
    ]
    places = [
        builder.add(builder.add(line.sums, I64(8 * LANES * j)), builder.mul(tile.part, I64(part)))
        for line in lines
        for j in range(vectors)
        for part in range(parts)
    ]
    zeros = [simd.constant(_VECTOR, 0.0)] * len(places)
    before = builder.block
    with builder.if_then(builder.icmp_signed("==", tile.begins, I64(0))):
        loaded, inside = [simd.load(builder, each, _VECTOR, 8) for each in places], builder.block
    start = simd.join(builder, zeros, before, loaded, inside)

    def term(carried: list[Any]) -> list[Any]:
        row, column, *sums = carried
        columns = [simd.load(builder, builder.add(column, I64(8 * LANES * j)), _VECTOR, 8) for j in range(vectors)]
        for m, line in enumerate(lines):
            place = builder.add(line.row, row)
            single = ir.DoubleType() if number != LANEWISE else _VECTOR
            factors = [simd.load(builder, builder.add(place, I64(8 * LANES * j)), single, 8) for j in range(vectors)]
            if number != LANEWISE:
                factors = [simd.splat(builder, factors[0], LANES)] * vectors
            for j, (factor, vector) in enumerate(zip(factors, columns, strict=True)):
                first = (m * vectors + j) * parts
                sums[first : first + parts] = _add_product(builder, sums[first : first + parts], factor, vector)
        return [builder.add(row, tile.row_step), builder.add(column, tile.column_step), *sums]

    def run(carried: list[Any]) -> list[Any]:
        where, *sums = carried
        found = simd.fields(builder, where, ChainRun)
        chains = zeros if number == FLUSHED else sums
        chains = simd.loop(builder, found.steps, [found.row, found.column, *chains], term, "term")[2:]
        if number == FLUSHED:
            chains = [builder.fadd(value, chain) for value, chain in zip(sums, chains, strict=True)]
        sums = chains
        return [builder.add(where, I64(ChainRun.dtype.itemsize)), *sums]

    sums = simd.loop(builder, tile.count, [tile.runs, *start], run, "run", rolled=True)[1:]
    with builder.if_else(builder.icmp_signed("!=", tile.ends, I64(0))) as (ends, goes_on):
        with ends:
            for first in range(0, len(places), parts):
                totals = [builder.add(each, tile.total) for each in places[first : first + parts]]
                known = [simd.load(builder, each, _VECTOR, 8) for each in totals]
                for value, to in zip(_add(builder, known, sums[first : first + parts]), totals, strict=True):
                    simd.store(builder, value, to, 8)
        with goes_on:
            for value, to in zip(sums, places, strict=True):
                simd.store(builder, value, to, 8)


_ENTRIES = [emitted_entry(f"doubles_{number}", partial(_emit, number=number), 1) for number in range(len(SHAPES))]


def tile_address(number: int) -> int:
    """Return the address of the compiled tile at a place in `SHAPES`, for `kernels.emit.intrinsics.call_entry`."""
    return _ENTRIES[number]()


@emitted
def widen_run(builder: Any, to: Any, source: Any, count: Any) -> None:
    """Convert `count` adjacent f32 to float64."""

    def some(width: int, places: list[Any]) -> None:
        value = simd.load(builder, places[1], ir.VectorType(simd.F32, width))
        simd.store(builder, builder.fpext(value, ir.VectorType(ir.DoubleType(), width)), places[0], 8)

    simd.each_run(builder, count, (to, source), (8, 4), (2 * LANES, 1), some)


@emitted
def move(builder: Any, source: Any, to: Any) -> None:
    """Copy a float64 from one address to another."""
    simd.store(builder, simd.load(builder, source, ir.DoubleType(), 8), to, 8)


@by_kind
def round_lines(builder: Any, kind: str, to: Any, source: Any, bias: Any, count: Any) -> None:
    """Round `count` adjacent lines of two vectors to f32, after the line `bias` was added to each.

    To nearest even, or to odd if they become 16 bits of another `kind`: as if that were the only rounding. NaN becomes
    NumPy's.
    """
    width = 2 * LANES
    lane, ints = ir.VectorType(ir.DoubleType(), width), ir.VectorType(ir.IntType(32), width)
    floats, added = ir.VectorType(simd.F32, width), simd.load(builder, bias, lane, 8)

    def line(carried: list[Any]) -> list[Any]:
        to, source = carried
        value = builder.fadd(simd.load(builder, source, lane, 8), added)
        nan = builder.fcmp_unordered("uno", value, value)
        value = builder.select(nan, simd.constant(lane, float("nan")), value)
        single = builder.fptrunc(value, floats)
        if kind != "f32":
            near, bits = builder.fpext(single, lane), builder.bitcast(single, ints)
            positive = builder.fcmp_ordered(">", value, simd.constant(lane, 0.0))
            above = builder.fcmp_ordered(">", near, value)
            below = builder.fcmp_ordered("<", near, value)
            far = builder.select(positive, above, below)  # away from zero
            bits = builder.sub(bits, builder.zext(far, ints))
            bits = builder.or_(bits, builder.zext(builder.or_(above, below), ints))
            single = builder.bitcast(bits, floats)
        simd.store(builder, single, to)
        return [builder.add(to, I64(4 * width)), builder.add(source, I64(8 * width))]

    simd.loop(builder, count, [to, source], line, "round")
