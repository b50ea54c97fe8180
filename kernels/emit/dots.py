"""Tiles of bf16 products summed in f32 on AMX tile registers, or imitated; and sums of single pixels in f32.

All of them compute a block, rows of one tensor by 16 channels of the other, over pixels taken in pairs:

    acc[m, l] += sum over pixels p of a[m, p] * b[p, l]

`a` is a panel of channel planes [channel][pixel], `b` one of pixel pairs [pair][channel][2], both of bf16. A row of `a`
is a channel as one tap sees it, anywhere in the panel. Tile registers read lines of memory, so rows are staged first,
tile by tile. In forward operations channels take the place of pixels, and rows are dst pixels.

Instructions and imitations give the same bits: each rounds like the formulas in Intel's manual, which treat subnormal
numbers as zero, in what they read and in what they write.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils

from kernels.emit import simd
from kernels.emit.amx import BLOCK, FLOATS, HAS_TILES, INTS, LINE, machine
from kernels.emit.brgemm import MICRO, Batch, Element, micro_table
from kernels.emit.compiler import Record, emitted_entry
from kernels.target import target

__all__ = ["BEGIN", "BLOCKS", "DOWN", "END", "EXACT", "STAGE", "STAGED", "STEP", "TILE", "Sides", "dot_table"]

STAGED = target().dots == "amx"
"""Whether products are those of tile registers, or imitated ones, and rows are staged for them."""

STEP = 32 if STAGED else 4
"""Pixels of one step: what an AMX tile holds of a channel, or two pairs."""

TILE = 16
"""Channels on each side of a block."""

EXACT, BEGIN, END, BLOCKS, STAGE = 0, 1, 2, 3, 5
"""Entries of the table. `BLOCKS` are micro-kernels of one block of `b` and of two: tile products, or dot products."""

DOWN = 4, 2
"""Tiles of 16 rows that are summed at once, with one block of `b` and with two: four products hide their latency."""


class Sides(Record):
    """The channels of an exact block: bytes from one to the next, and the last one's number, of `a` and of `b`."""

    a_channel: int
    a_last: int
    b_channel: int
    b_last: int


_I32, _I64 = ir.IntType(32), simd.I64
_HALVES = ir.VectorType(ir.IntType(16), 16)


def _tile_products(across: int, builder: Any, place: Any) -> None:
    """Emit the tile products of a `Batch`, and the choice between them by their rows, in tiles of 16.

    `a` has 64 bytes of each row in a step, `b` a tile: 16 lines of a pair for each of 16 channels. Sums of two blocks
    lie side by side. All rows take part in each element, and elements do not flush. Rows behind the last one are read
    and written.
    """
    batch = simd.fields(builder, place, Batch)
    down = builder.lshr(builder.sub(batch.rows, _I64(1)), _I64(4))
    cases = {more: partial(_sum_tiles, 1 + more, across, builder, batch) for more in range(DOWN[across - 1])}
    simd.switch(builder, down, cases)


def _sum_tiles(down: int, across: int, builder: Any, batch: Any) -> list[Any]:
    """Sum ``down * across`` tiles in the first tile registers from `b` and `a` in the others; give no values."""
    tiles, line, of_b = machine(builder), _I64(LINE), down * across
    of_a = of_b + across

    def places(first: Any, row: Any) -> list[Any]:
        starts = [simd.nth(builder, first, builder.shl(row, _I64(4)), i) for i in range(down)]
        return [simd.nth(builder, start, line, j) for start in starts for j in range(across)]

    for tile, start in enumerate(places(batch.start, batch.start_row)):
        tiles.load(tile, start, batch.start_row)

    def step(carried: list[Any]) -> list[Any]:
        ap, bp = carried
        for i in range(down):
            a = of_a + i % (8 - of_a)
            tiles.load(a, simd.nth(builder, ap, builder.shl(batch.a_row, _I64(4)), i), batch.a_row)
            for j in range(across):
                if i == 0:
                    here = simd.nth(builder, bp, batch.b_vector, j)
                    tiles.load(of_b + j, here, line)
                    for ahead in range(0, BLOCK, 4 * LINE):  # the processor itself fetches what lies between
                        simd.prefetch(builder, builder.add(here, _I64(BLOCK + ahead)))
                tiles.dot(across * i + j, a, of_b + j)
        tiles.stay_awake()
        return [builder.add(ap, batch.a_step), builder.add(bp, _I64(BLOCK))]

    def element(carried: list[Any]) -> list[Any]:
        one = simd.fields(builder, carried[0], Element)
        simd.loop(builder, one.steps, [builder.add(batch.a, one.a), builder.add(batch.b, one.b)], step, "step")
        return [builder.add(carried[0], _I64(Element.dtype.itemsize))]

    simd.loop(builder, batch.count, [batch.elements], element, "element")
    for tile, place in enumerate(places(batch.c, batch.c_row)):
        tiles.store(tile, place, batch.c_row)
    return []


def _stage_rows(builder: Any, a: Any, offsets: Any, tile: Any, steps: Any, to: Any) -> None:
    """Copy 16 rows of `a`, from any offsets, into tiles of 16 lines that are `tile` bytes apart."""

    def line(places: list[Any]) -> list[Any]:
        simd.store(builder, simd.load(builder, places[1], INTS, 2), places[0])
        return [builder.add(places[0], tile), builder.add(places[1], _I64(LINE))]

    for row in range(16):
        offset = simd.load(builder, builder.add(offsets, _I64(8 * row)), _I64, 8)
        simd.loop(builder, steps, [builder.add(to, _I64(LINE * row)), builder.add(a, offset)], line, "line")
    if HAS_TILES:
        machine(builder).dot(0, 4, 6)  # tile products that rested for 2,048 cycles are slow at first


def _exact_block(builder: Any, *values: Any) -> None:
    """Sum up to 16 channels with 16 others pixel by pixel in f32, from the tensors themselves. See `dot_table`.

    Rows and lanes behind the last channel repeat it.
    """
    a, a_pixel, b, b_pixel, count, c, c_line, place = values
    sides = simd.fields(builder, place, Sides)
    fma, stored = simd.fma(builder, FLOATS), _HALVES.element

    def offsets(step: Any, last: Any) -> list[Any]:
        numbers = [builder.select(builder.icmp_signed("<", _I64(m), last), _I64(m), last) for m in range(16)]
        return [builder.mul(number, step) for number in numbers]

    rows, lanes = offsets(sides.a_channel, sides.a_last), offsets(sides.b_channel, sides.b_last)
    places = [builder.add(c, offset) for offset in offsets(c_line, sides.a_last)]

    def pixel(carried: list[Any]) -> list[Any]:
        ap, bp, *sums = carried
        vector = ir.Constant(_HALVES, ir.Undefined)
        for lane, offset in enumerate(lanes):
            value = simd.load(builder, builder.add(bp, offset), stored, 2)
            vector = builder.insert_element(vector, value, _I32(lane))
        vector = simd.widen(builder, vector, "bf16")
        for m, offset in enumerate(rows):
            scalar = simd.splat(builder, simd.load(builder, builder.add(ap, offset), stored, 2), 16)
            sums[m] = builder.call(fma, [simd.widen(builder, scalar, "bf16"), vector, sums[m]])
        return [builder.add(ap, a_pixel), builder.add(bp, b_pixel), *sums]

    start = [a, b, *(simd.load(builder, place, FLOATS) for place in places)]
    _, _, *sums = simd.loop(builder, count, start, pixel, "pixel")
    for place, total in zip(places, sums, strict=True):
        simd.store(builder, total, place)


def _configure(builder: Any) -> None:
    """LDTILECFG: palette 1, eight tiles of 16 rows of 64 bytes."""
    if not HAS_TILES:
        return
    words = [1, 0, *[0x0040_0040_0040_0040] * 2, 0, 0, 0x1010_1010_1010_1010, 0]
    kind = ir.ArrayType(_I64, 8)
    place = cgutils.alloca_once(builder, kind)
    builder.store(ir.Constant(kind, words), place)
    simd.call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), builder.bitcast(place, ir.IntType(8).as_pointer()))


def _release(builder: Any) -> None:
    """TILERELEASE: the kernel need not keep the tiles over a switch of tasks any more."""
    if HAS_TILES:
        simd.call(builder, "llvm.x86.tilerelease", ir.VoidType())


_EMITTERS: tuple[tuple[Callable[..., None], int], ...] = (
    (_exact_block, 8),
    (_configure, 0),
    (_release, 0),
    *((partial(_tile_products, across), 1) for across in (1, 2) if STAGED),
    *([(_stage_rows, 5)] if STAGED else []),
)
"""What emits each entry, and how many values it takes."""

_ENTRIES = [emitted_entry(f"dots_{entry}", *each) for entry, each in enumerate(_EMITTERS if target().dots else ())]


@cache
def dot_table() -> npt.NDArray[np.int64]:
    """Return the addresses of the compiled entries.

    - Micro-kernels take the address of a `Batch`.
    - `STAGE` takes (a, int64 byte offsets of 16 rows, bytes from a staged tile to that of the next step, steps, the
      first one).
    - `EXACT`, which takes one pixel after the other from the tensors, takes (a, bytes between its pixels, b, bytes
      between its pixels, pixels, acc, bytes between its rows, the address of `Sides`).

    Micro-kernels run between a call of `BEGIN` and one of `END`.
    """
    table = np.array([address() for address in _ENTRIES], np.int64)
    return table if STAGED else np.append(table, micro_table()[MICRO["dots"] : MICRO["dots"] + 2])
