"""Micro-kernels of depthwise convolutions: a line of the kernel at a time, so that src is read once for all its taps.

    c[p, :] = start + sum over elements e of the batch, over k < taps:  b[e][k, :] * a[e][p * stride + k, :]

The batch is that of `kernels.emit.brgemm`, with an element for each line of `taps` and a vector of groups in place of
each word. A tile of some pixels loads the line's weights and every column of src once, `a_row` bytes from the one
before. Of these columns `steps` are inside, from number `case` on; the others are left out: each pixel meets a tap. A
line of one tap works for all strides and dilations: each pixel has a column of its own, which may be outside.
Longer lines than `TAPS` has are cut into equal ones (`line_taps`). Taps are summed in the order of that module: the
bits are the same.
"""

from __future__ import annotations

from functools import cache, partial, reduce
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from kernels.emit import simd
from kernels.emit.brgemm import Batch, Element, over_vectors
from kernels.emit.compiler import emitted_entry
from kernels.emit.intrinsics import load_wide, size_of, store_narrow
from kernels.target import target

__all__ = ["LINE_DTYPES", "LINE_ROWS", "TAPS", "line_table", "line_taps"]

WIDTH = target().lanes
_FLOATS = ir.VectorType(simd.F32, WIDTH)

TAPS = {1: (1, 2, 3, 5, 7), 2: (3, 5)}
"""Taps of a line that there are tiles for, by stride: each costs a tenth of a second of compiling or more."""

LINE_DTYPES = ("f32", "bf16", "f16") if target().converts_f16 else ("f32", "bf16")
"""Dtypes in which src is read where it lies."""

LINE_ROWS = 8 if target().registers == 32 or target().arch == "aarch64" else 4
"""Pixels of a tile: their sums and a line of weights fit the registers."""


def line_taps(taps: int, stride: int) -> int:
    """Return how many of the adjacent `taps` of a line are summed at once: as many as divide them."""
    return max((some for some in TAPS.get(stride, ()) if taps % some == 0), default=1)


def _emit(dtype: str, stride: int, builder: Any, place: Any) -> None:
    batch = simd.fields(builder, place, Batch)
    size = size_of(dtype)

    def vector(at: Any) -> None:
        stored = at if size == 4 else builder.ashr(at, simd.I64(1))
        offsets = ((batch.a, stored), (batch.b, at), (batch.c, stored), (batch.start, at))
        a, b, c, start = (builder.add(address, offset) for address, offset in offsets)
        with builder.if_then(builder.icmp_signed(">", batch.ahead_lines, simd.I64(0))):
            _prefetch(builder, batch, a, stride)

        def tile(rows: int) -> list[Any]:
            first = [simd.load(builder, start, _FLOATS)] * rows
            several = [
                partial(_sums, builder, (dtype, taps, stride), batch, (a, b), first)
                if taps in TAPS[stride]
                else partial(list, first)
                for taps in range(1, 1 + max(TAPS[stride]))
            ]
            sums = simd.switch(builder, builder.sub(batch.taps, simd.I64(1)), several)
            for row, value in enumerate(sums):
                store_narrow(builder, value, simd.nth(builder, c, batch.c_row, row), dtype)
            return []

        tiles = [partial(tile, 1 + rows) for rows in range(LINE_ROWS)]
        simd.switch(builder, builder.sub(batch.rows, simd.I64(1)), tiles)

    over_vectors(builder, batch, vector)


def _prefetch(builder: Any, batch: Any, a: Any, stride: int) -> None:
    """Ask for the columns of `ahead_lines` lines that the pixels below the tile's will be the first to meet."""
    columns = builder.mul(batch.rows, simd.I64(stride))

    def line(carried: list[Any]) -> list[Any]:
        def column(places: list[Any]) -> list[Any]:
            simd.prefetch(builder, places[0])
            return [builder.add(places[0], batch.a_row)]

        simd.loop(builder, columns, carried, column, "column", rolled=True)
        return [builder.add(carried[0], batch.ahead_row)]

    simd.loop(builder, batch.ahead_lines, [builder.add(a, batch.ahead)], line, "ahead", rolled=True)


def _sums(builder: Any, line: tuple[str, int, int], batch: Any, places: tuple[Any, Any], first: list[Any]) -> list[Any]:
    """Emit the sums of a tile, which begin with `first`, for a `line` of taps: dtype, taps, stride."""
    (dtype, taps, stride), (a, b), rows = line, places, len(first)
    columns = (rows - 1) * stride + taps
    steps = [builder.mul(batch.a_row, simd.I64(column)) for column in range(columns)]
    lines = [builder.mul(batch.b_step, simd.I64(tap)) for tap in range(taps)]

    def add(place: Any, weights: list[Any], column: int, sums: list[Any]) -> list[Any]:
        """Add the products of a column."""
        value, sums = load_wide(builder, builder.add(place, steps[column]), dtype, WIDTH), list(sums)
        for row in range(rows):
            if 0 <= column - row * stride < taps:
                sums[row] = simd.multiply_add(builder, value, weights[column - row * stride], sums[row])
        return sums

    def all_inside(place: Any, weights: list[Any], sums: list[Any]) -> list[Any]:
        for column in range(columns):
            sums = add(place, weights, column, sums)
        return sums

    def some_inside(place: Any, weights: list[Any], found: Any, sums: list[Any], most: int) -> list[Any]:
        """Add the columns that are inside; at either end at most `most` are outside."""
        end = builder.add(found.case, found.steps)
        for column in range(columns):
            inside = []
            if column < most:
                inside.append(builder.icmp_signed("<=", found.case, simd.I64(column)))
            if column >= columns - most:
                inside.append(builder.icmp_signed(">", end, simd.I64(column)))
            if not inside:
                sums = add(place, weights, column, sums)
                continue
            here, before = builder.block, sums
            with builder.if_then(reduce(builder.and_, inside)):
                after, block = add(place, weights, column, sums), builder.block
            sums = [
                old if old is new else simd.join(builder, [old], here, [new], block)[0]
                for old, new in zip(before, after, strict=True)
            ]
        return sums

    def element(carried: list[Any]) -> list[Any]:
        where, *sums = carried
        found = simd.fields(builder, where, Element)
        place, line = builder.add(a, found.a), builder.add(b, found.b)
        weights = [simd.load(builder, builder.add(line, step), _FLOATS) for step in lines]
        if taps > 1:
            sums = some_inside(place, weights, found, sums, taps - 1)
        else:
            some, whole = partial(some_inside, most=columns), builder.icmp_signed("==", found.steps, simd.I64(columns))
            several = [partial(some, place, weights, found, sums), partial(all_inside, place, weights, sums)]
            sums = simd.switch(builder, builder.zext(whole, simd.I64), several)
        return [builder.add(where, simd.I64(Element.dtype.itemsize)), *sums]

    return simd.loop(builder, batch.count, [batch.elements, *first], element, "line", rolled=True)[1:]


_ENTRIES = [
    [emitted_entry(f"line_{dtype}_{stride}", partial(_emit, dtype, stride), 1) for stride in TAPS]
    for dtype in LINE_DTYPES
]


@cache
def line_table() -> npt.NDArray[np.int64]:
    """Return the addresses of the entries [dtype][stride - 1]."""
    return np.array([[address() for address in of_dtype] for of_dtype in _ENTRIES], np.int64)
