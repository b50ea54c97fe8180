"""Micro-kernels whose lanes are groups, or all channels of several: each column is loaded once for a line of taps.

    c[m, :] = sum over elements e of the batch, over k < steps of e:  a[e][m, k, :] * b[e][k, :]

The batch is that of `kernels.emit.brgemm`, and taps are summed in its order: the bits are the same. Rows meet the same
columns of `a`, which are loaded once for all of them. There are three kinds:

* ``pixels``, for forward operations and data gradients: rows are dst pixels, and an element is a line of the kernel,
  which row m meets from column ``m * stride`` on. Sums begin with `start` and are stored as `dtype`. Columns are
  `a_row` bytes apart; `steps` of them lie inside src, from number `case` on. `indirection` is the address of a
  `KernelLine`.
* ``groups``: the same with 2, 4, 8 or 16 channels a group, of which a vector has all. A line of the kernel is summed
  in as many `steps` as a group has channels, and in step k all lanes of a group take the value of its channel k in each
  column. With products of bf16 a column has pairs of channels, half as many as lanes, and steps are half as many. Sums
  begin at zero, and are added to those that begin with `start` where an element flushes and at the end. Weights are
  `b_step` bytes from step to step, `b_vector` from tap to tap.
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
from kernels.emit.brgemm import Batch, over_vectors, product, rounded, sum_elements, write_sums
from kernels.emit.compiler import Record, emitted_entry
from kernels.emit.intrinsics import load_wide, size_of, store_narrow
from kernels.target import target

__all__ = [
    "DTYPES_IN_PLACE", "GROUP_LINES", "GROUP_PIXELS", "KEPT_LINES", "KERNEL_LINE", "LINES", "PIXELS", "TAPS",
    "KernelLine", "Tile", "depthwise_entries", "depthwise_entry", "grouped", "line_taps",
    "tile_sizes",
]  # fmt: skip

DTYPES_IN_PLACE = ("f32", "bf16", "f16") if target().converts_f16 else ("f32", "bf16")
"""Dtypes in which both tensors are read; f16 takes an instruction for it."""

LINES = {1: (1, 2, 3, 5, 7), 2: (3, 5)}
"""Taps of a line that ``pixels`` has code for, by stride: each costs a tenth of a second of compiling or more.

A line of one tap works for all strides and dilations, as no two pixels share a column; a column may lie outside src.
"""

GROUP_LINES = {1: (1, 2, 3), 2: (3,)}
"""The same for ``groups``."""

PIXELS = (8, 8) if target().registers == 32 or target().arch == "aarch64" else (4, 4)
"""Rows of the tallest tile of pixels, whose sums and a line of weights fit the registers; and the number up to which
there is a tile for every number of rows."""

GROUP_PIXELS = {"f32": (14, 7) if target().registers == 32 else (4, 4)} | (
    {"dots": (14, 7), "one_dots": (14, 7), "pairs": (4, 4)} if target().dots == "avx512bf16" else {}
)
"""Those of ``groups``, by product (see `kernels.emit.brgemm`); with ``one_dots`` a vector has one group. Tiles of 8 to
13 rows would save lines of 20 or 32 pixels a tenth of the time, and take a twentieth of the time to compile all."""

TAPS = 9
"""Rows of the tallest tile of taps: a 3x3 kernel."""

KERNEL_LINE = 3
"""Taps of a line whose columns may stay in registers from one pixel to the next."""

KEPT_LINES = TAPS // KERNEL_LINE if target().registers == 32 else 0
"""Lines of the tallest tile that keeps columns; in `Batch.rows` such a tile is `TAPS` plus its lines."""

_STRIDE = 1 + max(LINES[1])

_I32 = ir.IntType(32)


class KernelLine(Record):
    """A line of the kernel: its number of `taps`, its `steps`, and the `stride` between pixels.

    Src for the pixels below is prefetched: `ahead_lines` lines, `ahead_row` bytes apart, the first `ahead` bytes past
    `a`.
    """

    taps: int
    stride: int
    steps: int
    ahead: int
    ahead_row: int
    ahead_lines: int


def tile_sizes(limits: tuple[int, int]) -> list[int]:
    """Return the rows of all tiles, given those of the tallest ones."""
    return sorted({*range(1, 1 + limits[1]), limits[0]})


def grouped(src_channels: int, dst_channels: int, *, dots: bool) -> bool:
    """Return whether ``groups`` sums groups with these numbers of channels, in bf16 pairs with `dots`."""
    width = target().lanes
    fits = dst_channels < width or (dots and dst_channels == width)
    return 1 < src_channels == dst_channels and fits and width % dst_channels == 0


def line_taps(taps: int, stride: int, lines: dict[int, tuple[int, ...]]) -> int:
    """Return how many of the adjacent `taps` of a line are summed at once: as many as divide them."""
    return max((some for some in lines.get(stride, ()) if taps % some == 0), default=1)


class Tile:
    """What tiles of both kinds share: the addresses of a vector of groups, and values stored as `dtype`."""

    def __init__(self, builder: Any, batch: Any, dtype: str, width: int) -> None:
        self.builder, self.batch, self.dtype, self.width = builder, batch, dtype, width
        self.lane = ir.VectorType(simd.F32, width)

    def _load(self, *address: Any) -> Any:
        """Load a vector from the sum of some addresses and offsets."""
        return load_wide(self.builder, reduce(self.builder.add, address), self.dtype, self.width)

    def pixels(self, line: Any, rows: int) -> list[Any]:
        """Emit a tile of `rows` pixels; it returns no values."""
        sums = self._sum_lines(line, LINES, [simd.load(self.builder, self.batch.start, self.lane)] * rows, rows)
        for row, value in enumerate(sums):
            store_narrow(self.builder, value, simd.nth(self.builder, self.batch.c, self.batch.c_row, row), self.dtype)
        return []

    def _sum_lines(self, line: Any, lines: dict[int, tuple[int, ...]], sums: list[Any], rows: int) -> list[Any]:
        """Return the sums of all lines of the kernel, by the code for one of `lines`."""
        builder, add = self.builder, partial(self._add_line, rows)
        kinds = {
            _STRIDE * stride + taps: partial(sum_elements, builder, self.batch, sums, partial(add, taps, stride))
            for stride, taken in lines.items()
            for taps in taken
        }
        return simd.switch(builder, builder.add(builder.mul(line.stride, simd.I64(_STRIDE)), line.taps), kinds)

    def _add_line(self, rows: int, taps: int, stride: int, element: Any, sums: list[Any]) -> list[Any]:
        """Add the products of a line of the kernel."""
        a, b = self.builder.add(self.batch.a, element.a), self.builder.add(self.batch.b, element.b)

        def load(column: int) -> Any:
            return self._load(simd.nth(self.builder, a, self.batch.a_row, column))

        return self._add_columns((rows, taps, stride), element, b, load, sums)

    def _product(self, total: Any, value: Any, weights: Any) -> Any:
        return simd.multiply_add(self.builder, value, weights, total)

    def _add_columns(
        self, sizes: tuple[int, int, int], element: Any, b: Any, load: Callable[[int], Any], sums: list[Any]
    ) -> list[Any]:
        """Add the products of a line of the kernel, column by column; weights lie from `b` on."""
        builder, batch, (rows, taps, stride) = self.builder, self.batch, sizes
        columns, end = (rows - 1) * stride + taps, builder.add(element.case, element.steps)
        weights = [simd.load(builder, simd.nth(builder, b, batch.b_vector, tap), self.lane) for tap in range(taps)]

        def add(column: int, sums: list[Any]) -> list[Any]:
            value, sums = load(column), list(sums)
            for row in range(rows):
                if 0 <= column - row * stride < taps:
                    sums[row] = self._product(sums[row], value, weights[column - row * stride])
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
                found = simd.when(builder, reduce(builder.and_, inside), found, partial(add, column, found))
            return found

        if taps > 1:
            return add_inside(taps - 1)
        whole = builder.icmp_signed("==", element.steps, simd.I64(columns))
        inside = {0: partial(add_inside, columns), 1: partial(add_inside, 0)}
        return simd.switch(builder, builder.zext(whole, simd.I64), inside)

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

        def flush(sums: list[Any]) -> list[Any]:
            for index, value in enumerate(sums):
                to = simd.nth(builder, batch.c, batch.c_row, index % vectors)
                simd.add_to(builder, value, builder.add(to, places[index // vectors]))
            return zeros

        def add(element: Any, sums: list[Any]) -> list[Any]:
            a, b = builder.add(batch.a, element.a), builder.add(batch.b, element.b)
            begin = [a, b, *sums, *(value for m in first for value in load(a, columns[m]))]
            sums = simd.loop(builder, element.steps, begin, pixel, "pixel", rolled=True)[2 : 2 + len(zeros)]
            return simd.when(builder, element.flush, sums, partial(flush, sums))

        flush(sum_elements(builder, batch, zeros, add))
        return []


class _Groups(Tile):
    """A tile whose lanes are all channels of several groups."""

    def __init__(self, builder: Any, batch: Any, kind: str, line: Any) -> None:
        super().__init__(builder, batch, "f32" if kind == "f32" else "bf16", target().lanes)
        self.kind, self.line, ints = kind.removeprefix("one_"), line, ir.VectorType(_I32, self.width)
        self.one, self.lane = kind != self.kind, self.lane if kind == "f32" else ints
        words = ir.Constant(ints, [lane if kind == "f32" else lane // 2 for lane in range(self.width)])
        steps = simd.splat(builder, builder.trunc(line.steps, _I32), self.width)
        self.first = builder.and_(words, builder.neg(steps))  # word of the group of each lane

    def _exchanged(self, place: Any, step: Any) -> Any:
        """Return the values of a column that the lanes take in a step."""
        builder = self.builder
        if self.one:
            return simd.splat(builder, simd.load(builder, place, _I32, 2), self.width)
        lanes = builder.add(self.first, simd.splat(builder, step, self.width))
        if self.kind == "f32":
            return simd.permute(builder, self._load(place), lanes)
        half = simd.load(builder, place, ir.VectorType(simd.F32, self.width // 2), 2)
        order = ir.Constant(self.lane, [lane % (self.width // 2) for lane in range(self.width)])
        return builder.bitcast(simd.permute(builder, builder.shuffle_vector(half, half, order), lanes), self.lane)

    def _product(self, total: Any, value: Any, weights: Any) -> Any:
        return product(self.builder, self.kind, total, value, weights)

    def _add_line(self, rows: int, taps: int, stride: int, element: Any, sums: list[Any]) -> list[Any]:
        """Add the products of a line of the kernel, step by step; the second half of the sums is of those that flush.

        Columns are one, two or three from every third one: as many addresses as fit registers.
        """
        builder, batch = self.builder, self.batch
        a, b = builder.add(batch.a, element.a), builder.add(batch.b, element.b)
        heads = [simd.nth(builder, a, batch.a_row, column) for column in range(0, (rows - 1) * stride + taps, 3)]

        def step(carried: list[Any]) -> list[Any]:
            number, b, places, sums = carried[0], carried[1], carried[2 : 2 + len(heads)], carried[2 + len(heads) :]

            def load(column: int) -> Any:
                return self._exchanged(simd.nth(builder, places[column // 3], batch.a_row, column % 3), number)

            sums = self._add_columns((rows, taps, stride), element, b, load, sums)
            following = [simd.opaque(builder, builder.add(place, simd.I64(4 * self.one))) for place in places]
            return [builder.add(number, _I32(1)), builder.add(b, batch.b_step), *following, *sums]

        begin = [_I32(0), b, *heads, *sums[:rows]]
        added, totals = simd.loop(builder, self.line.steps, begin, step, "step", rolled=True)[-rows:], sums[rows:]
        zeros = [simd.constant(totals[0].type, 0.0)] * rows
        return simd.when(builder, element.flush, [*added, *totals], lambda: [*zeros, *self._total(added, totals)])

    def _total(self, sums: list[Any], totals: list[Any]) -> list[Any]:
        return [self.builder.fadd(total, value) for total, value in zip(totals, sums, strict=True)]

    def groups(self, rows: int) -> list[Any]:
        """Emit a tile of `rows` pixels; it returns no values."""
        builder, batch = self.builder, self.batch
        floats = ir.VectorType(simd.F32, self.width)
        begin = [simd.constant(floats, 0.0)] * rows + [simd.load(builder, batch.start, floats)] * rows
        sums = self._sum_lines(self.line, GROUP_LINES, begin, rows)
        sums = self._total(sums[:rows], sums[rows:])

        def write(size: int) -> None:
            for row, value in enumerate(sums):
                stored = rounded(builder, self.kind, value) if size == 2 else value
                simd.store(builder, stored, simd.nth(builder, batch.c, batch.c_row, row), size)

        write_sums(builder, batch, self.kind, write)
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


def _emit_pixels(kind: str, dtype: str, builder: Any, place: Any) -> None:
    """Emit the tiles of pixels, or of groups, for one vector after another; `dtype` is that of src, or the product."""
    batch = simd.fields(builder, place, Batch)
    line = simd.fields(builder, batch.indirection, KernelLine)
    a, b, c, start = batch.a, batch.b, batch.c, batch.start
    if kind == "pixels":
        tile, src = Tile(builder, batch, dtype, target().lanes), simd.I64(int(size_of(dtype) == 2))
        emit: Callable[[int], list[Any]] = partial(tile.pixels, line)
        dst, limits = src, PIXELS
    else:
        emit, limits = _Groups(builder, batch, dtype, line).groups, GROUP_PIXELS[dtype]
        src, dst = (simd.I64(0), simd.I64(0)) if dtype == "f32" else (simd.I64(1), batch.rounds)

    def vector(at: Any) -> None:
        places = builder.ashr(at, src), at, builder.ashr(at, dst), at
        batch.a, batch.b, batch.c, batch.start = map(builder.add, (a, b, c, start), places)
        _prefetch(builder, batch, line)
        simd.switch(builder, batch.rows, {rows: partial(emit, rows) for rows in tile_sizes(limits)})

    over_vectors(builder, batch, vector)


def _emit_taps(dtype: str, builder: Any, place: Any) -> None:
    """Emit the tiles of taps; two vectors at a time, since one after another takes up to 1.5 times as long."""
    batch = simd.fields(builder, place, Batch)
    tile, most = Tile(builder, batch, dtype, target().lanes), target().registers // 16 or 1
    tiles = {rows: (rows, 0) for rows in range(1, 1 + TAPS)}
    tiles |= {TAPS + lines: (KERNEL_LINE * lines, KERNEL_LINE - 1) for lines in range(1, 1 + KEPT_LINES)}

    def some(vectors: int) -> Callable[[list[Any]], list[Any]]:
        def body(carried: list[Any]) -> list[Any]:
            batch.a, batch.b, batch.c = carried
            emit = {number: partial(tile.taps, *shape, vectors) for number, shape in tiles.items()}
            simd.switch(builder, batch.rows, emit)
            on = simd.I64(size_of(dtype) * target().lanes * vectors)
            return [*(builder.add(at, on) for at in carried[:2]), simd.nth(builder, carried[2], batch.c_row, vectors)]

        return body

    simd.runs(builder, batch.vectors, [batch.a, batch.b, batch.c], (most, 1), some)


_ENTRIES = {
    (kind, dtype): emitted_entry(f"depthwise_{kind}_{dtype}", partial(emit, dtype), 1)
    for kind, emit, dtypes in (
        ("pixels", partial(_emit_pixels, "pixels"), DTYPES_IN_PLACE),
        ("groups", partial(_emit_pixels, "groups"), GROUP_PIXELS),
        ("taps", _emit_taps, DTYPES_IN_PLACE),
    )
    for dtype in dtypes
}


def depthwise_entries() -> list[tuple[str, str]]:
    """List kind, and dtype or product, of each entry."""
    return list(_ENTRIES)


@cache
def depthwise_entry(kind: str, dtype: str) -> int:
    """Return the address of the micro-kernel of a kind, for tensors that are stored as `dtype`, or for products."""
    return _ENTRIES[kind, dtype]()
