"""Micro-kernels of depthwise convolutions: a line of the kernel at a time, so that src is read once for all its taps.

    c[p, :] = start + sum over elements e of the batch, over k < taps:  b[e][k, :] * a[e][p * stride + k, :]

The batch is that of `kernels.emit.brgemm`, with an element for each line of taps and a vector of groups in place of
each word. A tile of some pixels loads the line's weights and every column of src once. A `case` leaves out columns that
are outside: 2 s - 1 the first s, 2 s the last s. Taps are summed in the order of that module: the bits are the same.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from kernels.emit import simd
from kernels.emit.brgemm import Batch, Element, cases, over_vectors
from kernels.emit.compiler import ENTRIES, Entry, emitted_callback
from kernels.emit.intrinsics import load_wide, size_of, store_narrow
from kernels.target import target

__all__ = ["LINES", "LINE_DTYPES", "LINE_ROWS", "line_table"]

WIDTH = target().lanes
_FLOATS = ir.VectorType(simd.F32, WIDTH)

LINES = ((3, 1), (3, 2), (5, 1), (5, 2))
"""Taps of a line and strides that there are micro-kernels for."""

LINE_DTYPES = ("f32", "bf16")
"""Dtypes in which src is read where it lies."""

LINE_ROWS = 8 if target().lanes == 16 or target().arch == "aarch64" else 4
"""Pixels of a tile: their sums and a line of weights fit the registers."""


def _emit(dtype: str, taps: int, stride: int, builder: Any, place: Any) -> None:
    batch = simd.fields(builder, place, Batch.dtype, *Batch.__annotations__)
    line, size = (dtype, taps, stride), size_of(dtype)

    def vector(at: Any) -> None:
        stored = at if size == 4 else builder.ashr(at, simd.I64(1))
        offsets = ((batch.a, stored), (batch.b, at), (batch.c, stored), (batch.start, at))
        a, b, c, start = (builder.add(address, offset) for address, offset in offsets)
        tiles = [partial(_tile, builder, line, 1 + rows, batch, (a, b, c, start)) for rows in range(LINE_ROWS)]
        simd.switch(builder, builder.sub(batch.rows, simd.I64(1)), tiles)

    over_vectors(builder, batch, vector)


def _tile(
    builder: Any, line: tuple[str, int, int], rows: int, batch: Any, places: tuple[Any, Any, Any, Any]
) -> list[Any]:
    """Emit a tile of so many `rows`, for a `line` of taps: dtype, taps, stride; it gives no values."""
    (dtype, taps, stride), (a, b, c, start) = line, places
    columns = (rows - 1) * stride + taps
    steps = [builder.mul(batch.a_row, simd.I64(column)) for column in range(columns)]
    lines = [builder.mul(batch.step, simd.I64(tap)) for tap in range(taps)]
    targets = [builder.add(c, builder.mul(batch.c_row, simd.I64(row))) for row in range(rows)]

    def clipped(place: Any, weights: list[Any], sums: list[Any], low: int, high: int) -> list[Any]:
        sums = list(sums)
        for column in range(low, high):
            meet = [(row, column - row * stride) for row in range(rows) if 0 <= column - row * stride < taps]
            if meet:
                value = load_wide(builder, builder.add(place, steps[column]), dtype, WIDTH)
                for row, tap in meet:
                    sums[row] = simd.multiply_add(builder, value, weights[tap], sums[row])
        return sums

    def element(carried: list[Any]) -> list[Any]:
        where, *sums = carried
        found = simd.fields(builder, where, Element.dtype, "a", "b", "case")
        place, line = builder.add(a, found.a), builder.add(b, found.b)
        weights = [simd.load(builder, builder.add(line, step), _FLOATS) for step in lines]
        rest = [partial(clipped, place, weights, sums, *case) for case in cases(columns, taps - 1)]
        joined = simd.switch(builder, found.case, rest)
        return [builder.add(where, simd.I64(Element.dtype.itemsize)), *joined]

    first = [simd.load(builder, start, _FLOATS)] * rows
    sums = simd.loop(builder, batch.count, [batch.elements, *first], element, "line", rolled=True)[1:]
    for value, to in zip(sums, targets, strict=True):
        store_narrow(builder, value, to, dtype)
    return []


@cache
def _entry(dtype: str, taps: int, stride: int) -> Any:
    """Compile an entry, or load it."""
    return emitted_callback(f"_line_{dtype}_{taps}_{stride}", partial(_emit, dtype, taps, stride), 1)


@cache
def line_table() -> npt.NDArray[np.int64]:
    """Return the addresses of the entries: those of all `LINES`, for each dtype."""
    return np.array([_entry(dtype, *line).address for dtype in LINE_DTYPES for line in LINES], np.int64)


ENTRIES.extend(
    Entry(f"line[{dtype}][{taps}][{stride}]", partial(_entry, dtype, taps, stride))
    for dtype in LINE_DTYPES
    for taps, stride in LINES
)
