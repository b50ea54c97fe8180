"""The largest and the smallest of many bf16, whatever their signs: what packed values allow."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from kernels.emit import simd
from kernels.emit.compiler import emitted

__all__ = ["LEAST_BIAS", "LEAST_SUM", "SPECIAL", "lane_peaks", "magnitudes"]

SPECIAL = 0x7F80
"""Bits of Inf without its sign."""

LEAST_SUM = 142
"""Sum of two exponents, as f32 stores them: the 16 digits of a product are then worth 2**-111 to 2**-126 or more."""

LEAST_BIAS = np.float32(2.0**-119)
"""Smallest bias of 8 digits, the last of which is worth 2**-126."""

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)

_LANES = ir.VectorType(_I16, 32)


@partial(emitted, result=types.int64)
def lane_peaks(builder: Any, address: Any, count: Any, peaks: Any) -> Any:
    """Return the largest of `count` (at least 1) times 32 bf16, as bits without their signs: NaN is above Inf.

    The largest of every two lanes are stored at `peaks`, 16 values of 16 bits.
    """
    peak = _halved(builder, ">", _extremes(builder, address, count)[1])
    simd.store(builder, peak, peaks, 2)
    return _reduced(builder, ">", peak)


@partial(emitted, result=types.UniTuple(types.int64, 2))
def magnitudes(builder: Any, address: Any, count: Any) -> Any:
    """Return the smallest and the largest of `count` (at least 1) times 32 bf16, as bits without their signs.

    The smallest one is that of those which are not zero, less 1; without any it is 0xFFFF.
    """
    least, most = _extremes(builder, address, count)
    return _reduced(builder, "<", least), _reduced(builder, ">", most)


def _extremes(builder: Any, address: Any, count: Any) -> list[Any]:
    """Return the same of each lane."""

    def body(carried: list[Any]) -> list[Any]:
        place, least, most = carried
        bits = builder.and_(simd.load(builder, place, _LANES, 2), simd.constant(_LANES, 0x7FFF))
        lower = builder.sub(bits, simd.constant(_LANES, 1))  # of zero: 0xFFFF
        return [builder.add(place, _I64(64)), _choose(builder, "<", lower, least), _choose(builder, ">", bits, most)]

    start = [address, simd.constant(_LANES, 0xFFFF), simd.constant(_LANES, 0)]
    return simd.loop(builder, count, start, body, "magnitude")[1:]


def _choose(builder: Any, relation: str, one: Any, other: Any) -> Any:
    return builder.select(builder.icmp_unsigned(relation, one, other), one, other)


def _halved(builder: Any, relation: str, lanes: Any) -> Any:
    """Choose one of every two lanes."""
    count = lanes.type.count
    halves = [ir.Constant(ir.VectorType(_I32, count // 2), list(range(odd, count, 2))) for odd in (0, 1)]
    return _choose(builder, relation, *(builder.shuffle_vector(lanes, lanes, half) for half in halves))


def _reduced(builder: Any, relation: str, lanes: Any) -> Any:
    """Choose one of all lanes."""
    while lanes.type.count > 1:
        lanes = _halved(builder, relation, lanes)
    return builder.zext(builder.extract_element(lanes, _I32(0)), _I64)
