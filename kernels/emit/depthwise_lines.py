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
from numba import types
from numba.extending import intrinsic

from kernels.emit import simd
from kernels.emit.brgemm import Batch, Element
from kernels.emit.compiler import ENTRIES, Entry, callback
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


def _emit(builder: Any, dtype: str, taps: int, stride: int, place: Any) -> None:
    batch = simd.fields(builder, place, Batch.dtype, *Batch.__annotations__)
    size = 4 if dtype == "f32" else 2
    zero = simd.I64(0)
    begin = builder.select(builder.icmp_signed("<", batch.last, zero), batch.last, zero)

    def vector(carried: list[Any]) -> list[Any]:
        (at,) = carried  # bytes of f32
        stored = at if size == 4 else builder.ashr(at, simd.I64(1))
        a, b, c, start = (
            builder.add(address, offset)
            for address, offset in ((batch.a, stored), (batch.b, at), (batch.c, stored), (batch.start, at))
        )
        blocks = [builder.append_basic_block(f"rows{rows}") for rows in range(1, LINE_ROWS + 1)]
        after = builder.append_basic_block("rows.end")
        switch = builder.switch(batch.rows, blocks[0])
        for rows, block in enumerate(blocks, 1):
            if rows > 1:
                switch.add_case(simd.I64(rows), block)
            builder.position_at_end(block)
            _tile(builder, dtype, taps, stride, rows, batch, (a, b, c, start))
            builder.branch(after)
        builder.position_at_end(after)
        following = builder.add(at, simd.I64(4 * WIDTH))
        return [builder.select(builder.icmp_signed("<", following, batch.last), following, batch.last)]

    simd.loop(builder, batch.vectors, [begin], vector, "vector", rolled=True)


def _tile(
    builder: Any, dtype: str, taps: int, stride: int, rows: int, batch: Any, places: tuple[Any, Any, Any, Any]
) -> None:
    """Emit a tile of so many `rows`."""
    a, b, c, start = places
    size, columns = 4 if dtype == "f32" else 2, (rows - 1) * stride + taps
    raw = ir.VectorType(simd.storage(dtype), WIDTH)
    steps = [builder.mul(batch.a_row, simd.I64(column)) for column in range(columns)]
    lines = [builder.mul(batch.step, simd.I64(tap)) for tap in range(taps)]
    targets = [builder.add(c, builder.mul(batch.c_row, simd.I64(row))) for row in range(rows)]

    def clipped(place: Any, weights: list[Any], sums: list[Any], low: int, high: int) -> list[Any]:
        sums = list(sums)
        for column in range(low, high):
            meet = [(row, column - row * stride) for row in range(rows) if 0 <= column - row * stride < taps]
            if meet:
                loaded = simd.load(builder, builder.add(place, steps[column]), raw, size)
                value = simd.widen(builder, loaded, dtype, WIDTH)
                for row, tap in meet:
                    sums[row] = simd.multiply_add(builder, value, weights[tap], sums[row])
        return sums

    def element(carried: list[Any]) -> list[Any]:
        where, *sums = carried
        found = simd.fields(builder, where, Element.dtype, "a", "b", "case")
        place, line = builder.add(a, found.a), builder.add(b, found.b)
        weights = [simd.load(builder, builder.add(line, step), _FLOATS) for step in lines]
        skips = range(1, taps)
        cases = [(0, columns), *(rest for skip in skips for rest in ((skip, columns), (0, columns - skip)))]
        blocks = [builder.append_basic_block(f"case{number}") for number in range(len(cases))]
        after = builder.append_basic_block("cases.end")
        switch, ends = builder.switch(found.case, blocks[0]), []
        for number, (low, high) in enumerate(cases):
            if number:
                switch.add_case(simd.I64(number), blocks[number])
            builder.position_at_end(blocks[number])
            ends.append((clipped(place, weights, sums, low, high), builder.block))
            builder.branch(after)
        builder.position_at_end(after)
        joined = []
        for row in range(rows):
            phi = builder.phi(_FLOATS)
            for values, block in ends:
                phi.add_incoming(values[row], block)
            joined.append(phi)
        return [builder.add(where, simd.I64(Element.dtype.itemsize)), *joined]

    first = [simd.load(builder, start, _FLOATS)] * rows
    sums = simd.loop(builder, batch.count, [batch.elements, *first], element, "line", rolled=True)[1:]
    for value, to in zip(sums, targets, strict=True):
        simd.store(builder, value if dtype == "f32" else simd.narrow(builder, value, dtype, WIDTH), to, size)


@cache
def _entry(dtype: str, taps: int, stride: int) -> Any:
    """Compile an entry, or load it (see `kernels.emit.tile_table` for the why of `exec`)."""
    name = f"_line_{dtype}_{taps}_{stride}"

    def typer(typingctx: Any, batch: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            _emit(builder, dtype, taps, stride, values[0])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    space: dict[str, Any] = {"__name__": __name__, f"{name}_emit": intrinsic(typer)}
    exec(compile(f"def {name}(batch):\n    {name}_emit(batch)\n", __file__, "exec"), space)  # noqa: S102 -- our own text
    return callback("void(int64)", space[name])


@cache
def line_table() -> npt.NDArray[np.int64]:
    """Return the addresses of the entries: those of all `LINES`, for each dtype."""
    return np.array([_entry(dtype, *line).address for dtype in LINE_DTYPES for line in LINES], np.int64)


ENTRIES.extend(
    Entry(f"line[{dtype}][{taps}][{stride}]", partial(_entry, dtype, taps, stride))
    for dtype in LINE_DTYPES
    for taps, stride in LINES
)
