"""Micro-kernels of all sums: batch-reduce products that keep a tile of sums in registers.

    c[m, :] = start + sum over elements e of the batch, over k < steps of e:  a[e][m, k] * b[e][k, :]

A batch lists what a tile sums (batch-reduce GEMM: Georganas et al., https://arxiv.org/abs/1906.06440). Rows of forward
operations are dst pixels, and an element is a kernel tap, or a run of taps and channels that follow each other in
memory. Rows of weight gradients are channels, or taps of a line, and an element is a run of pixels. `a` is read where
it lies, `a_row` bytes from a row to the next one. `b` is packed in lines of one vector. So rank, stride, dilation,
phase and border are addresses of the list alone. A tap that is outside for the first or the last rows of a tile leaves
these rows out.

There are four kinds of products (`MICRO`):

* ``f32``: `a` holds words of f32, each multiplied with a line of f32.
* ``dots``: `a` holds words of two bf16, lines have pairs of bf16; VDPBF16PS, which takes subnormal numbers as zeros.
* ``pairs``: the same on ordinary instructions, which keep them. Where none is subnormal, the bits are the same: both
  add the second products of a pair, then the first ones, rounding each time.
* ``lanes``: `a` holds lines of f32 as well, and every lane has a problem of its own (depthwise).

Tile products of AMX (`kernels.emit.dots`) and sums of float64 (`kernels.emit.doubles`) take the same batches.

Sums over many steps lose digits, so an element may ask for a `flush`: the sums so far are added to a second set in
memory, which begins with `start`, and begin anew. Which elements do so decides bits; tiles, rows and vectors do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from kernels.emit import simd
from kernels.emit.amx import flush, halves
from kernels.emit.compiler import Record, emitted_entry
from kernels.target import target

__all__ = [
    "FLUSH", "FLUSH_FIRST", "MASKS", "MICRO", "ROWS", "SKIPS", "Batch", "Element", "cases", "micro_entries",
    "micro_table", "over_vectors", "product", "rounded", "sum_elements", "write_sums",
]  # fmt: skip

WIDTH = target().lanes

MICRO = {"f32": 0, "lanes": 2, "dots": 4, "pairs": 6}
"""Entries of `micro_table` of a kind: the first one has tiles of one vector, the next one those of two.

With ``lanes`` a tile has one vector, and vectors of lanes are summed one after another.
"""

ROWS = {"f32": target().batch_rows, "lanes": {1: target().batch_rows[1]}} | (
    {"dots": target().batch_rows, "pairs": {1: 4, 2: 4}} if target().dots == "avx512bf16" else {}
)
"""Rows of the tallest tile by kind and number of vectors."""

SKIPS = 3
"""Rows at either end of a tile that an element may leave out."""

MASKS = "avx512bw" in target().features
"""Whether the last lanes of a tile can be left unwritten."""


class Element(Record):
    """What is added to a tile: `steps` words and lines that follow each other, from byte offsets `a` and `b` on.

    `case` says for which rows: 0 for all, 2 s - 1 for all but the first s, 2 s for all but the last s. For pixels of
    `kernels.emit.depthwise` these two are columns.
    """

    a: int
    b: int
    steps: int
    case: int
    flush: int


FLUSH, FLUSH_FIRST = 1, 2
"""What an element may ask for: to add the sums to the second set, or to begin it."""


class Batch(Record):
    """A tile, and the address of the `count` (at least 1) elements that it sums.

    A step leads `a_step` and `b_step` bytes on; `b_vector` leads from a line to that of the next vector, `c_row` from a
    row of sums to the next one. Sums begin with the lines at `start`, `start_row` bytes apart; or at zero where they
    are formed `apart`, and those lines are added at the first flush, or at the end. Sums that go on, whose `start_row`
    is not 0, have been flushed before. `totals` has the address of a second set of sums, whose rows are `totals_row`
    apart, or 0 where no element flushes. Of the last vector `valid` lanes are written (all, without `MASKS`). With
    `rounds` (dots and pairs only) sums are written as bf16, otherwise as f32. The rows from `next` on are likely to be
    written next.

    Lanes: `vectors` of them are summed in turn, and the last begins at most `last` bytes after the first.
    Depthwise sums and tile products of AMX find what only they need at `indirection`, an address.
    """

    rows: int
    a: int
    a_row: int
    a_step: int
    b: int
    b_vector: int
    b_step: int
    elements: int
    count: int
    c: int
    c_row: int
    next: int
    start: int
    start_row: int
    apart: int
    totals: int
    totals_row: int
    valid: int
    rounds: int
    vectors: int
    last: int
    indirection: int


_LINE = 4 * WIDTH
_I32 = ir.IntType(32)
_FLOATS, _INTS = ir.VectorType(simd.F32, WIDTH), ir.VectorType(_I32, WIDTH)
_ZERO = simd.constant(_FLOATS, 0.0)


def cases(size: int, most: int) -> list[tuple[int, int]]:
    """Return the first and the last row, or column, of each case of a tile, which leaves out `most` at either end."""
    return [(0, size), *(rest for skip in range(1, most + 1) for rest in ((skip, size), (0, size - skip)))]


def _dot_product(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """VDPBF16PS: add the second products of 16 pairs, then the first ones."""
    if "avx512bf16" not in target().imitated:
        pairs = ir.VectorType(simd.BFloat(), 32)
        factors = [builder.bitcast(each, pairs) for each in (a, b)]
        return simd.call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, total, *factors)
    fma = simd.fma(builder, _FLOATS)
    total = flush(builder, total)
    for left, right in reversed(list(zip(halves(builder, a), halves(builder, b), strict=True))):
        total = flush(builder, builder.call(fma, [flush(builder, left), flush(builder, right), total]))
    return total


def product(builder: Any, kind: str, total: Any, a: Any, b: Any) -> Any:
    """Add the products of a kind: vectors of f32, or of pairs of bf16 as i32."""
    if kind == "dots":
        return _dot_product(builder, total, a, b)
    if kind == "pairs":
        for left, right in reversed(list(zip(halves(builder, a), halves(builder, b), strict=True))):
            total = builder.call(simd.fma(builder, _FLOATS), [left, right, total])
        return total
    return simd.multiply_add(builder, a, b, total)


def rounded(builder: Any, kind: str, value: Any) -> Any:
    """Round to bf16: sums of dots, none of them subnormal, by the instruction that takes such numbers as zeros."""
    if kind == "dots" and not target().imitated:
        name, stored = "llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(simd.BFloat(), WIDTH)
        bits = simd.call(builder, name, stored, value)
        return builder.bitcast(bits, ir.VectorType(ir.IntType(16), WIDTH))
    return simd.narrow(builder, value, "bf16")


def sum_elements(builder: Any, batch: Any, sums: list[Any], add: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Return the sums after all elements of a batch; `add` adds one of them."""

    def element(carried: list[Any]) -> list[Any]:
        place, *sums = carried
        sums = add(simd.fields(builder, place, Element), sums)
        return [builder.add(place, simd.I64(Element.dtype.itemsize)), *sums]

    return simd.loop(builder, batch.count, [batch.elements, *sums], element, "element", rolled=True)[1:]


def write_sums(builder: Any, batch: Any, kind: str, write: Callable[[int], None]) -> None:
    """Emit what writes sums, given the bytes of each: 2 for products of bf16 where the batch `rounds` them, or 4."""
    if kind not in ("dots", "pairs"):
        write(4)
        return
    with builder.if_else(builder.icmp_signed("!=", batch.rounds, simd.I64(0))) as (rounds, plain):
        with rounds:
            write(2)
        with plain:
            write(4)


class _Tile:
    """A tile of so many `rows` and `vectors`, emitted once."""

    def __init__(self, builder: Any, kind: str, rows: int, vectors: int, batch: Any) -> None:
        self.builder, self.kind, self.rows, self.vectors, self.batch = builder, kind, rows, vectors, batch
        self.places = [(m, j) for m in range(rows) for j in range(vectors)]

    def _lines(self, *place: Any) -> list[Any]:
        """Return the addresses of the tile's lines, from the address of the first one and the bytes between rows."""
        base, row = (simd.opaque(self.builder, each, here=True) for each in place)
        return [
            self.builder.add(simd.nth(self.builder, base, row, m), simd.I64(_LINE * j))
            for m in range(self.rows)
            for j in range(self.vectors)
        ]

    def _start(self) -> list[Any]:
        lines = self._lines(self.batch.start, self.batch.start_row)
        return [simd.load(self.builder, line, _FLOATS) for line in lines]

    def _put_totals(self, sums: list[Any]) -> list[Any]:
        """Make the second set of sums what is given, and give new sums."""
        for line, value in zip(self._lines(self.batch.totals, self.batch.totals_row), sums, strict=True):
            simd.store(self.builder, value, line)
        return [_ZERO] * len(sums)

    def _begin(self) -> list[Any]:
        """Return the first values of the sums; sums that go on are their own second set, if there is one."""
        builder, batch = self.builder, self.batch
        together = builder.sub(simd.I64(1), batch.apart)
        sums = simd.when(builder, together, [_ZERO] * len(self.places), self._start)
        goes_on = builder.icmp_signed("!=", batch.start_row, simd.I64(0))
        with builder.if_then(builder.and_(goes_on, builder.icmp_signed("!=", batch.totals, simd.I64(0)))):
            self._put_totals(self._start())
        return sums

    def _add(self, sums: list[Any], first: Any) -> list[Any]:
        """Return the second set of sums, or if this is the `first` time what they begin with, plus sums."""
        builder, batch = self.builder, self.batch
        places = (batch.start, batch.totals), (batch.start_row, batch.totals_row)
        lines = self._lines(*(builder.select(first, *pair) for pair in places))
        return [builder.fadd(simd.load(builder, line, _FLOATS), value) for line, value in zip(lines, sums, strict=True)]

    def _steps(self, element: Any, sums: list[Any], low: int, high: int) -> list[Any]:
        """Add the products of an element to the rows from `low` to `high`.

        Rows are one, two or three strides from every third one: as many addresses as fit registers.
        """
        builder, batch = self.builder, self.batch
        a, b = builder.add(batch.a, element.a), builder.add(batch.b, element.b)
        heads = range(low // 3, (high - 1) // 3 + 1)
        lanes, plain = self.kind == "lanes", self.kind in ("f32", "lanes")
        stored = _FLOATS if lanes else simd.F32 if plain else _I32

        def step(carried: list[Any]) -> list[Any]:
            places, line, sums = carried[: len(heads)], carried[len(heads)], carried[len(heads) + 1 :]
            lines = [
                simd.load(builder, simd.nth(builder, line, batch.b_vector, j), _FLOATS if plain else _INTS)
                for j in range(self.vectors)
            ]  # fmt: skip
            for m in range(low, high):
                at = simd.nth(builder, places[m // 3 - heads[0]], batch.a_row, m % 3)
                word = simd.load(builder, at, stored, 4 if plain else 2)
                word = word if lanes else simd.splat(builder, word, WIDTH)
                for j in range(self.vectors):
                    sums[m * self.vectors + j] = product(builder, self.kind, sums[m * self.vectors + j], word, lines[j])
            following = [simd.opaque(builder, builder.add(place, batch.a_step)) for place in places]
            return [*following, builder.add(line, batch.b_step), *sums]

        begin = [simd.nth(builder, a, batch.a_row, 3 * head) for head in heads]
        return simd.loop(builder, element.steps, [*begin, b, *sums], step, "step", rolled=True)[len(heads) + 1 :]

    def _element(self, element: Any, sums: list[Any]) -> list[Any]:
        """Add one element to the sums."""
        builder = self.builder
        rows = cases(self.rows, min(SKIPS, self.rows - 1))
        steps = {case: partial(self._steps, element, sums, *some) for case, some in enumerate(rows)}
        joined = simd.switch(builder, element.case, steps)

        first = builder.icmp_signed("==", element.flush, simd.I64(FLUSH_FIRST))
        return simd.when(builder, element.flush, joined, lambda: self._put_totals(self._add(joined, first)))

    def emit(self) -> list[Any]:
        """Emit the tile, which gives no values."""
        builder, batch = self.builder, self.batch
        for line in self._lines(batch.next, batch.c_row)[:: min(self.vectors, max(1, 64 // _LINE))]:
            simd.prefetch(builder, line, write=True)
        sums = sum_elements(builder, batch, self._begin(), self._element)
        unflushed = builder.icmp_signed("==", batch.totals, simd.I64(0))
        whole = simd.when(builder, builder.or_(batch.totals, batch.apart), sums, lambda: self._add(sums, unflushed))
        write_sums(builder, batch, self.kind, partial(self._write, whole))
        return []

    def _write(self, sums: list[Any], size: int) -> None:
        builder, batch = self.builder, self.batch
        for (m, j), value in zip(self.places, sums, strict=True):
            stored = rounded(builder, self.kind, value) if size == 2 else value
            to = builder.add(simd.nth(builder, batch.c, batch.c_row, m), simd.I64(size * WIDTH * j))
            if MASKS and j == self.vectors - 1:
                _store_some(builder, stored, to, size, batch.valid)
            else:
                simd.store(builder, stored, to, size)


def _store_some(builder: Any, value: Any, address: Any, align: int, count: Any) -> None:
    """Store the first `count` lanes."""
    numbers = ir.Constant(ir.VectorType(simd.I64, WIDTH), list(range(WIDTH)))
    mask = builder.icmp_signed("<", numbers, simd.splat(builder, count, WIDTH))
    place, lane = builder.inttoptr(address, value.type.as_pointer()), "f32" if align == 4 else "i16"
    name = f"llvm.masked.store.v{WIDTH}{lane}.p0"
    simd.call(builder, name, ir.VoidType(), value, place, _I32(align), mask)


def _emit(kind: str, vectors: int, builder: Any, place: Any) -> None:
    """Emit the tiles of a kind and number of vectors, and the choice between them by their rows."""
    batch = simd.fields(builder, place, Batch)
    places = batch.a, batch.b, batch.c, batch.start, batch.next

    def tiles() -> None:
        sizes = range(1, 1 + ROWS[kind][vectors])
        simd.switch(builder, batch.rows, {rows: _Tile(builder, kind, rows, vectors, batch).emit for rows in sizes})

    def vector(at: Any) -> None:
        batch.a, batch.b, batch.c, batch.start, batch.next = (builder.add(place, at) for place in places)
        tiles()

    if kind == "lanes":
        over_vectors(builder, batch, vector)
    else:
        tiles()


def over_vectors(builder: Any, batch: Any, emit: Callable[[Any], None]) -> None:
    """Emit a loop over the vectors of lanes, each at so many bytes of f32; the last one may share lanes."""

    def vector(carried: list[Any]) -> list[Any]:
        emit(carried[0])
        following = builder.add(carried[0], simd.I64(_LINE))
        return [builder.select(builder.icmp_signed("<", following, batch.last), following, batch.last)]

    zero = simd.I64(0)
    begin = builder.select(builder.icmp_signed("<", batch.last, zero), batch.last, zero)
    simd.loop(builder, batch.vectors, [begin], vector, "vector", rolled=True)


_ENTRIES = {
    (kind, vectors): emitted_entry(f"batch_{kind}_{vectors}", partial(_emit, kind, vectors), 1)
    for kind, rows in ROWS.items()
    for vectors in rows
}


def micro_entries() -> list[tuple[str, int]]:
    """List kind and vectors of each entry that this target has."""
    return list(_ENTRIES)


@cache
def micro_table() -> npt.NDArray[np.int64]:
    """Return the addresses of the entries, each at the place of its kind plus its vectors less one; 0 for none."""
    table = np.zeros(8, np.int64)
    for (kind, vectors), address in _ENTRIES.items():
        table[MICRO[kind] + vectors - 1] = address()
    return table
