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

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from kernels.emit import simd
from kernels.emit.compiler import Record, Vector, emitted, numbers
from kernels.target import target

__all__ = [
    "FACTORS", "TAPS", "TileLine", "count_taps", "put_outputs", "transform_line", "transform_taps",
]  # fmt: skip

FACTORS, TAPS = 4, 3
"""Products of a tile and its taps along one axis."""

_LANES = target().lanes
_VECTOR = ir.VectorType(simd.F32, _LANES)
_LINE = 4 * _LANES
_HALF = simd.constant(_VECTOR, 0.5)

Along = Callable[[Any, list[Any]], list[Any]]


class TileLine(Record):
    """A line of tiles of a + sign * b, where a and b are two rows of a tensor, and where their factors go; in bytes.

    `rows` are the addresses of column 0 of both rows, `steps` lead from a column to the next one. The first tile begins
    at column `first`; outside of the `columns` that exist, `zero` is read, the address of two vectors of zeros. `count`
    (at least 1) tiles are written from `to` on, `step` apart, and their four factors `plane` apart.
    """

    rows: Vector = numbers(2)
    steps: Vector = numbers(2)
    sign: int
    first: int
    columns: int
    zero: int
    count: int
    to: int
    step: int
    plane: int


def _transform_line(builder: Any, line: Any, wide: bool, vectors: int) -> list[Any]:
    """Transform a line of tiles, for `vectors` adjacent vectors of channels; it gives no values."""
    signs = simd.splat(builder, builder.sitofp(line.sign, simd.F32), _LANES)

    def column(x: Any) -> list[Any]:
        inside = builder.icmp_unsigned("<", x, line.columns)
        rows = [
            builder.select(inside, builder.add(row, builder.mul(x, step)), line.zero)
            for row, step in zip(line.rows, line.steps, strict=True)
        ]
        loaded = []
        for vector in range(vectors):
            one, other = (simd.load(builder, builder.add(row, simd.I64(_LINE * vector)), _VECTOR) for row in rows)
            loaded.append(simd.multiply_add(builder, signs, other, one))
        return loaded

    def put(to: Any, vector: int, factors: list[Any]) -> None:
        for number, value in enumerate(factors):
            place = simd.nth(builder, to, line.plane, number)
            simd.store(builder, value, builder.add(place, simd.I64(_LINE * vector)))

    def wide_tile(carried: list[Any]) -> list[Any]:
        x, to, *held = carried
        following = column(x) + column(builder.add(x, simd.I64(1)))
        for vector in range(vectors):
            d0, d1, d2, d3 = (each[vector + vectors * i] for each in (held, following) for i in range(2))
            put(to, vector, [builder.fsub(d0, d2), builder.fadd(d1, d2), builder.fsub(d2, d1), builder.fsub(d3, d1)])
        return [builder.add(x, simd.I64(2)), builder.add(to, line.step), *following]

    def narrow_tile(carried: list[Any]) -> list[Any]:
        x, to = carried
        for vector, (g0, g1) in enumerate(zip(column(x), column(builder.add(x, simd.I64(1))), strict=True)):
            put(to, vector, [g0, builder.fadd(g0, g1), builder.fsub(g0, g1), g1])
        return [builder.add(x, simd.I64(2)), builder.add(to, line.step)]

    if wide:
        held = column(line.first) + column(builder.add(line.first, simd.I64(1)))
        start = [builder.add(line.first, simd.I64(2)), line.to, *held]
        simd.loop(builder, line.count, start, wide_tile, "tile", rolled=True)
    else:
        simd.loop(builder, line.count, [line.first, line.to], narrow_tile, "tile", rolled=True)
    return []


@emitted
def transform_line(builder: Any, wide: Any, vectors: Any, place: Any) -> None:
    """Transform the `TileLine` at an address, of the wide tensor (1) or the narrow one (0), for 1 or 2 vectors."""
    line = simd.fields(builder, place, TileLine)
    number = builder.add(builder.mul(wide, simd.I64(2)), vectors)
    kinds = {2 * tensor + count: (tensor, count) for tensor in (False, True) for count in (1, 2)}
    simd.switch(builder, number, {each: partial(_transform_line, builder, line, *kinds[each]) for each in kinds})


def _both_axes(builder: Any, along: Along, places: list[list[Any]]) -> list[list[Any]]:
    """Load vectors and transform them `along` both axes; return them column by column."""
    rows = [along(builder, [simd.load(builder, each, _VECTOR) for each in row]) for row in places]
    return [along(builder, [row[x] for row in rows]) for x in range(len(rows[0]))]


def _grid(builder: Any, begin: Any, step: Any, size: int) -> list[list[Any]]:
    """Return addresses `step` bytes apart, as `size` rows."""
    return [[simd.nth(builder, begin, step, size * y + x) for x in range(size)] for y in range(size)]


def _transform(along: Along, sizes: tuple[int, int], builder: Any, *values: Any) -> None:
    """Transform squares of vectors of the first size to squares of the other, `vectors` (at least 1) side by side.

    Arguments: where they lie, bytes between vectors of a square, vectors, where the results go, bytes between these.
    """
    source, source_step, vectors, to, to_step = values

    def vector(carried: list[Any]) -> list[Any]:
        places, targets = (
            _grid(builder, place, step, size)
            for place, step, size in zip(carried, (source_step, to_step), sizes, strict=True)
        )
        for x, column in enumerate(_both_axes(builder, along, places)):
            for y, value in enumerate(column):
                simd.store(builder, value, targets[y][x])
        return [builder.add(each, simd.I64(_LINE)) for each in carried]

    simd.loop(builder, vectors, [source, to], vector, "square", rolled=True)


def _taps_of(builder: Any, m: list[Any]) -> list[Any]:
    both = builder.fmul(builder.fadd(m[1], m[2]), _HALF)
    return [builder.fadd(m[0], both), builder.fmul(builder.fsub(m[1], m[2]), _HALF), builder.fadd(both, m[3])]


def _factors_of(builder: Any, g: list[Any]) -> list[Any]:
    outer, inner = builder.fmul(builder.fadd(g[0], g[2]), _HALF), builder.fmul(g[1], _HALF)
    return [g[0], builder.fadd(outer, inner), builder.fsub(outer, inner), g[2]]


def _outputs_of(builder: Any, m: list[Any]) -> list[Any]:
    one = builder.fadd(m[0], builder.fadd(m[1], m[2]))
    return [one, builder.fadd(builder.fsub(m[1], m[2]), m[3])]


count_taps = emitted(partial(_transform, _taps_of, (FACTORS, TAPS)))
"""Turn the sums of 16 products into 9 taps (see `_transform`)."""

transform_taps = emitted(partial(_transform, _factors_of, (TAPS, FACTORS)))
"""Turn 9 taps into 16 factors."""


@emitted
def put_outputs(builder: Any, *values: Any) -> None:
    """Turn the sums of 16 products into 2x2 outputs plus `bias`, for `vectors` (at least 1) vectors of channels.

    The sums lie `plane` bytes apart from `source` on, those of the fourth vertical product from `last` on. The outputs
    are written from `to` on, `right` bytes and `down` bytes apart; a step of 0 leaves out those which don't exist.
    """
    source, last, plane, vectors, bias, to, right, down = values
    beside, below = (builder.icmp_signed("!=", step, simd.I64(0)) for step in (right, down))

    def vector(carried: list[Any]) -> list[Any]:
        source, last, bias, to = carried
        rows = [*_grid(builder, source, plane, FACTORS)[:-1], _grid(builder, last, plane, FACTORS)[0]]
        added = simd.load(builder, bias, _VECTOR)
        columns = [[builder.fadd(each, added) for each in column] for column in _both_axes(builder, _outputs_of, rows)]
        # an output that doesn't exist is its neighbour once more, at the same place
        columns[1] = [builder.select(beside, *each) for each in zip(columns[1], columns[0], strict=True)]
        for x, step in enumerate((simd.I64(0), right)):
            columns[x][1] = builder.select(below, columns[x][1], columns[x][0])
            for y, value in enumerate(columns[x]):
                place = builder.add(to, builder.add(step, down)) if y else builder.add(to, step)
                simd.store(builder, value, place)
        return [builder.add(each, simd.I64(_LINE)) for each in carried]

    simd.loop(builder, vectors, [source, last, bias, to], vector, "outputs", rolled=True)
