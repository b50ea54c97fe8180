"""Micro-kernels of depthwise operations: a vector of groups in place of each word, and each column loaded once.

    c[m, :] = sum over elements e of the batch, over k < steps of e:  a[e][m, k, :] * b[e][k, :]

The batch is that of `kernels.emit.brgemm`, and taps are summed in its order: the bits are the same. Rows meet the same
columns of `a`, which are loaded once for all of them. There are two kinds:

* ``pixels``, for forward operations and data gradients: rows are dst pixels, and an element is a line of the kernel,
  which row m meets from column ``m * stride`` on. Sums begin with `start` and are stored as `dtype`. Columns are
  `a_row` bytes apart; `steps` of them lie inside src, from number `case` on. `indirection` is the address of a
  `KernelLine`.
* ``taps``, for weight gradients: rows are taps, and an element is a run of pixels. At `indirection` lie the byte
  offsets of the rows' columns, and behind them those of their sums, which are f32; from one vector of groups to the
  next it is `c_row` bytes. They are added to memory where an element flushes, and at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, reduce
from typing import Any

from llvmlite import ir

from kernels.emit import simd
from kernels.emit.brgemm import Batch, Element, over_vectors
from kernels.emit.compiler import Record, emitted_entry
from kernels.emit.intrinsics import load_wide, size_of, store_narrow
from kernels.target import target

__all__ = [
    "DTYPES_IN_PLACE", "KEPT_LINES", "KERNEL_LINE", "LINES", "PIXELS", "TAPS", "KernelLine", "Tile",
    "depthwise_entries", "depthwise_entry", "line_taps",
]  # fmt: skip

DTYPES_IN_PLACE = ("f32", "bf16", "f16") if target().converts_f16 else ("f32", "bf16")
"""Dtypes in which both tensors are read; f16 takes an instruction for it."""

LINES = {1: (1, 2, 3, 5, 7), 2: (3, 5)}
"""Taps of a line that ``pixels`` has code for, by stride: each costs a tenth of a second of compiling or more.

A line of one tap works for all strides and dilations, as no two pixels share a column; a column may lie outside src.
"""

PIXELS = 8 if target().registers == 32 or target().arch == "aarch64" else 4
"""Rows of the tallest tile of pixels: their sums and a line of weights fit the registers."""

TAPS = 9
"""Rows of the tallest tile of taps: a 3x3 kernel."""

KERNEL_LINE = 3
"""Taps of a line whose columns may stay in registers from one pixel to the next."""

KEPT_LINES = TAPS // KERNEL_LINE if target().registers == 32 else 0
"""Lines of the tallest tile that keeps columns; in `Batch.rows` such a tile is `TAPS` plus its lines."""

_LONGEST = max(LINES[1])


class KernelLine(Record):
    """A line of the kernel: its number of `taps`, and the `stride` between pixels.

    Src for the pixels below is prefetched: `ahead_lines` lines, `ahead_row` bytes apart, the first `ahead` bytes past
    `a`.
    """

    taps: int
    stride: int
    ahead: int
    ahead_row: int
    ahead_lines: int


def line_taps(taps: int, stride: int) -> int:
    """Return how many of the adjacent `taps` of a line are summed at once: as many as divide them."""
    return max((some for some in LINES.get(stride, ()) if taps % some == 0), default=1)


class Tile:
    """What tiles of both kinds share: the addresses of a vector of groups, and values stored as `dtype`."""

    def __init__(self, builder: Any, batch: Any, dtype: str, width: int) -> None:
        self.builder, self.batch, self.dtype, self.width = builder, batch, dtype, width
        self.lane = ir.VectorType(simd.F32, width)

    def _load(self, *address: Any) -> Any:
        """Load a vector from the sum of some addresses and offsets."""
        return load_wide(self.builder, reduce(self.builder.add, address), self.dtype, self.width)

    def _elements(self, sums: list[Any], add: Any) -> list[Any]:
        """Return the sums after all elements; `add` adds one of them."""

        def element(carried: list[Any]) -> list[Any]:
            place, *sums = carried
            sums = add(simd.fields(self.builder, place, Element), sums)
            return [self.builder.add(place, simd.I64(Element.dtype.itemsize)), *sums]

        start = [self.batch.elements, *sums]
        return simd.loop(self.builder, self.batch.count, start, element, "element", rolled=True)[1:]

    def pixels(self, line: Any, rows: int) -> list[Any]:
        """Emit a tile of `rows` pixels; it returns no values."""
        builder, batch = self.builder, self.batch
        sums = [simd.load(builder, batch.start, self.lane)] * rows
        kinds = [
            partial(self._elements, sums, partial(self._add_line, taps, stride)) if taps in taken else lambda: sums
            for stride, taken in LINES.items()
            for taps in range(1, 1 + _LONGEST)
        ]
        of_stride = builder.mul(builder.sub(line.stride, simd.I64(1)), simd.I64(_LONGEST))
        sums = simd.switch(builder, builder.add(of_stride, builder.sub(line.taps, simd.I64(1))), kinds)
        for row, value in enumerate(sums):
            store_narrow(builder, value, simd.nth(builder, batch.c, batch.c_row, row), self.dtype)
        return []

    def _add_line(self, taps: int, stride: int, element: Any, sums: list[Any]) -> list[Any]:
        """Add the products of a line of the kernel, column by column."""
        builder, batch, rows = self.builder, self.batch, len(sums)
        columns, end = (rows - 1) * stride + taps, builder.add(element.case, element.steps)
        a, b = builder.add(batch.a, element.a), builder.add(batch.b, element.b)
        weights = [simd.load(builder, simd.nth(builder, b, batch.b_step, tap), self.lane) for tap in range(taps)]

        def add(column: int, sums: list[Any]) -> list[Any]:
            value, sums = self._load(simd.nth(builder, a, batch.a_row, column)), list(sums)
            for row in range(rows):
                if 0 <= column - row * stride < taps:
                    sums[row] = simd.multiply_add(builder, value, weights[column - row * stride], sums[row])
            return sums

        def add_inside(most: int) -> list[Any]:
            """Add the columns that are inside; at either end at most `most` are outside."""
            found = sums
            for column in range(columns):
                inside = []
                if column < most:
                    inside.append(builder.icmp_signed("<=", element.case, simd.I64(column)))
                if column >= columns - most:
                    inside.append(builder.icmp_signed(">", end, simd.I64(column)))
                if not inside:
                    found = add(column, found)
                    continue
                here, before = builder.block, found
                with builder.if_then(reduce(builder.and_, inside)):
                    after, block = add(column, found), builder.block
                found = [
                    old if old is new else simd.join(builder, [old], here, [new], block)[0]
                    for old, new in zip(before, after, strict=True)
                ]
            return found

        if taps > 1:
            return add_inside(taps - 1)
        whole = builder.icmp_signed("==", element.steps, simd.I64(columns))
        return simd.switch(
            builder, builder.zext(whole, simd.I64), [partial(add_inside, columns), partial(add_inside, 0)]
        )

    def taps(self, rows: int, kept: int, vectors: int = 1) -> list[Any]:
        """Emit a tile of `rows` taps and so many adjacent `vectors`; it returns no values.

        With `kept`, rows are lines of `KERNEL_LINE` taps, of which the last ones at one pixel are the first `kept` ones
        at the next.
        """
        builder, batch, size = self.builder, self.batch, size_of(self.dtype) * self.width
        numbers = [
            simd.load(builder, builder.add(batch.indirection, simd.I64(8 * m)), simd.I64, 8) for m in range(2 * rows)
        ]
        columns, places, zeros = numbers[:rows], numbers[rows:], [simd.constant(self.lane, 0.0)] * (rows * vectors)
        first = [m for m in range(rows) if m % KERNEL_LINE < kept]

        def load(*address: Any) -> list[Any]:
            return [self._load(*address, simd.I64(size * j)) for j in range(vectors)]

        def pixel(carried: list[Any]) -> list[Any]:
            a, b, sums, known = *carried[:2], carried[2 : 2 + len(zeros)], carried[2 + len(zeros) :]
            line, following = load(b), []
            for m, offset in enumerate(columns):
                at = vectors * first.index(m) if m in first else 0
                values = known[at : at + vectors] if m in first else load(a, offset)
                if m % KERNEL_LINE >= KERNEL_LINE - kept:
                    following += values
                for j, value in enumerate(values):
                    sums[vectors * m + j] = simd.multiply_add(builder, value, line[j], sums[vectors * m + j])
            a = simd.opaque(builder, builder.add(a, batch.a_step))
            return [a, builder.add(b, batch.b_step), *sums, *following]

        def flush(sums: list[Any]) -> None:
            for index, value in enumerate(sums):
                to = simd.nth(builder, batch.c, batch.c_row, index % vectors)
                simd.add_to(builder, value, builder.add(to, places[index // vectors]))

        def add(element: Any, sums: list[Any]) -> list[Any]:
            a, b = builder.add(batch.a, element.a), builder.add(batch.b, element.b)
            begin = [a, b, *sums, *(value for m in first for value in load(a, columns[m]))]
            sums = simd.loop(builder, element.steps, begin, pixel, "pixel", rolled=True)[2 : 2 + len(zeros)]
            here = builder.block
            with builder.if_then(builder.icmp_signed("!=", element.flush, simd.I64(0))):
                flush(sums)
                flushed = builder.block
            return simd.join(builder, sums, here, zeros, flushed)

        flush(self._elements(zeros, add))
        return []


def _prefetch(builder: Any, batch: Any, line: Any) -> None:
    """Prefetch the columns of `ahead_lines` lines that the pixels below the tile's will be the first to meet."""

    def ahead(carried: list[Any]) -> list[Any]:
        def column(places: list[Any]) -> list[Any]:
            simd.prefetch(builder, places[0])
            return [builder.add(places[0], batch.a_row)]

        simd.loop(builder, builder.mul(batch.rows, line.stride), carried, column, "column", rolled=True)
        return [builder.add(carried[0], line.ahead_row)]

    with builder.if_then(builder.icmp_signed(">", line.ahead_lines, simd.I64(0))):
        simd.loop(builder, line.ahead_lines, [builder.add(batch.a, line.ahead)], ahead, "ahead", rolled=True)


def _emit_pixels(dtype: str, builder: Any, place: Any) -> None:
    """Emit the tiles of pixels, for one vector of groups after another."""
    batch = simd.fields(builder, place, Batch)
    tile, line = Tile(builder, batch, dtype, target().lanes), simd.fields(builder, batch.indirection, KernelLine)
    a, b, c, start = batch.a, batch.b, batch.c, batch.start

    def vector(at: Any) -> None:
        stored = at if size_of(dtype) == 4 else builder.ashr(at, simd.I64(1))
        batch.a, batch.b, batch.c, batch.start = map(builder.add, (a, b, c, start), (stored, at, stored, at))
        _prefetch(builder, batch, line)
        tiles = [partial(tile.pixels, line, 1 + rows) for rows in range(PIXELS)]
        simd.switch(builder, builder.sub(batch.rows, simd.I64(1)), tiles)

    over_vectors(builder, batch, vector)


def _emit_taps(dtype: str, builder: Any, place: Any) -> None:
    """Emit the tiles of taps; two vectors at a time, since one after another takes up to 1.5 times as long."""
    batch = simd.fields(builder, place, Batch)
    tile, most = Tile(builder, batch, dtype, target().lanes), target().registers // 16 or 1
    tiles = [(rows, 0) for rows in range(1, 1 + TAPS)]
    tiles += [(KERNEL_LINE * lines, KERNEL_LINE - 1) for lines in range(1, 1 + KEPT_LINES)]

    def some(vectors: int) -> Callable[[list[Any]], list[Any]]:
        def body(carried: list[Any]) -> list[Any]:
            batch.a, batch.b, batch.c = carried
            emit = [partial(tile.taps, *shape, vectors) for shape in tiles]
            simd.switch(builder, builder.sub(batch.rows, simd.I64(1)), emit)
            on = simd.I64(size_of(dtype) * target().lanes * vectors)
            return [*(builder.add(at, on) for at in carried[:2]), simd.nth(builder, carried[2], batch.c_row, vectors)]

        return body

    simd.runs(builder, batch.vectors, [batch.a, batch.b, batch.c], (most, 1), some)


_ENTRIES = {
    (kind, dtype): emitted_entry(f"depthwise_{kind}_{dtype}", partial(emit, dtype), 1)
    for kind, emit in (("pixels", _emit_pixels), ("taps", _emit_taps))
    for dtype in DTYPES_IN_PLACE
}


def depthwise_entries() -> list[tuple[str, str]]:
    """List kind and dtype of each entry."""
    return list(_ENTRIES)


@cache
def depthwise_entry(kind: str, dtype: str) -> int:
    """Return the address of the micro-kernel of a kind, for tensors that are stored as `dtype`."""
    return _ENTRIES[kind, dtype]()
