"""Vector instructions as LLVM IR: what Numba's loop vectoriser does not find.

It keeps no accumulators in registers across a loop nest; an intrinsic may emit any LLVM IR, so register tiles and
packing are written as vectors, phi nodes and `llvm.fma`, for whatever vector length the processor has. LLVM lowers them
to AVX-512, AVX2 or NEON instructions; a length the processor lacks still runs, only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from kernels.dtypes import DTYPES
from kernels.target import target

__all__ = [
    "F32", "I64", "BFloat", "add_to", "call", "constant", "declare", "each_run", "fields", "fma",
    "load", "loop", "multiply_add", "narrow", "nth", "opaque", "permute", "prefetch", "runs", "some", "splat",
    "storage", "store", "switch", "widen",
]  # fmt: skip

I64 = ir.IntType(64)
F32 = ir.FloatType()


class BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's type of bf16, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


def loop(
    builder: Any, count: Any, carried: list[Any], body: Callable[[list[Any]], list[Any]], tag: str, rolled: bool = False
) -> list[Any]:
    """Emit ``for _ in range(count): carried = body(carried)`` with the carried values in phi nodes; count >= 1.

    A `rolled` loop is not unrolled: where counts are small, that costs more than it gives.
    """
    before = builder.block
    block = builder.append_basic_block(tag)
    after = builder.append_basic_block(tag + ".end")
    builder.branch(block)
    builder.position_at_end(block)
    index = builder.phi(I64, "i")
    index.add_incoming(I64(0), before)
    phis = []
    for value in carried:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        phis.append(phi)
    results = body(phis)
    if rolled:  # an empty instruction that must not be copied
        nothing = ir.FunctionType(ir.VoidType(), [])
        builder.call(ir.InlineAsm(nothing, "", "", side_effect=True), [], attrs=("convergent",))
    following = builder.add(index, I64(1))
    latch = builder.block
    index.add_incoming(following, latch)
    for phi, value in zip(phis, results, strict=True):
        phi.add_incoming(value, latch)
    builder.cbranch(builder.icmp_signed("<", following, count), block, after)
    builder.position_at_end(after)
    return results


def load(builder: Any, address: Any, kind: Any, align: int = 4) -> Any:
    """Load a value of type `kind` from an address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def fields(builder: Any, address: Any, record: Any) -> Any:
    """Load the fields of a `Record` of int64; a vector becomes a list."""
    loaded = SimpleNamespace()
    for name, (kind, first) in record.dtype.fields.items():
        places = [builder.add(address, I64(first + 8 * i)) for i in range(kind.itemsize // 8)]
        values = [load(builder, place, I64, 8) for place in places]
        setattr(loaded, name, values if kind.shape else values[0])
    return loaded


def nth(builder: Any, base: Any, step: Any, number: int) -> Any:
    """Return the address `number` steps behind `base`; a `step` is in bytes."""
    return builder.add(base, builder.mul(step, I64(number))) if number else base


def store(builder: Any, value: Any, address: Any, align: int = 4, *, streams: bool = False) -> None:
    """Store a value at an address; where it `streams`, past the caches."""
    stored = builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)
    if streams:
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))


def add_to(builder: Any, value: Any, address: Any, align: int = 4) -> None:
    """Add a value to the one at an address."""
    store(builder, builder.fadd(load(builder, address, value.type, align), value), address, align)


def constant(kind: Any, value: float) -> Any:
    """Return a vector of type `kind` whose lanes all have one value."""
    return ir.Constant(kind, [value] * kind.count)


def splat(builder: Any, value: Any, width: int) -> Any:
    """Fill a vector of `width` lanes with one value."""
    vector = ir.VectorType(value.type, width)
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
    mask = constant(ir.VectorType(ir.IntType(32), width), 0)
    return builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), mask)


def permute(builder: Any, value: Any, lanes: Any) -> Any:
    """Return a vector of f32 whose lane i is that of `value` that lane i of `lanes` has the number of.

    Of 8 lanes both halves are permuted alike, and by themselves.
    """
    kind, width, features = value.type, value.type.count, target().features
    if width == 16 and "avx512f" in features:
        return call(builder, "llvm.x86.avx512.permvar.sf.512", kind, value, lanes)
    if width == 8 and "avx" in features:
        return call(builder, "llvm.x86.avx.vpermilvar.ps.256", kind, value, lanes)
    if width == 8 and ("ssse3" in features or target().arch == "aarch64"):
        name = "llvm.x86.ssse3.pshuf.b.128" if "ssse3" in features else "llvm.aarch64.neon.tbl1.v16i8"
        return _permute_bytes(builder, name, value, lanes)
    found = ir.Constant(kind, ir.Undefined)
    for lane in map(ir.IntType(32), range(width)):
        one = builder.extract_element(value, builder.extract_element(lanes, lane))
        found = builder.insert_element(found, one, lane)
    return found


def _permute_bytes(builder: Any, name: str, value: Any, lanes: Any) -> Any:
    """Permute the lanes of either half of a vector of 8 by an instruction that looks bytes up."""
    octets, quad = ir.VectorType(ir.IntType(8), 16), ir.VectorType(ir.IntType(32), 4)
    first, second = (ir.Constant(quad, [begin + lane for lane in range(4)]) for begin in (0, 4))
    begins = builder.mul(builder.shuffle_vector(lanes, lanes, first), constant(quad, 0x04040404))
    numbers = builder.bitcast(builder.add(begins, constant(quad, 0x03020100)), octets)
    halves = []
    for some in (first, second):
        half = builder.bitcast(builder.shuffle_vector(value, value, some), octets)
        halves.append(builder.bitcast(call(builder, name, octets, half, numbers), ir.VectorType(F32, 4)))
    return builder.shuffle_vector(*halves, ir.Constant(lanes.type, list(range(8))))


def when(builder: Any, asked: Any, otherwise: list[Any], make: Callable[[], list[Any]]) -> list[Any]:
    """Return what `make` emits where `asked` is not 0, or the values `otherwise`."""
    here = builder.block
    with builder.if_then(builder.icmp_signed("!=", asked, asked.type(0))):
        made, inside = make(), builder.block
    joined = []
    for old, new in zip(otherwise, made, strict=True):
        if old is not new:
            phi = builder.phi(old.type)
            phi.add_incoming(old, here)
            phi.add_incoming(new, inside)
            new = phi
        joined.append(new)
    return joined


def switch(builder: Any, number: Any, cases: Mapping[int, Callable[[], list[Any]]]) -> list[Any]:
    """Emit a choice between `cases` by a number; return the values of the chosen one. Other numbers crash."""
    blocks = [builder.append_basic_block("case") for _ in cases]
    after, none = builder.append_basic_block("cases.end"), builder.append_basic_block("no.case")
    choice, ends = builder.switch(number, none), []
    builder.position_at_end(none)
    call(builder, "llvm.trap", ir.VoidType())
    builder.unreachable()
    for block, (case, emit) in zip(blocks, cases.items(), strict=True):
        choice.add_case(I64(case), block)
        builder.position_at_end(block)
        ends.append((emit(), builder.block))
        builder.branch(after)
    builder.position_at_end(after)
    joined = [builder.phi(value.type) for value in ends[0][0]]
    for values, block in ends:
        for phi, value in zip(joined, values, strict=True):
            phi.add_incoming(value, block)
    return joined


def opaque(builder: Any, value: Any, *, here: bool = False) -> Any:
    """Hide from LLVM where an address comes from.

    It would unroll the loop with one moving address for every row, more than there are registers; so the rows stay
    offsets, in registers, of one address. What is computed from an address that is only known `here` is not computed
    before, where it would have to be kept in memory.
    """
    nothing = ir.InlineAsm(ir.FunctionType(I64, [I64]), "", "=r,0", side_effect=here)
    return builder.call(nothing, [value])


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c of vectors of f32 or f64: rounded once where there is an instruction for it, else twice.

    LLVM would call a function for each lane there, twenty times as slow as the products.
    """
    if target().fused or target().imitated:
        return builder.call(fma(builder, a.type), [a, b, c])
    return builder.fadd(builder.fmul(a, b), c)


def fma(builder: Any, lane: Any) -> Any:
    """Declare the multiply-add of vectors of type `lane`: a * b + c, rounded once."""
    size = 64 if isinstance(lane.element, ir.DoubleType) else 32
    return declare(builder, f"llvm.fma.v{lane.count}f{size}", lane, [lane, lane, lane])


def declare(builder: Any, name: str, result: Any, arguments: Sequence[Any]) -> Any:
    """Declare a function by its name and types."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def call(builder: Any, name: str, result: Any, *values: Any) -> Any:
    """Call one of LLVM's own functions."""
    return builder.call(declare(builder, name, result, [value.type for value in values]), values)


def prefetch(builder: Any, address: Any, *, write: bool = False) -> None:
    """Ask for the line at an address, to be used soon."""
    pointer, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    place = builder.inttoptr(address, pointer)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), place, i32(int(write)), i32(3), i32(1))


def widen(builder: Any, raw: Any, kind: str) -> Any:
    """Convert loaded lanes to f32: bf16 by shifting, f16 by its instruction.

    Where there is none, f16 is converted by rescaling the exponent (exact, denormals included).
    """
    if kind == "f32":
        return raw
    ints, floats = (ir.VectorType(each, raw.type.count) for each in (ir.IntType(32), F32))
    if kind == "f16" and target().converts_f16:
        return builder.fpext(builder.bitcast(raw, ir.VectorType(ir.HalfType(), raw.type.count)), floats)
    const = partial(constant, ints)
    bits = builder.zext(raw, ints)
    if kind == "bf16":
        return builder.bitcast(builder.shl(bits, const(16)), floats)
    if kind != "f16":
        raise KeyError(kind)
    sign = builder.shl(builder.and_(bits, const(0x8000)), const(16))
    magnitude = builder.shl(builder.and_(bits, const(0x7FFF)), const(13))
    scaled = builder.fmul(builder.bitcast(magnitude, floats), constant(floats, 2.0**112))
    special = builder.icmp_unsigned(">=", magnitude, const(0x7C00 << 13))
    infinite = builder.or_(magnitude, const(0x7F800000))
    value = builder.select(special, infinite, builder.bitcast(scaled, ints))
    return builder.bitcast(builder.or_(value, sign), floats)


def storage(kind: str) -> Any:
    """Return the type in which values of `kind` are stored: f32 as itself, f16 and bf16 as their 16 bits."""
    return F32 if kind == "f32" else ir.IntType(8 * DTYPES[kind].size)


def narrow(builder: Any, value: Any, kind: str) -> Any:
    """Round f32 lanes to the 16 bits of f16 or bf16, to nearest even; NaN stays NaN."""
    floats, count = value.type, value.type.count
    ints, halves = (ir.VectorType(ir.IntType(size), count) for size in (32, 16))
    bits, const = builder.bitcast(value, ints), partial(constant, ints)
    nan = builder.fcmp_unordered("uno", value, value)
    if kind == "bf16":
        top = builder.lshr(bits, const(16))
        odd = builder.and_(top, const(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, const(0x7FFF))), const(16))
        quiet = builder.or_(builder.and_(top, const(0x8000)), const(0x7FC0))
        return builder.trunc(builder.select(nan, quiet, rounded), halves)
    if kind != "f16":
        raise KeyError(kind)
    magnitude = builder.and_(bits, const(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(magnitude, const(13)), const(1))
    nearest = builder.add(magnitude, builder.add(odd, const((1 << 12) - 1)))
    normal = builder.lshr(builder.sub(nearest, const(112 << 23)), const(13))
    # the last bit of 0.5 is worth 2**-24, an f16 denormal's: the addition rounds to it
    half = constant(floats, 0.5)
    shifted = builder.bitcast(builder.fadd(builder.bitcast(magnitude, floats), half), ints)
    denormal = builder.sub(shifted, builder.bitcast(half, ints))
    rounded = builder.select(builder.icmp_unsigned("<", magnitude, const(0x38800000)), denormal, normal)
    large = builder.icmp_unsigned(">=", magnitude, const(0x47800000))
    rounded = builder.select(large, const(0x7C00), rounded)
    rounded = builder.select(nan, const(0x7E00), rounded)
    sign = builder.lshr(builder.and_(bits, const(0x80000000)), const(16))
    return builder.trunc(builder.or_(rounded, sign), halves)


def some(builder: Any, count: Any, carried: list[Any], body: Callable[[list[Any]], list[Any]], tag: str) -> list[Any]:
    """Emit a `loop` that `count` may leave out."""
    asked = builder.icmp_signed(">", count, I64(0))
    return when(builder, asked, carried, lambda: loop(builder, count, carried, body, tag))


def runs(
    builder: Any,
    count: Any,
    carried: list[Any],
    widths: tuple[int, ...],
    body: Callable[[int], Callable[[list[Any]], list[Any]]],
) -> list[Any]:
    """Emit a loop over `count` values for each width, falling powers of two: each takes what it can of what is left."""
    for size in widths:
        number, count = builder.lshr(count, I64(size.bit_length() - 1)), builder.and_(count, I64(size - 1))
        carried = some(builder, number, carried, body(size), "vector")
    return carried


def each_run(
    builder: Any, count: Any, places: Sequence[Any], sizes: Sequence[int], widths: tuple[int, ...],
    emit: Callable[[int, list[Any]], None],
) -> None:  # fmt: skip
    """Emit a loop over `count` adjacent values of several tensors: ``emit(width, places)`` for runs of each width.

    `places` are addresses, and `sizes` the bytes of a value at each.
    """

    def body(width: int) -> Callable[[list[Any]], list[Any]]:
        def some(carried: list[Any]) -> list[Any]:
            emit(width, carried)
            return [builder.add(place, I64(size * width)) for place, size in zip(carried, sizes, strict=True)]

        return some

    runs(builder, count, list(places), widths, body)
