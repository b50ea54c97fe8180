"""Micro-kernels of the reference: tiles of sums in float64, each one chain of products in the order of a list.

    sum[m][n] += sum over elements e of the list, over k < steps of e:  a[m][e.a + k * a_step] * b[e.b + k * b_step][n]

Products of f32, f16 and bf16 are exact in float64, so an addition after a product and a fused multiply-add round alike.
No two partial sums are ever added: how many rows and vectors a tile has decides no bit, and every target has the same.

There are four kinds (`KINDS`): ``plain`` multiplies one value of `a` with a line of `b`, in ``lanes`` both are lines.
``twice`` and ``twice_lanes`` do the same with products that are not exact, of f64: the errors of products and sums are
summed as well (Dot2: Ogita, Rump, Oishi, https://doi.org/10.1137/030601818), and at the end of each element both sums
are added to three words in memory. Errors are formed with a fused multiply-add, in software where there is none.
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

from kernels.emit import simd
from kernels.emit.compiler import ENTRIES, Entry, Record, callback
from kernels.target import target

__all__ = [
    "KINDS",
    "LANES",
    "SHAPES",
    "Chain",
    "DoubleTile",
    "adjust_run",
    "call_doubles",
    "doubles_table",
    "load_double",
    "round_run",
    "store_double",
    "widen_run",
]

LANES = 8 if target().lanes == 16 else 4
"""Number of f64 in a vector of a tile; where a register has fewer, LLVM makes it of several."""

KINDS = ("plain", "lanes", "twice", "twice_lanes")


def _shapes() -> dict[str, tuple[int, int]]:
    """Return rows and vectors of the largest tile of each kind: sums and factors stay within the registers."""
    if target().lanes == 16:
        plain, twice = (6, 4), (4, 2)
    elif target().arch == "aarch64" or "avx" in target().features:
        plain, twice = (6, 2), (2, 2)
    else:
        plain, twice = (4, 1), (2, 1)
    return {"plain": plain, "lanes": plain, "twice": twice, "twice_lanes": twice}


SHAPES = _shapes()


class Chain(Record):
    """An element of a list: `steps` products, from byte offsets `a` and `b` on."""

    a: int
    b: int
    steps: int


class DoubleTile(Record):
    """A tile of `rows` and `vectors`, and the list of `count` (at least 1) elements at `chains` that it sums.

    At `places` are the addresses of its rows of `a`, and at `sums` those of its sums; the second and third word of a
    sum lie `word` and twice `word` bytes behind it.
    """

    rows: int
    vectors: int
    places: int
    sums: int
    b: int
    a_step: int
    b_step: int
    chains: int
    count: int
    word: int


_F64, _I32 = ir.DoubleType(), ir.IntType(32)
_LINE = 8 * LANES
_DOUBLES = ir.VectorType(_F64, LANES)
_ZERO = ir.Constant(_DOUBLES, [0.0] * LANES)


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(_DOUBLES, [_DOUBLES] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f64"), [a, b, c])


def _two_sum(builder: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """Return a + b rounded, and the rounding error (Knuth)."""
    total = builder.fadd(a, b)
    of_b = builder.fsub(total, a)
    return total, builder.fadd(builder.fsub(a, builder.fsub(total, of_b)), builder.fsub(b, of_b))


class _Tile:
    """A tile of so many `rows` and `vectors`, emitted once."""

    def __init__(self, builder: Any, kind: str, rows: int, vectors: int, tile: Any) -> None:
        self.builder, self.tile = builder, tile
        self.twice, self.lanes = kind.startswith("twice"), kind.endswith("lanes")
        self.rows, self.vectors = rows, vectors
        self.places = [(m, j) for m in range(rows) for j in range(vectors)]

    def _at(self, place: Any, vector: int) -> Any:
        return self.builder.add(place, simd.I64(_LINE * vector)) if vector else place

    def _read(self, place: Any, vector: int = 0) -> Any:
        return simd.load(self.builder, self._at(place, vector), _DOUBLES, 8)

    def emit(self) -> None:
        """Emit the tile."""
        builder, tile = self.builder, self.tile
        lines = [simd.I64(8 * m) for m in range(self.rows)]
        self.rows_at = [simd.load(builder, builder.add(tile.places, line), simd.I64, 8) for line in lines]
        self.sums_at = [simd.load(builder, builder.add(tile.sums, line), simd.I64, 8) for line in lines]
        begin = [] if self.twice else [self._read(self.sums_at[m], j) for m, j in self.places]
        sums = simd.loop(builder, tile.count, [tile.chains, *begin], self._element, "chain", rolled=True)[1:]
        for (m, j), value in zip(self.places, sums, strict=False):
            simd.store(builder, value, self._at(self.sums_at[m], j), 8)

    def _element(self, carried: list[Any]) -> list[Any]:
        """Add one element; give where the next one is listed, and the sums."""
        builder, tile = self.builder, self.tile
        place, *sums = carried
        element = simd.fields(builder, place, Chain.dtype, *Chain.__annotations__)
        begin = [_ZERO] * (2 * len(self.places)) if self.twice else sums

        def step(carried: list[Any]) -> list[Any]:
            at, line, *sums = carried
            b = [self._read(line, j) for j in range(self.vectors)]
            for m in range(self.rows):
                row = builder.add(self.rows_at[m], at)
                if not self.lanes:
                    word = simd.splat(builder, simd.load(builder, row, _F64, 8), LANES)
                for j in range(self.vectors):
                    a = self._read(row, j) if self.lanes else word
                    self._multiply(sums, m * self.vectors + j, a, b[j])
            # opaque: LLVM would keep one moving address for every row
            return [simd.opaque(builder, builder.add(at, tile.a_step)), builder.add(line, tile.b_step), *sums]

        begin = [element.a, builder.add(tile.b, element.b), *begin]
        sums = simd.loop(builder, element.steps, begin, step, "step", rolled=True)[2:]
        if self.twice:
            for index, (m, j) in enumerate(self.places):
                self._merge(self._at(self.sums_at[m], j), sums[2 * index], sums[2 * index + 1])
            sums = []
        return [builder.add(place, simd.I64(Chain.dtype.itemsize)), *sums]

    def _multiply(self, sums: list[Any], index: int, a: Any, b: Any) -> None:
        """Add a product to a sum, of which there are two for each place where errors are summed."""
        builder = self.builder
        if self.twice:
            product = builder.fmul(a, b)
            error = _fused(builder, a, b, builder.fneg(product))
            sums[2 * index], lost = _two_sum(builder, sums[2 * index], product)
            sums[2 * index + 1] = builder.fadd(sums[2 * index + 1], builder.fadd(lost, error))
        elif target().fused:
            sums[index] = _fused(builder, a, b, sums[index])
        else:
            sums[index] = builder.fadd(sums[index], builder.fmul(a, b))

    def _merge(self, place: Any, total: Any, errors: Any) -> None:
        """Add a sum and its errors to the three words of a sum in memory."""
        builder = self.builder
        places = [place, builder.add(place, self.tile.word)]
        places.append(builder.add(places[1], self.tile.word))
        high, middle, low = (self._read(each) for each in places)
        high, lost = _two_sum(builder, high, total)
        middle, more = _two_sum(builder, middle, lost)
        middle, rest = _two_sum(builder, middle, errors)
        low = builder.fadd(low, builder.fadd(more, rest))
        for value, each in zip((high, middle, low), places, strict=True):
            simd.store(builder, value, each, 8)


def _emit(builder: Any, kind: str, place: Any) -> None:
    """Emit the tiles of a kind, and the choice between them."""
    tile = simd.fields(builder, place, DoubleTile.dtype, *DoubleTile.__annotations__)
    rows, vectors = SHAPES[kind]
    after = builder.append_basic_block("tiles.end")
    number = builder.add(builder.mul(tile.rows, simd.I64(vectors)), tile.vectors)
    unreachable = builder.append_basic_block("tiles.none")
    switch = builder.switch(number, unreachable)
    builder.position_at_end(unreachable)
    builder.unreachable()
    for m in range(1, rows + 1):
        for j in range(1, vectors + 1):
            block = builder.append_basic_block(f"tile{m}x{j}")
            switch.add_case(simd.I64(m * vectors + j), block)
            builder.position_at_end(block)
            _Tile(builder, kind, m, j, tile).emit()
            builder.branch(after)
    builder.position_at_end(after)


@cache
def _entry(kind: str) -> Any:
    """Compile an entry, or load it (see `kernels.emit.tile_table` for the why of `exec`)."""
    name = f"_doubles_{kind}"

    def typer(typingctx: Any, tile: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            _emit(builder, kind, values[0])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    space: dict[str, Any] = {"__name__": __name__, f"{name}_emit": intrinsic(typer)}
    exec(compile(f"def {name}(tile):\n    {name}_emit(tile)\n", __file__, "exec"), space)  # noqa: S102 -- our own text
    return callback("void(int64)", space[name])


@cache
def doubles_table() -> npt.NDArray[np.int64]:
    """Return the addresses of the entries, in the order of `KINDS`."""
    return np.array([_entry(kind).address for kind in KINDS], np.int64)


ENTRIES.extend(Entry(f"doubles[{kind}]", partial(_entry, kind)) for kind in KINDS)

_typed_intrinsic: Any = intrinsic


@_typed_intrinsic
def call_doubles(typingctx: Any, entry: Any, tile: Any) -> Any:
    """Call an entry of the table by its address, with the address of a `DoubleTile`."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [simd.I64])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [values[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _size(kind: str) -> int:
    return {"f64": 8, "f32": 4}.get(kind, 2)


def _widened(builder: Any, place: Any, kind: str, width: int) -> Any:
    """Load `width` values of `kind` as f64."""
    lane = ir.VectorType(_F64, width)
    if kind == "f64":
        return simd.load(builder, place, lane, 8)
    raw = simd.load(builder, place, ir.VectorType(simd.storage(kind), width), _size(kind))
    return builder.fpext(simd.widen(builder, raw, kind, width), lane)


def widen_run(kind: str) -> Any:
    """Make an intrinsic that writes `count` adjacent values at `source` as adjacent f64 at `target`."""

    def widen(typingctx: Any, target: Any, source: Any, count: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            def body(width: int) -> Callable[[list[Any]], list[Any]]:
                def some(carried: list[Any]) -> list[Any]:
                    to, origin = carried
                    simd.store(builder, _widened(builder, origin, kind, width), to, 8)
                    return [builder.add(to, simd.I64(8 * width)), builder.add(origin, simd.I64(_size(kind) * width))]

                return some

            target, source, count = values
            simd.runs(builder, count, [target, source], (16, 4, 1), body)
            return context.get_dummy_value()

        return types.void(*([types.int64] * 3)), codegen

    return intrinsic(widen)


def load_double(kind: str) -> Any:
    """Make an intrinsic that reads one stored value at an address as f64."""

    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.extract_element(_widened(builder, values[0], kind, 1), _I32(0))

        return types.float64(types.int64), codegen

    return intrinsic(load)


@_typed_intrinsic
def store_double(typingctx: Any, address: Any, value: Any) -> Any:
    """Write one f64 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        simd.store(builder, values[1], values[0], 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.float64), codegen


@_typed_intrinsic
def adjust_run(typingctx: Any, address: Any, count: Any, factor: Any, square: Any) -> Any:
    """Multiply `count` f64 with the one at `factor`, if that is an address, and `square` them if it is not 0."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        address, count, factor, square = values
        loaded = builder.alloca(_F64)
        builder.store(ir.Constant(_F64, 1.0), loaded)
        with builder.if_then(builder.icmp_signed("!=", factor, simd.I64(0))):
            builder.store(simd.load(builder, factor, _F64, 8), loaded)
        factor = builder.load(loaded)
        squares = builder.icmp_signed("!=", square, simd.I64(0))

        def body(width: int) -> Callable[[list[Any]], list[Any]]:
            lane, many = ir.VectorType(_F64, width), simd.splat(builder, factor, width)

            def some(carried: list[Any]) -> list[Any]:
                (place,) = carried
                value = builder.fmul(simd.load(builder, place, lane, 8), many)
                simd.store(builder, builder.select(squares, builder.fmul(value, value), value), place, 8)
                return [builder.add(place, simd.I64(8 * width))]

            return some

        simd.twice(builder, count, [address], 8, body)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 4)), codegen


_NAN = {"f64": 0x7FF8 << 48, "f32": 0x7FC00000, "f16": 0x7E00, "bf16": 0x7FC0}
"""The one NaN that is written: processors differ in the sign and the bits of those that they make."""


def _rounded(builder: Any, value: Any, kind: str, width: int) -> Any:
    """Round f64 lanes once, to nearest even, as the stored bits.

    f16 and bf16 go over an f32 rounded to odd, which keeps the second rounding exact.
    """
    bits_of = {8: simd.I64, 4: _I32, 2: ir.IntType(16)}[_size(kind)]
    stored, longs, ints = (ir.VectorType(lane, width) for lane in (bits_of, simd.I64, _I32))
    nan = builder.fcmp_unordered("uno", value, value)
    if kind == "f64":
        bits = builder.bitcast(value, longs)
    else:
        near = builder.fptrunc(value, ir.VectorType(simd.F32, width))
        bits = builder.bitcast(near, ints)
        if kind != "f32":
            back = builder.fpext(near, value.type)
            magnitudes = [
                builder.and_(builder.bitcast(each, longs), ir.Constant(longs, [(1 << 63) - 1] * width))
                for each in (back, value)
            ]
            away = builder.icmp_unsigned(">", *magnitudes)
            inexact = builder.icmp_unsigned("!=", *magnitudes)
            bits = builder.or_(builder.sub(bits, builder.zext(away, ints)), builder.zext(inexact, ints))
            bits = simd.narrow(builder, builder.bitcast(bits, near.type), kind, width)
    return builder.select(nan, ir.Constant(stored, [_NAN[kind]] * width), bits)


def round_run(kind: str) -> Any:
    """Make an intrinsic that adds `count` adjacent f64 at `bias` to those at `source` and stores the sums, rounded."""

    def round_(typingctx: Any, target: Any, source: Any, bias: Any, count: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            def body(width: int) -> Callable[[list[Any]], list[Any]]:
                lane = ir.VectorType(_F64, width)

                def some(carried: list[Any]) -> list[Any]:
                    to, origin, more = carried
                    value = builder.fadd(simd.load(builder, origin, lane, 8), simd.load(builder, more, lane, 8))
                    simd.store(builder, _rounded(builder, value, kind, width), to, _size(kind))
                    following = (_size(kind), 8, 8)
                    return [
                        builder.add(place, simd.I64(size * width))
                        for place, size in zip(carried, following, strict=True)
                    ]

                return some

            simd.twice(builder, values[3], list(values[:3]), 8, body)
            return context.get_dummy_value()

        return types.void(*([types.int64] * 4)), codegen

    return intrinsic(round_)
