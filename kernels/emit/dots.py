"""Tiles of bf16 products summed in f32 on AMX tile registers, or imitated; and sums of single pixels in f32.

All of them compute a block, rows of one tensor by 16 channels of the other, over pixels taken in pairs:

    acc[m, l] += sum over pixels p of a[m, p] * b[p, l]

`a` is a panel of channel planes [channel][pixel], `b` one of pixel pairs [pair][channel][2], both of bf16. A row of `a`
is a channel as one tap sees it, anywhere in the panel. Tile registers read lines of memory, so rows are staged first,
tile by tile.

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
from kernels.emit.brgemm import MICRO, micro_table
from kernels.emit.compiler import Record, Vector, emitted_entry, numbers
from kernels.target import target

__all__ = [
    "ACROSS",
    "BEGIN",
    "BLOCKS",
    "END",
    "EXACT",
    "PARTS",
    "PRODUCTS",
    "ROWS",
    "SHAPES",
    "STAGE",
    "STEP",
    "TILE",
    "USED",
    "Sides",
    "Walks",
    "dot_table",
]

STEP = 32 if target().dots == "amx" else 4
"""Pixels of one step: what an AMX tile holds of a channel, or two pairs."""

TILE = 16
"""Channels on each side of a block."""

EXACT, BEGIN, END, STAGE, BLOCKS = 0, 3, 4, 5, 6
"""Entries of the table: one exact block for each number of parts, and so on.

The last are blocks: for each number of parts one of each of `SHAPES`, or without AMX the micro-kernels of dot products.
"""

SHAPES = (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 1)
"""Blocks down and across that tile registers sum at once: four hide how long a product takes."""

PARTS = {"bf16": 1, "f16": 2, "f32": 3}
"""How many bf16 a value is the sum of."""

PRODUCTS = {1: ((0, 0),), 2: ((1, 1), (0, 1), (1, 0), (0, 0)), 3: ((2, 0), (1, 0), (1, 1), (0, 2), (0, 1), (0, 0))}
"""Which parts of `a` and of `b` are multiplied, by how many parts a value has: small products first.

In this order no sum on the way is larger than the absolute products of what it stands for, so sums that fit f32 are
exact. The three products that are left out are below 2**-22 of the whole one each; see `kernels.pack.lines`.
"""

ROWS, ACROSS = (TILE, 1) if target().dots == "amx" else (1, 2)
"""Rows of a block of AMX, and blocks of the narrow tensor whose sums share lines."""


class Walks(Record):
    """What a block of AMX has walks over, in bytes.

    `b_part` and `a_part` lead from a part to the next one, `a_line` and `acc_line` from a row to the next one. There
    are `count` walks, and at the address `starts` an int64 for each: where it begins in `a`. In `b` they follow each
    other. `down` leads from the first block of `a` to each other one down, and behind that to their sums. Where values
    have one part and the sums `begin`, they begin at zero, and memory is not read.
    """

    b_part: int
    a_part: int
    a_line: int
    acc_line: int
    count: int
    starts: int
    down: Vector = numbers(6)
    begin: int


class Sides(Record):
    """The channels of an exact block: bytes from one to the next, and the last one's number, of `a` and of `b`."""

    a_channel: int
    a_last: int
    b_channel: int
    b_last: int


_I32, _I64 = ir.IntType(32), simd.I64


def _amx_block(parts: int, down: int, across: int, builder: Any, *values: Any) -> None:
    """Sum ``down * across`` blocks in the first tile registers from `a` and `b` in the others.

    Where values have parts, the sums of one call are formed by themselves: added one by one to long sums, products
    would lose more digits.
    """
    a, a_step, b, b_step, steps, c, c_step, place = values
    walks = simd.fields(builder, place, Walks)
    tiles = machine(builder)
    line = _I64(LINE)
    a_down, c_down = ([_I64(0), *walks.down[first:]] for first in (0, down - 1))
    blocks = [(i, j) for i in range(down) for j in range(across)]
    places = [builder.add(simd.nth(builder, c, c_step, j), c_down[i]) for i, j in blocks]
    for tile, place in enumerate(places):
        if parts == 1:
            with builder.if_else(builder.icmp_signed("==", walks.begin, _I64(0))) as (goes_on, begins):
                with goes_on:
                    tiles.load(tile, place, walks.acc_line)
                with begins:
                    tiles.zero(tile)
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
                tiles.load(tile, builder.add(simd.nth(builder, ap, walks.a_part, part), a_down[number]), walks.a_line)
                return tile
            here = simd.nth(builder, simd.nth(builder, bp, walks.b_part, part), b_step, number)
            tiles.load(tile, here, line)
            for ahead in range(0, BLOCK, 4 * LINE):  # the processor itself fetches what lies between
                simd.prefetch(builder, builder.add(here, _I64(BLOCK + ahead)))
            return tile

        for turn, (a_key, b_key) in enumerate(wanted):
            tiles.dot(across * a_key[1] + b_key[1], fetch(turn, a_key), fetch(turn, b_key))
        tiles.stay_awake()
        return [builder.add(ap, a_step), builder.add(bp, _I64(BLOCK))]

    def walk(carried: list[Any]) -> list[Any]:
        start, bp = carried
        origin = builder.add(a, simd.load(builder, start, _I64, 8))
        bp = simd.loop(builder, steps, [origin, bp], step, "step")[1]
        return [builder.add(start, _I64(8)), bp]

    simd.loop(builder, walks.count, [walks.starts, b], walk, "walk")

    if parts == 1:
        for tile, place in enumerate(places):
            tiles.store(tile, place, walks.acc_line)
        return

    def row(carried: list[Any]) -> list[Any]:
        to, source = carried
        simd.store(builder, builder.fadd(simd.load(builder, to, FLOATS), simd.load(builder, source, FLOATS)), to)
        return [builder.add(to, walks.acc_line), builder.add(source, line)]

    with builder.goto_entry_block():
        room = builder.ptrtoint(builder.alloca(ir.ArrayType(FLOATS, 16 * len(blocks))), _I64)
    rooms = [builder.add(room, _I64(BLOCK * tile)) for tile in range(len(blocks))]
    for tile, source in enumerate(rooms):
        tiles.store(tile, source, line)
    for place, source in zip(places, rooms, strict=True):
        simd.loop(builder, _I64(16), [place, source], row, "row")


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
    *(partial(_amx_block, parts, *shape) for parts in PRODUCTS for shape in SHAPES if target().dots == "amx"),
)
"""What emits each entry."""

USED = frozenset(range(len(_EMITTERS))) - (frozenset() if target().dots == "amx" else {EXACT + 1, EXACT + 2, STAGE})
"""Entries that are called: without tile registers only values of bf16 go this way, and rows are not staged."""

_ENTRIES = {entry: emitted_entry(f"dots_{entry}", _EMITTERS[entry], 8) for entry in sorted(USED) if target().dots}


@cache
def dot_table() -> npt.NDArray[np.int64]:
    """Return the addresses of the compiled entries.

    - Blocks of AMX take (a, bytes between its steps, b, bytes between its blocks across, steps of a walk, acc, bytes
      between its blocks across, the address of `Walks`).
    - `STAGE` takes (a, int64 byte offsets of 16 rows, 0, bytes from a staged tile to that of the next step, steps, the
      first one, 0, 0).
    - Exact blocks, which take one pixel after the other from the tensors, take (a, bytes between its pixels, b, bytes
      between its pixels, pixels, acc, bytes between its rows, the address of `Sides`).

    Blocks run between a call of `BEGIN` and one of `END`.
    """
    table = np.zeros(len(_EMITTERS), np.int64)
    for entry, address in _ENTRIES.items():
        table[entry] = address()
    return table if target().dots == "amx" else np.append(table, micro_table()[MICRO["dots"] : MICRO["dots"] + 2])
