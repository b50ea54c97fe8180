"""Depthwise weight gradients as one instruction sequence: few taps, many groups, so that nothing else may cost time.

The batch is that of `kernels.emit.brgemm`, in which `b` has as many lanes as there are groups and each row of `a`, a
tap, an offset of its own. One call has all groups: a few taps over a box of pixels, in channels that lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from kernels.emit import simd
from kernels.emit.brgemm import Batch, Element
from kernels.emit.compiler import emitted_entry
from kernels.emit.intrinsics import load_wide, size_of
from kernels.target import target

__all__ = ["LANE_DTYPES", "LANE_ROWS", "LINES_KEPT", "LINE_TAPS", "lane_entries", "lane_table", "lane_taps"]

LINE_TAPS = 3
"""Taps of a kernel line whose values may stay in registers from one position to the next."""

LANE_ROWS = 9
"""Rows of the tallest tile without kept lines: a 3x3 kernel."""

LINES_KEPT = LANE_ROWS // LINE_TAPS if target().registers == 32 else 0
"""Kernel lines up to which tiles keep values in registers, where there are 32; the table has them last."""

LANE_DTYPES = ("f32", "bf16", "f16") if target().converts_f16 else ("f32", "bf16")
"""Dtypes in which both tensors are read; f16 takes an instruction for it."""


def lane_taps(rows: int, vectors: int, width: int, kind: str, kept: int = 0) -> Callable[..., None]:
    """Make what emits the tile of `rows` taps of `width` groups each, for tensors with adjacent groups.

    The tile takes the addresses of a `Batch` and of the byte offsets of its rows, first those of their taps in `a` and
    then those of their sums in `c`. Both tensors are read as vectors of stored `kind`. The tile visits all of the
    batch's vectors, `vectors` at a time: one that begins inside a cache line shares its last line with the next one.
    Sums are added to memory where an element says so, and at the end.

    With `kept` rows are lines of `LINE_TAPS` taps of which the last ones at one position are the first `kept` ones at
    the next: these stay in registers.
    """
    size, lane = size_of(kind), ir.VectorType(simd.F32, width)

    def emit(builder: Any, where: Any, offsets: Any) -> None:
        batch = simd.fields(builder, where, Batch)
        taps, places = (
            [simd.load(builder, builder.add(offsets, simd.I64(8 * (first + m))), simd.I64, 8) for m in range(rows)]
            for first in (0, rows)
        )

        def group(count: int) -> Callable[[list[Any]], list[Any]]:
            """Sum `count` vectors of groups."""
            zeros = [simd.constant(lane, 0.0)] * (count * rows)

            def read(place: Any) -> list[Any]:
                each = [builder.add(place, simd.I64(size * width * j)) for j in range(count)]
                return [load_wide(builder, one, kind, width) for one in each]

            def position(carried: list[Any]) -> list[Any]:
                a, b, *sums = carried
                known, following, line = sums[count * rows :], [], read(b)
                for m, offset in enumerate(taps):
                    tap = m % LINE_TAPS
                    first = count * (m // LINE_TAPS * kept + tap)
                    taken = known[first : first + count] if tap < kept else read(builder.add(a, offset))
                    if tap >= LINE_TAPS - kept:
                        following += taken
                    for j in range(count):
                        sums[count * m + j] = simd.multiply_add(builder, taken[j], line[j], sums[count * m + j])
                sums[count * rows :] = following
                return [simd.opaque(builder, builder.add(a, batch.a_step)), builder.add(b, batch.b_step), *sums]

            def body(carried: list[Any]) -> list[Any]:
                a, b, c = carried

                def add_sums(sums: list[Any]) -> None:
                    for index, value in enumerate(sums):
                        to = simd.nth(builder, c, batch.c_row, index % count)
                        simd.add_to(builder, value, builder.add(to, places[index // count]))

                def element(carried: list[Any]) -> list[Any]:
                    place, *sums = carried
                    found = simd.fields(builder, place, Element)
                    start = builder.add(a, found.a)
                    first = [offset for m, offset in enumerate(taps) if m % LINE_TAPS < kept]
                    begin = [value for offset in first for value in read(builder.add(start, offset))]
                    begin = [start, builder.add(b, found.b), *sums, *begin]
                    _, _, *sums = simd.loop(builder, found.steps, begin, position, "position", rolled=True)
                    sums, here = sums[: count * rows], builder.block
                    with builder.if_then(builder.icmp_signed("!=", found.flush, simd.I64(0))):
                        add_sums(sums)
                        flushed = builder.block
                    sums = simd.join(builder, sums, here, zeros, flushed)
                    return [builder.add(place, simd.I64(Element.dtype.itemsize)), *sums]

                start = [batch.elements, *zeros]
                _, *sums = simd.loop(builder, batch.count, start, element, "element", rolled=True)
                add_sums(sums)
                on = simd.I64(size * width * count)
                return [builder.add(a, on), builder.add(b, on), simd.nth(builder, c, batch.c_row, count)]

            return body

        simd.runs(builder, batch.vectors, [batch.a, batch.b, batch.c], (vectors, 1), group)

    return emit


def _entry(dtype: str, rows: int) -> Callable[[], int]:
    """List one tile for compiling; return what gives its address."""
    taps, kept = (LINE_TAPS * (rows - LANE_ROWS), LINE_TAPS - 1) if rows > LANE_ROWS else (rows, 0)
    emit = lane_taps(taps, target().registers // 16 or 1, target().lanes, dtype, kept)
    return emitted_entry(f"taps_{rows}_{dtype}", emit, 2)


def lane_entries() -> list[tuple[str, int]]:
    """List dtype and place in the table of each tile: its rows, or `LANE_ROWS` and its lines of kept taps."""
    return list(_ENTRIES)


_ENTRIES = {
    (dtype, rows): _entry(dtype, rows) for dtype in LANE_DTYPES for rows in range(1, LANE_ROWS + LINES_KEPT + 1)
}


@cache
def lane_table() -> npt.NDArray[np.int64]:
    """Return the tiles' addresses as [dtype][rows]."""
    table = np.zeros((len(LANE_DTYPES), LANE_ROWS + LINES_KEPT + 1), np.int64)
    for (dtype, rows), address in _ENTRIES.items():
        table[LANE_DTYPES.index(dtype), rows] = address()
    return table
