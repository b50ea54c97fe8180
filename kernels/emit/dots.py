"""Tiles of bf16 products summed in f32 on AMX tile registers, or imitated; and sums of single pixels in f32.

All of them compute a block, rows of one tensor by 16 channels of the other, over pixels taken in pairs:

    acc[m, l] += sum over pixels p of a[m, p] * b[p, l]

`a` is a panel of channel planes [channel][pixel], `b` one of pixel pairs [pair][channel][2], both of bf16. A row of `a`
is a channel as one tap sees it, anywhere in the panel. Tile registers read lines of memory, so rows are staged first,
tile by tile. In forward operations channels take the place of pixels, and rows are dst pixels.

AMX multiplies bf16 sixteen times as fast as vector registers multiply f32. So a value of f16 goes as the sum of two
bf16, one of f32 as that of three, and what counts of their products is summed: all four, or six of nine.

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

from kernels.dtypes import DTYPES
from kernels.emit import simd
from kernels.emit.amx import BLOCK, FLOATS, HAS_TILES, INTS, LINE, machine
from kernels.emit.brgemm import MICRO, Batch, Element, micro_table
from kernels.emit.compiler import Record, emitted_entry
from kernels.target import target

__all__ = [
    "ACROSS",
    "BEGIN",
    "BLOCKS",
    "DOWN",
    "END",
    "EXACT",
    "PARTS",
    "PRODUCTS",
    "ROWS",
    "STAGE",
    "STEP",
    "TILE",
    "USED",
    "Sides",
    "TileSteps",
    "dot_table",
]

STEP = 32 if target().dots == "amx" else 4
"""Pixels of one step: what an AMX tile holds of a channel, or two pairs."""

TILE = 16
"""Channels on each side of a block."""

EXACT, BEGIN, END, STAGE, BLOCKS = 0, 3, 4, 5, 6
"""Entries of the table: one exact block for each number of parts, and so on.

The last are micro-kernels: for each number of parts those of tile products, of one block and of two across, or without
AMX those of dot products.
"""

DOWN = {1: 4, 2: 2}
"""Tiles of 16 rows that are summed at once, by blocks across: four products hide how long each takes."""

PARTS = {"bf16": 1, "f16": 2, "f32": 3}
"""How many bf16 a value is the sum of."""

PRODUCTS = {1: ((0, 0),), 2: ((1, 1), (0, 1), (1, 0), (0, 0)), 3: ((2, 0), (1, 0), (1, 1), (0, 2), (0, 1), (0, 0))}
"""Which parts of `a` and of `b` are multiplied, by how many parts a value has: small products first.

In this order no sum on the way is larger than the absolute products of what it stands for, so sums that fit f32 are
exact. The three products that are left out are below 2**-22 of the whole one each; see `kernels.pack.lines`.
"""

ROWS, ACROSS = (TILE, 1) if target().dots == "amx" else (1, 2)
"""Rows of a block of AMX, and blocks of the narrow tensor whose sums share lines."""


class TileSteps(Record):
    """What a tile product reads by the `indirection` of its `Batch`, all in bytes.

    `a_part` and `b_part` lead from a part of the values to the next one, `a_tile` and `c_tile` from 16 rows to the next
    16, `c_vector` from the sums of a block to those of the next one across.
    """

    a_part: int
    b_part: int
    a_tile: int
    c_tile: int
    c_vector: int


class Sides(Record):
    """The channels of an exact block: bytes from one to the next, and the last one's number, of `a` and of `b`."""

    a_channel: int
    a_last: int
    b_channel: int
    b_last: int


_I32, _I64 = ir.IntType(32), simd.I64


def _tile_products(parts: int, across: int, builder: Any, place: Any) -> None:
    """Emit the tile products of a `Batch`, and the choice between them by their rows, in tiles of 16.

    `a` has 64 bytes of each row in a step, `b` a tile: 16 lines of a pair for each of 16 channels. All rows take part
    in each element, and elements do not flush. Rows behind the last one are read and written.
    """
    batch = simd.fields(builder, place, Batch)
    steps = simd.fields(builder, batch.indirection, TileSteps)
    down = builder.lshr(builder.sub(batch.rows, _I64(1)), _I64(4))
    cases = [partial(_sum_tiles, parts, 1 + more, across, builder, batch, steps) for more in range(DOWN[across])]
    simd.switch(builder, down, cases)


def _sum_tiles(parts: int, down: int, across: int, builder: Any, batch: Any, more: Any) -> list[Any]:
    """Sum ``down * across`` tiles in the first tile registers from `a` and `b` in the others; give no values.

    Where values have parts, the sums of one call are formed by themselves: added one by one to long sums, products
    would lose more digits.
    """
    tiles = machine(builder)
    line = _I64(LINE)
    blocks = [(i, j) for i in range(down) for j in range(across)]
    same = builder.icmp_signed("==", batch.start_row, _I64(0))
    start_tile = builder.select(same, _I64(0), more.c_tile)
    places, starts = (
        [simd.nth(builder, simd.nth(builder, first, more.c_vector, j), step, i) for i, j in blocks]
        for first, step in ((batch.c, more.c_tile), (batch.start, start_tile))
    )
    for tile, start in enumerate(starts):
        if parts == 1:
            tiles.load(tile, start, batch.start_row)
        else:
            tiles.zero(tile)

    turns = [(p, q, blocks[turn % down :] + blocks[: turn % down]) for turn, (p, q) in enumerate(PRODUCTS[parts])]
    wanted = [(("a", i, p), ("b", j, q)) for p, q, order in turns for i, j in order]

    def step(carried: list[Any]) -> list[Any]:
        ap, bp = carried
        held: dict[tuple[str, int, int], int] = {}

        def fetch(turn: int, key: tuple[str, int, int]) -> int:
            if key in held:
                return held[key]
            tile = len(blocks) + len(held)
            if tile == 8:  # instead of what is wanted last
                order = [each for pair in wanted[turn:] for each in pair]
                unused = [each for each in held if each not in wanted[turn]]
                tile = held.pop(max(unused, key=lambda each: order.index(each) if each in order else len(order)))
            held[key] = tile
            which, number, part = key
            if which == "a":
                here = simd.nth(builder, simd.nth(builder, ap, more.a_part, part), more.a_tile, number)
                tiles.load(tile, here, batch.a_row)
                return tile
            here = simd.nth(builder, simd.nth(builder, bp, more.b_part, part), batch.b_vector, number)
            tiles.load(tile, here, line)
            for ahead in range(0, BLOCK, 4 * LINE):  # the processor itself fetches what lies between
                simd.prefetch(builder, builder.add(here, _I64(BLOCK + ahead)))
            return tile

        for turn, (a_key, b_key) in enumerate(wanted):
            tiles.dot(across * a_key[1] + b_key[1], fetch(turn, a_key), fetch(turn, b_key))
        tiles.stay_awake()
        return [builder.add(ap, batch.a_step), builder.add(bp, _I64(BLOCK))]

    def element(carried: list[Any]) -> list[Any]:
        one = simd.fields(builder, carried[0], Element)
        simd.loop(builder, one.steps, [builder.add(batch.a, one.a), builder.add(batch.b, one.b)], step, "step")
        return [builder.add(carried[0], _I64(Element.dtype.itemsize))]

    simd.loop(builder, batch.count, [batch.elements], element, "element")

    if parts == 1:
        for tile, place in enumerate(places):
            tiles.store(tile, place, batch.c_row)
        return []

    def row(carried: list[Any]) -> list[Any]:
        to, start, source = carried
        simd.store(builder, builder.fadd(simd.load(builder, start, FLOATS), simd.load(builder, source, FLOATS)), to)
        return [builder.add(to, batch.c_row), builder.add(start, batch.start_row), builder.add(source, line)]

    with builder.goto_entry_block():
        room = builder.ptrtoint(builder.alloca(ir.ArrayType(FLOATS, 16 * len(blocks))), _I64)
    rooms = [builder.add(room, _I64(BLOCK * tile)) for tile in range(len(blocks))]
    for tile, source in enumerate(rooms):
        tiles.store(tile, source, line)
    for each in zip(places, starts, rooms, strict=True):
        simd.loop(builder, _I64(16), list(each), row, "row")
    return []


def _stage_rows(builder: Any, *values: Any) -> None:
    """Copy 16 rows of `a`, from any offsets, into tiles of 16 lines that are `tile` bytes apart."""
    a, offsets, _, tile, steps, to, *_ = values

    def row(carried: list[Any]) -> list[Any]:
        offset, dst = carried

        def line(places: list[Any]) -> list[Any]:
            simd.store(builder, simd.load(builder, places[1], INTS, 2), places[0])
            return [builder.add(places[0], tile), builder.add(places[1], _I64(LINE))]

        simd.loop(builder, steps, [dst, builder.add(a, simd.load(builder, offset, _I64, 8))], line, "line")
        return [builder.add(offset, _I64(8)), builder.add(dst, _I64(LINE))]

    simd.loop(builder, _I64(16), [offsets, to], row, "row")
    if HAS_TILES:
        machine(builder).dot(0, 4, 6)  # tile products that rested for 2,048 cycles are slow at first


def _exact_block(kind: str, builder: Any, *values: Any) -> None:
    """Sum up to 16 channels with 16 others pixel by pixel in f32, from the tensors themselves. See `dot_table`.

    Rows and lanes behind the last channel repeat it.
    """
    a, a_pixel, b, b_pixel, count, c, c_line, place = values
    sides = simd.fields(builder, place, Sides)
    stored, size = simd.storage(kind), DTYPES[kind].size
    fma, nothing = simd.fma(builder, FLOATS), ir.Constant(ir.VectorType(stored, 16), ir.Undefined)

    def offsets(step: Any, last: Any) -> list[Any]:
        numbers = [builder.select(builder.icmp_signed("<", _I64(m), last), _I64(m), last) for m in range(16)]
        return [builder.mul(number, step) for number in numbers]

    rows, lanes = offsets(sides.a_channel, sides.a_last), offsets(sides.b_channel, sides.b_last)
    places = [builder.add(c, offset) for offset in offsets(c_line, sides.a_last)]

    def pixel(carried: list[Any]) -> list[Any]:
        ap, bp, *sums = carried
        vector = nothing
        for lane, offset in enumerate(lanes):
            value = simd.load(builder, builder.add(bp, offset), stored, size)
            vector = builder.insert_element(vector, value, _I32(lane))
        vector = simd.widen(builder, vector, kind)
        for m, offset in enumerate(rows):
            scalar = simd.splat(builder, simd.load(builder, builder.add(ap, offset), stored, size), 16)
            sums[m] = builder.call(fma, [simd.widen(builder, scalar, kind), vector, sums[m]])
        return [builder.add(ap, a_pixel), builder.add(bp, b_pixel), *sums]

    start = [a, b, *(simd.load(builder, place, FLOATS) for place in places)]
    _, _, *sums = simd.loop(builder, count, start, pixel, "pixel")
    for place, total in zip(places, sums, strict=True):
        simd.store(builder, total, place)


def _configure(builder: Any, *_: Any) -> None:
    """LDTILECFG: palette 1, eight tiles of 16 rows of 64 bytes."""
    if not HAS_TILES:
        return
    words = [1, 0, *[0x0040_0040_0040_0040] * 2, 0, 0, 0x1010_1010_1010_1010, 0]
    kind = ir.ArrayType(_I64, 8)
    place = cgutils.alloca_once(builder, kind)
    builder.store(ir.Constant(kind, words), place)
    simd.call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), builder.bitcast(place, ir.IntType(8).as_pointer()))


def _release(builder: Any, *_: Any) -> None:
    """TILERELEASE: the kernel need not keep the tiles over a switch of tasks any more."""
    if HAS_TILES:
        simd.call(builder, "llvm.x86.tilerelease", ir.VoidType())


_EMITTERS: tuple[Callable[..., None], ...] = (
    *(partial(_exact_block, kind) for kind in PARTS),
    _configure,
    _release,
    _stage_rows,
    *(partial(_tile_products, parts, across) for parts in PRODUCTS for across in DOWN if target().dots == "amx"),
)
"""What emits each entry."""

USED = frozenset(range(len(_EMITTERS))) - (frozenset() if target().dots == "amx" else {EXACT + 1, EXACT + 2, STAGE})
"""Entries that are called: without tile registers only values of bf16 go this way, and rows are not staged."""

_ENTRIES = {
    entry: emitted_entry(f"dots_{entry}", _EMITTERS[entry], 8 if entry < BLOCKS else 1)
    for entry in sorted(USED)
    if target().dots
}


@cache
def dot_table() -> npt.NDArray[np.int64]:
    """Return the addresses of the compiled entries.

    - Micro-kernels take the address of a `Batch`, whose `indirection` on AMX is that of `TileSteps`.
    - `STAGE` takes (a, int64 byte offsets of 16 rows, 0, bytes from a staged tile to that of the next step, steps, the
      first one, 0, 0).
    - Exact blocks, which take one pixel after the other from the tensors, take (a, bytes between its pixels, b, bytes
      between its pixels, pixels, acc, bytes between its rows, the address of `Sides`).

    Micro-kernels run between a call of `BEGIN` and one of `END`.
    """
    table = np.zeros(len(_EMITTERS), np.int64)
    for entry, address in _ENTRIES.items():
        table[entry] = address()
    return table if target().dots == "amx" else np.append(table, micro_table()[MICRO["dots"] : MICRO["dots"] + 2])
