"""The tile registers of AMX as instructions that LLVM emits, or imitated in plain ones with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from kernels.emit import simd
from kernels.target import target

__all__ = ["BLOCK", "FLOATS", "HAS_TILES", "INTS", "LINE", "flush", "halves", "machine"]

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
INTS, FLOATS = ir.VectorType(_I32, 16), ir.VectorType(ir.FloatType(), 16)

LINE = 64
"""Bytes of a line of a tile: 16 f32, or 16 pairs of bf16."""

BLOCK = 16 * LINE

HAS_TILES = target().dots == "amx" and "amx-bf16" not in target().imitated
"""Whether there are tile registers."""


def halves(builder: Any, pairs: Any) -> tuple[Any, Any]:
    """Return the first and the second bf16 of each pair as f32."""
    first = builder.shl(pairs, simd.constant(INTS, 16))
    second = builder.and_(pairs, simd.constant(INTS, 0xFFFF0000))
    return builder.bitcast(first, FLOATS), builder.bitcast(second, FLOATS)


def flush(builder: Any, value: Any) -> Any:
    """Turn subnormal numbers into zeros of their sign."""
    bits = builder.bitcast(value, INTS)
    exponent = builder.and_(bits, simd.constant(INTS, 0x7F800000))
    zero = builder.and_(bits, simd.constant(INTS, 0x80000000))
    small = builder.icmp_unsigned("==", exponent, simd.constant(INTS, 0))
    return builder.bitcast(builder.select(small, zero, bits), FLOATS)


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
        place = self.builder.inttoptr(address, _I8.as_pointer())
        simd.call(self.builder, name, ir.VoidType(), _I8(tile), place, step)

    def dot(self, c: int, a: int, b: int) -> None:
        """TDPBF16PS: add the products of 16 channels' 16 pixel pairs with those of 16 other channels."""
        simd.call(self.builder, "llvm.x86.tdpbf16ps", ir.VoidType(), _I8(c), _I8(a), _I8(b))

    def stay_awake(self) -> None:
        """Do something in f32: without that for 2,048 cycles, the next store of a tile waits for 700.

        Measured on a processor with AMX-BF16. Stores of tiles keep it awake as well; products of tiles and instructions
        on integers do not.
        """
        keep = ir.InlineAsm(ir.FunctionType(FLOATS, [FLOATS]), "", "=v,0", side_effect=True)
        one = simd.constant(FLOATS, 1.0)
        self.builder.call(keep, [self.builder.fadd(self.builder.call(keep, [one]), one)])


class _Imitation:
    """AMX in plain instructions: tile registers in memory, bits as by the manual.

    The instructions are functions of their own, which LLVM may not inline.
    """

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        with builder.goto_entry_block():  # cgutils would fill it with zeros, byte by byte
            start = builder.ptrtoint(builder.alloca(ir.ArrayType(_I8, 8 * BLOCK)), _I64)
        self.tiles = [builder.add(start, _I64(BLOCK * tile)) for tile in range(8)]

    def load(self, tile: int, address: Any, step: Any) -> None:
        """Do TILELOADD."""
        self._call("imitated_move", _imitate_move, self.tiles[tile], _I64(LINE), address, step)

    def store(self, tile: int, address: Any, step: Any) -> None:
        """Do TILESTORED."""
        self._call("imitated_move", _imitate_move, address, step, self.tiles[tile], _I64(LINE))

    def stay_awake(self) -> None:
        """Do nothing."""

    def dot(self, c: int, a: int, b: int) -> None:
        """Do TDPBF16PS."""
        self._call("imitated_dot", _imitate_dot, *(self.tiles[tile] for tile in (c, a, b)))

    def _call(self, name: str, emit: Callable[..., None], *arguments: Any) -> None:
        function = simd.declare(self.builder, name, ir.VoidType(), [_I64] * len(arguments))
        if function.is_declaration:
            function.linkage = "internal"
            function.attributes.add("noinline")
            inside = ir.IRBuilder(function.append_basic_block("entry"))
            emit(inside, *function.args)
            inside.ret_void()
        self.builder.call(function, arguments)


def _imitate_move(builder: Any, to: Any, to_step: Any, source: Any, source_step: Any) -> None:
    def body(carried: list[Any]) -> list[Any]:
        simd.store(builder, simd.load(builder, carried[1], INTS), carried[0])
        return [builder.add(carried[0], to_step), builder.add(carried[1], source_step)]

    simd.loop(builder, _I64(16), [to, source], body, "row")


def _imitate_dot(builder: Any, c: Any, a: Any, b: Any) -> None:
    """Sum first and second products of the 16 pairs apart, then both, then add that to memory."""
    zero, fma = simd.constant(FLOATS, 0.0), simd.fma(builder, FLOATS)

    def pair(carried: list[Any]) -> list[Any]:
        ap, bp, *sums = carried
        left = halves(builder, simd.splat(builder, simd.load(builder, ap, _I32), 16))
        right = halves(builder, simd.load(builder, bp, INTS))
        for half in range(2):
            factors = [flush(builder, left[half]), flush(builder, right[half])]
            sums[half] = flush(builder, builder.call(fma, [*factors, sums[half]]))
        return [builder.add(ap, _I64(4)), builder.add(bp, _I64(LINE)), *sums]

    def row(carried: list[Any]) -> list[Any]:
        cp, ap = carried
        sums = simd.loop(builder, _I64(16), [ap, b, zero, zero], pair, "pair")[2:]
        total = flush(builder, builder.fadd(*sums))
        before = flush(builder, simd.load(builder, cp, FLOATS))
        simd.store(builder, flush(builder, builder.fadd(before, total)), cp)
        return [builder.add(cp, _I64(LINE)), builder.add(ap, _I64(LINE))]

    simd.loop(builder, _I64(16), [c, a], row, "row")


def machine(builder: Any) -> Any:
    """Return the instructions of this processor, or those that imitate them."""
    return _Amx(builder) if HAS_TILES else _Imitation(builder)
