"""The largest and the smallest of many bf16, whatever their signs: what packed values allow."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.emit import simd
from kernels.emit.compiler import jit
from kernels.emit.intrinsics import store_value

__all__ = ["SPECIAL", "clear_lane", "lane_peaks", "magnitudes"]

SPECIAL = 0x7F80
"""Bits of Inf without its sign: of bf16, or of the first part of others."""

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)

_typed_intrinsic: Any = intrinsic


@_typed_intrinsic
def lane_peaks(typingctx: Any, address: Any, count: Any, peaks: Any) -> Any:
    """Return the largest of `count` (at least 1) times 32 bf16, as bits without their signs: NaN is above Inf.

    The largest of every two lanes are stored at `peaks`, 16 values of 16 bits.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.VectorType(_I16, 32)

        def body(carried: list[Any]) -> list[Any]:
            place, peak = carried
            bits = builder.and_(simd.load(builder, place, kind, 2), ir.Constant(kind, [0x7FFF] * 32))
            return [builder.add(place, _I64(64)), larger(bits, peak)]

        def larger(one: Any, other: Any) -> Any:
            return builder.select(builder.icmp_unsigned(">", one, other), one, other)

        peak = simd.loop(builder, values[1], [values[0], ir.Constant(kind, [0] * 32)], body, "peak")[1]
        for width in (16, 8, 4, 2, 1):
            lanes = [ir.Constant(ir.VectorType(_I32, width), list(range(odd, 2 * width, 2))) for odd in (0, 1)]
            peak = larger(*(builder.shuffle_vector(peak, peak, half) for half in lanes))
            if width == 16:
                simd.store(builder, peak, values[2], 2)
        return builder.zext(builder.extract_element(peak, _I32(0)), _I64)

    return types.int64(*[types.int64] * 3), codegen


@_typed_intrinsic
def magnitudes(typingctx: Any, address: Any, count: Any) -> Any:
    """Return the smallest and the largest of `count` (at least 1) times 32 bf16, as bits without their signs.

    The smallest one is that of those which are not zero, less 1; without any it is 0xFFFF.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.VectorType(_I16, 32)

        def choose(relation: str, one: Any, other: Any) -> Any:
            return builder.select(builder.icmp_unsigned(relation, one, other), one, other)

        def body(carried: list[Any]) -> list[Any]:
            place, least, most = carried
            bits = builder.and_(simd.load(builder, place, kind, 2), ir.Constant(kind, [0x7FFF] * 32))
            lower = builder.sub(bits, ir.Constant(kind, [1] * 32))  # of zero: 0xFFFF
            return [builder.add(place, _I64(64)), choose("<", lower, least), choose(">", bits, most)]

        start = [values[0], ir.Constant(kind, [0xFFFF] * 32), ir.Constant(kind, [0] * 32)]
        found = []
        for relation, lanes in zip("<>", simd.loop(builder, values[1], start, body, "magnitude")[1:], strict=True):
            for width in (16, 8, 4, 2, 1):
                halves = [ir.Constant(ir.VectorType(_I32, width), list(range(odd, 2 * width, 2))) for odd in (0, 1)]
                lanes = choose(relation, *(builder.shuffle_vector(lanes, lanes, half) for half in halves))
            found.append(builder.zext(builder.extract_element(lanes, _I32(0)), _I64))
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(types.int64, 2)(types.int64, types.int64), codegen


@jit
def clear_lane(place: int, lines: int) -> None:
    """Write zeros in place of one channel's pairs of bf16, the first at `place`, in `lines` lines of 16 channels."""
    for line in range(lines):
        store_value(place + 64 * line, np.float32(0))
