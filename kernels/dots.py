"""Tiles of bf16 products summed in f32: on AMX tile registers, with AVX-512-BF16 dot products, or imitated.

All of them compute a block, rows of one tensor by 16 channels of the other, over pixels taken in pairs:

    acc[m, l] += sum over pixels p of a[m, p] * b[p, l]

`a` is a panel of channel planes [channel][pixel], `b` one of pixel pairs [pair][channel][2], both of bf16. A row of `a`
is a channel as one tap sees it, anywhere in the panel. Dot products read rows where they lie; tile registers read lines
of memory, so their rows are staged on line starts first.

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
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels._jit import LAZY, callback
from kernels.cpu import cpu
from kernels.simd import _fma, _load, _loop, _opaque, _prefetch, _splat

__all__ = ["BEGIN", "BLOCKS", "END", "ENTRIES", "EXACT", "ROWS", "STAGE", "STEP", "TILE", "call_dots", "dot_table"]

STEP = 32 if cpu().dots == "amx" else 4
"""Pixels of one step: what an AMX tile holds of a channel, or two pairs."""

TILE = 16
"""Channels on each side of a block."""

EXACT, BEGIN, END, STAGE, BLOCKS = 0, 1, 2, 3, 4
"""Entries of the table; blocks are the last ones, one for each number of them across, inside one for each down."""

ENTRIES = BLOCKS + (4 if cpu().dots == "amx" else 2)

ROWS = TILE if cpu().dots == "amx" else 8
"""Rows of a block: those of a tile, or as many as fill half of the registers with sums of two vectors for each."""

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTS, _FLOATS = ir.VectorType(_I32, 16), ir.VectorType(_F32, 16)
_LINE = 64  # bytes of 16 f32, or of 16 pairs of bf16
_BLOCK = 16 * _LINE

_typed_intrinsic: Any = intrinsic


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's type of bf16, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def _address(builder: Any, base: Any, step: Any, count: int) -> Any:
    return builder.add(base, builder.mul(step, _I64(count)))


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def _declare(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def _halves(builder: Any, pairs: Any) -> tuple[Any, Any]:
    """Give the first and the second bf16 of each pair as f32."""
    first = builder.shl(pairs, ir.Constant(_INTS, [16] * 16))
    second = builder.and_(pairs, ir.Constant(_INTS, [0xFFFF0000] * 16))
    return builder.bitcast(first, _FLOATS), builder.bitcast(second, _FLOATS)


def _flush(builder: Any, value: Any) -> Any:
    """Turn subnormal numbers into zeros of their sign."""
    bits = builder.bitcast(value, _INTS)
    exponent = builder.and_(bits, ir.Constant(_INTS, [0x7F800000] * 16))
    zero = builder.and_(bits, ir.Constant(_INTS, [0x80000000] * 16))
    small = builder.icmp_unsigned("==", exponent, ir.Constant(_INTS, [0] * 16))
    return builder.bitcast(builder.select(small, zero, bits), _FLOATS)


class _Amx:
    """The instructions of AMX on the eight tile registers, each 16 rows of 64 bytes."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def load(self, tile: int, address: Any, step: Any) -> None:
        """TILELOADD: read 16 rows that lie `step` bytes apart."""
        self._move("llvm.x86.tileloadd64", tile, address, step)

    def store(self, tile: int, address: Any, step: Any) -> None:
        """TILESTORED: write 16 rows."""
        self._move("llvm.x86.tilestored64", tile, address, step)

    def _move(self, name: str, tile: int, address: Any, step: Any) -> None:
        pointer = _I8.as_pointer()
        function = _declare(self.builder, name, ir.VoidType(), _I8, pointer, _I64)
        self.builder.call(function, [_I8(tile), self.builder.inttoptr(address, pointer), step])

    def dot(self, c: int, a: int, b: int) -> None:
        """TDPBF16PS: add the products of 16 channels' 16 pixel pairs with those of 16 other channels."""
        function = _declare(self.builder, "llvm.x86.tdpbf16ps", ir.VoidType(), _I8, _I8, _I8)
        self.builder.call(function, [_I8(c), _I8(a), _I8(b)])


class _Imitation:
    """AMX in plain instructions: tile registers in memory, bits as by the manual.

    The instructions are functions of their own, which LLVM may not inline.
    """

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        with builder.goto_entry_block():  # cgutils would fill it with zeros, byte by byte
            start = builder.ptrtoint(builder.alloca(ir.ArrayType(_I8, 8 * _BLOCK)), _I64)
        self.tiles = [builder.add(start, _I64(_BLOCK * tile)) for tile in range(8)]

    def load(self, tile: int, address: Any, step: Any) -> None:
        """Do TILELOADD."""
        self._call("imitated_move", _imitate_move, self.tiles[tile], _I64(_LINE), address, step)

    def store(self, tile: int, address: Any, step: Any) -> None:
        """Do TILESTORED."""
        self._call("imitated_move", _imitate_move, address, step, self.tiles[tile], _I64(_LINE))

    def dot(self, c: int, a: int, b: int) -> None:
        """Do TDPBF16PS."""
        self._call("imitated_dot", _imitate_dot, *(self.tiles[tile] for tile in (c, a, b)))

    def _call(self, name: str, emit: Callable[..., None], *arguments: Any) -> None:
        function = _declare(self.builder, name, ir.VoidType(), *[_I64] * len(arguments))
        if function.is_declaration:
            function.linkage = "internal"
            function.attributes.add("noinline")
            inside = ir.IRBuilder(function.append_basic_block("entry"))
            emit(inside, *function.args)
            inside.ret_void()
        self.builder.call(function, arguments)


def _imitate_move(builder: Any, to: Any, to_step: Any, source: Any, source_step: Any) -> None:
    def body(carried: list[Any]) -> list[Any]:
        _store(builder, _load(builder, carried[1], _INTS), carried[0])
        return [builder.add(carried[0], to_step), builder.add(carried[1], source_step)]

    _loop(builder, _I64(16), [to, source], body, "row")


def _imitate_dot(builder: Any, c: Any, a: Any, b: Any) -> None:
    """Sum first and second products of the 16 pairs apart, then both, then add that to memory."""
    zero, fma = ir.Constant(_FLOATS, [0.0] * 16), _fma(builder, _FLOATS)

    def pair(carried: list[Any]) -> list[Any]:
        ap, bp, *sums = carried
        left = _halves(builder, _splat(builder, _load(builder, ap, _I32), 16))
        right = _halves(builder, _load(builder, bp, _INTS))
        for half in range(2):
            factors = [_flush(builder, left[half]), _flush(builder, right[half])]
            sums[half] = _flush(builder, builder.call(fma, [*factors, sums[half]]))
        return [builder.add(ap, _I64(4)), builder.add(bp, _I64(_LINE)), *sums]

    def row(carried: list[Any]) -> list[Any]:
        cp, ap = carried
        sums = _loop(builder, _I64(16), [ap, b, zero, zero], pair, "pair")[2:]
        total = _flush(builder, builder.fadd(*sums))
        before = _flush(builder, _load(builder, cp, _FLOATS))
        _store(builder, _flush(builder, builder.fadd(before, total)), cp)
        return [builder.add(cp, _I64(_LINE)), builder.add(ap, _I64(_LINE))]

    _loop(builder, _I64(16), [c, a], row, "row")


def _dot_product(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """VDPBF16PS: add the second products of 16 pairs, then the first ones."""
    if "avx512bf16" not in cpu().imitated:
        pairs = ir.VectorType(_BFloat(), 32)
        function = _declare(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, _FLOATS, pairs, pairs)
        return builder.call(function, [total, builder.bitcast(a, pairs), builder.bitcast(b, pairs)])
    fma = _fma(builder, _FLOATS)
    total = _flush(builder, total)
    for left, right in reversed(list(zip(_halves(builder, a), _halves(builder, b), strict=True))):
        total = _flush(builder, builder.call(fma, [_flush(builder, left), _flush(builder, right), total]))
    return total


def _amx_block(builder: Any, down: int, across: int, values: Any) -> None:
    """Sum ``down * across`` blocks in tile registers 0-3 from `a` in 4-5 and `b` in 6-7."""
    a, a_step, b, b_step, steps, c, c_step, _ = values
    machine = _Imitation(builder) if "amx-bf16" in cpu().imitated else _Amx(builder)
    line = _I64(_LINE)
    places = [
        (2 * i + j, builder.add(_address(builder, c, c_step, j), _I64(_BLOCK * i)))
        for i in range(down) for j in range(across)
    ]  # fmt: skip
    for tile, place in places:
        machine.load(tile, place, line)

    def step(carried: list[Any]) -> list[Any]:
        ap, bp = carried
        for i in range(down):
            machine.load(4 + i, _address(builder, ap, a_step, 16 * i), a_step)
        for j in range(across):
            here = _address(builder, bp, b_step, j)
            machine.load(6 + j, here, line)
            for ahead in range(0, _BLOCK, 4 * _LINE):  # the processor itself fetches what lies between
                _prefetch(builder, builder.add(here, _I64(_BLOCK + ahead)))
        for tile, _ in places:
            machine.dot(tile, 4 + tile // 2, 6 + tile % 2)
        return [builder.add(ap, line), builder.add(bp, _I64(_BLOCK))]

    _loop(builder, steps, [a, b], step, "step")
    for tile, place in places:
        machine.store(tile, place, line)


def _stage_rows(builder: Any, values: Any) -> None:
    """Copy rows of `a`, from any offsets, to rows that start on lines of memory and are `pitch` bytes apart."""
    a, offsets, _, pitch, steps, to, _, rows = values

    def row(carried: list[Any]) -> list[Any]:
        offset, dst = carried

        def line(places: list[Any]) -> list[Any]:
            _store(builder, _load(builder, places[1], _INTS, 2), places[0])
            return [builder.add(place, _I64(_LINE)) for place in places]

        _loop(builder, steps, [dst, builder.add(a, _load(builder, offset, _I64, 8))], line, "line")
        return [builder.add(offset, _I64(8)), builder.add(dst, pitch)]

    _loop(builder, rows, [offsets, to], row, "row")


def _rows_block(builder: Any, across: int, values: Any) -> None:
    """Sum 8 rows by ``across * 16`` channels with dot products; each row of `a` lies at an offset of its own.

    One block alone would wait for its 8 sums, so even and odd pairs have sums of their own there.
    """
    a, offsets, b, b_step, pairs, c, c_step, *_ = values
    turns = 2 // across
    rows = [_load(builder, builder.add(offsets, _I64(8 * m)), _I64, 8) for m in range(ROWS)]
    places = [builder.add(_address(builder, c, c_step, j), _I64(_LINE * m)) for m in range(ROWS) for j in range(across)]
    for place in places:
        _prefetch(builder, place)

    def step(carried: list[Any]) -> list[Any]:
        ap, bp, *sums = carried
        for turn in range(turns):
            here = builder.add(bp, _I64(_LINE * turn))
            right = [_load(builder, _address(builder, here, b_step, j), _INTS) for j in range(across)]
            for m in range(ROWS):
                place = builder.add(builder.add(ap, _I64(4 * turn)), rows[m])
                left = _splat(builder, _load(builder, place, _I32, 2), 16)
                for j in range(across):
                    at = (turn * ROWS + m) * across + j
                    sums[at] = _dot_product(builder, sums[at], left, right[j])
        return [_opaque(builder, builder.add(ap, _I64(4 * turns))), builder.add(bp, _I64(_LINE * turns)), *sums]

    zero = ir.Constant(_FLOATS, [0.0] * 16)
    steps = builder.udiv(pairs, _I64(turns))
    sums = _loop(builder, steps, [a, b, *[zero] * len(places) * turns], step, "pair")[2:]
    for turn in range(1, turns):
        sums = [builder.fadd(total, other) for total, other in zip(sums, sums[turn * len(places) :], strict=False)]
    for place, total in zip(places, sums, strict=False):
        _store(builder, builder.fadd(_load(builder, place, _FLOATS), total), place)


def _exact_row(builder: Any, values: Any) -> None:
    """Sum one channel with 16 others pixel by pixel in f32: Inf and NaN where they belong. See `dot_table`."""
    a, a_rest, b, b_rest, count, c, first, _ = values
    split = builder.icmp_unsigned("!=", a_rest, _I64(0))
    fma = _fma(builder, _FLOATS)

    def pixel(carried: list[Any]) -> list[Any]:
        ap, place, total = carried
        odd = builder.icmp_unsigned("==", builder.and_(place, _I64(1)), _I64(1))
        pair = builder.add(b, builder.shl(builder.lshr(place, _I64(1)), _I64(6)))

        def right(address: Any) -> Any:
            first, second = _halves(builder, _load(builder, address, _INTS))
            return builder.select(odd, second, first)

        def left(address: Any) -> Any:
            bits = builder.zext(_load(builder, address, ir.IntType(16), 2), _I32)
            return builder.bitcast(builder.shl(bits, _I32(16)), _F32)

        def whole(part: Callable[[Any], Any], address: Any, rest: Any, nothing: Any) -> Any:
            more = builder.select(split, part(builder.add(address, rest)), nothing)
            return builder.fadd(part(address), more)

        vector = whole(right, pair, b_rest, ir.Constant(_FLOATS, [-0.0] * 16))
        scalar = whole(left, ap, a_rest, _F32(-0.0))
        total = builder.call(fma, [_splat(builder, scalar, 16), vector, total])
        return [builder.add(ap, _I64(2)), builder.add(place, _I64(1)), total]

    _store(builder, _loop(builder, count, [a, first, _load(builder, c, _FLOATS)], pixel, "pixel")[2], c)


def _configure(builder: Any) -> None:
    """LDTILECFG: palette 1, eight tiles of 16 rows of 64 bytes."""
    if cpu().dots != "amx" or "amx-bf16" in cpu().imitated:
        return
    words = [1, 0, *[0x0040_0040_0040_0040] * 2, 0, 0, 0x1010_1010_1010_1010, 0]
    kind = ir.ArrayType(_I64, 8)
    place = cgutils.alloca_once(builder, kind)
    builder.store(ir.Constant(kind, words), place)
    function = _declare(builder, "llvm.x86.ldtilecfg", ir.VoidType(), _I8.as_pointer())
    builder.call(function, [builder.bitcast(place, _I8.as_pointer())])


def _release(builder: Any) -> None:
    """TILERELEASE: the kernel need not keep the tiles over a switch of tasks any more."""
    if cpu().dots == "amx" and "amx-bf16" not in cpu().imitated:
        builder.call(_declare(builder, "llvm.x86.tilerelease", ir.VoidType()), [])


def _emit(entry: int) -> Callable[[Any, Any], None]:
    if entry == EXACT:
        return _exact_row
    if entry == STAGE:
        return _stage_rows
    if entry in (BEGIN, END):
        return lambda builder, _: (_configure if entry == BEGIN else _release)(builder)
    down, across = divmod(entry - BLOCKS, 2)
    if cpu().dots == "amx":
        return lambda builder, values: _amx_block(builder, 1 + down, 1 + across, values)
    return lambda builder, values: _rows_block(builder, 1 + across, values)


_ARGUMENTS = [types.int64] * 8
_SOURCE = """
def {name}(a, a_step, b, b_step, steps, c, c_step, rest):
    {name}_emit(a, a_step, b, b_step, steps, c, c_step, rest)
"""


@cache
def _entry(entry: int) -> Any:
    """Compile one entry of the table, or load it (see `kernels.tiles` for the why of `exec`)."""
    name = f"_dots_{entry}"

    def typer(
        typingctx: Any, a: Any, a_step: Any, b: Any, b_step: Any, steps: Any, c: Any, c_step: Any, rest: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            _emit(entry)(builder, values)
            return context.get_dummy_value()

        return types.void(*_ARGUMENTS), codegen

    space: dict[str, Any] = {"__name__": __name__, f"{name}_emit": intrinsic(typer)}
    exec(compile(_SOURCE.format(name=name), __file__, "exec"), space)  # noqa: S102 -- our own constant text
    return callback(f"void({', '.join(['int64'] * 8)})", space[name])


@cache
def dot_table() -> npt.NDArray[np.int64]:
    """Give the addresses of the compiled entries.

    Blocks of AMX take (a, bytes between its rows, b, bytes between its blocks, steps, acc, bytes between its blocks
    across, 0), those of dot products `ROWS` int64 byte offsets in place of the second. `STAGE` takes (a, int64 byte
    offsets of its rows, 0, bytes between staged rows, steps, their place, 0, rows). `EXACT` takes one pixel after the
    other, each the sum of one or two bf16: (a, bytes from a to its rest or 0 where there is none, b, bytes from b to
    its rest, pixels, acc, first pixel of b, 0). Blocks run between a call of `BEGIN` and one of `END`.
    """
    return np.array([_entry(entry).address for entry in range(ENTRIES)], np.int64)


if cpu().dots:
    LAZY.extend(partial(_entry, entry) for entry in range(ENTRIES))


@_typed_intrinsic
def call_dots(
    typingctx: Any, entry: Any, a: Any, a_step: Any, b: Any, b_step: Any, steps: Any, c: Any, c_step: Any, rest: Any
) -> Any:
    """Call an entry of the table by its address; for the arguments see `dot_table`."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64] * 8)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(types.int64, *_ARGUMENTS), codegen
