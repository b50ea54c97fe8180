"""Sums of adjacent values in float64, and values plus a bias, as compiled loops over planes or rows.

A data tensor is either planes, one for each image and channel, whose values share a bias (NCX), or rows of all channels
(NXC).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types

from kernels.emit import simd
from kernels.emit.compiler import Doubles, jit
from kernels.emit.intrinsics import by_kind, load_wide, size_of, store_narrow
from kernels.target import target

__all__ = ["add_to_planes", "add_to_rows", "sum_planes", "sum_rows"]

_F64 = ir.DoubleType()
_I32 = ir.IntType(32)
_LANES = target().lanes
_CHAINS = 4
"""Sums that are formed side by side: an addition takes four cycles."""


@partial(by_kind, result=types.float64)
def _sum(builder: Any, kind: str, source: Any, count: Any) -> Any:
    """Return the sum of `count` adjacent values in float64, in a fixed order."""
    size, lane = size_of(kind), ir.VectorType(_F64, _LANES)

    def body(width: int) -> Callable[[list[Any]], list[Any]]:
        def add_some(carried: list[Any]) -> list[Any]:
            place, single, *sums = carried
            if width == 1:
                value = builder.extract_element(load_wide(builder, place, kind, 1), _I32(0))
                single = builder.fadd(single, builder.fpext(value, _F64))
            for chain in range(width // _LANES):
                at = builder.add(place, simd.I64(size * _LANES * chain))
                value = builder.fpext(load_wide(builder, at, kind, _LANES), lane)
                sums[chain] = builder.fadd(sums[chain], value)
            return [builder.add(place, simd.I64(size * width)), single, *sums]

        return add_some

    start = [source, ir.Constant(_F64, 0.0), *[ir.Constant(lane, [0.0] * _LANES)] * _CHAINS]
    _, single, *sums = simd.runs(builder, count, start, (_CHAINS * _LANES, _LANES, 1), body)
    while len(sums) > 1:
        sums = [builder.fadd(one, other) for one, other in zip(sums[::2], sums[1::2], strict=True)]
    (total,) = sums
    width = _LANES
    while width > 1:
        width //= 2
        halves = [ir.Constant(ir.VectorType(_I32, width), list(range(i, i + width))) for i in (0, width)]
        total = builder.fadd(*(builder.shuffle_vector(total, total, half) for half in halves))
    return builder.fadd(builder.extract_element(total, _I32(0)), single)


@by_kind
def _add_to_sums(builder: Any, kind: str, sums: Any, source: Any, count: Any) -> None:
    """Add `count` adjacent values to as many float64 at `sums`."""

    def some(width: int, places: list[Any]) -> None:
        value = builder.fpext(load_wide(builder, places[1], kind, width), ir.VectorType(_F64, width))
        simd.add_to(builder, value, places[0], 8)

    simd.each_run(builder, count, (sums, source), (8, size_of(kind)), (_LANES, 1), some)


def _add_bias(each: bool, builder: Any, kind: str, target: Any, source: Any, bias: Any, count: Any) -> None:
    """Store `count` adjacent values plus a bias, rounded once.

    The bias is f32: one for `each` value, adjacent too, or one for all. A sum of two f16 or bf16 that was rounded to
    f32 rounds to 16 bits like the exact one, as f32 has more than twice as many digits.
    """

    def some(width: int, places: list[Any]) -> None:
        to, place, there = places
        if each:
            added = simd.load(builder, there, ir.VectorType(simd.F32, width))
        else:
            added = simd.splat(builder, simd.load(builder, there, simd.F32), width)
        store_narrow(builder, builder.fadd(load_wide(builder, place, kind, width), added), to, kind)

    sizes = size_of(kind), size_of(kind), 4 if each else 0
    simd.each_run(builder, count, (target, source, bias), sizes, (_LANES, 1), some)


_add_one, _add_each = by_kind(partial(_add_bias, False)), by_kind(partial(_add_bias, True))


@jit
def sum_planes(kind: int, source: int, images: int, image_step: int, step: int, count: int, sums: Doubles) -> None:
    """Add to each of `sums` the `count` values of its plane of each image; planes are `step` bytes apart."""
    for image in range(images):
        for plane in range(len(sums)):
            sums[plane] += _sum(kind, source + image * image_step + plane * step, count)


@jit
def sum_rows(kind: int, source: int, step: int, rows: int, count: int, sums: int) -> None:
    """Add `rows` rows of `count` values, `step` bytes apart, to as many float64 at `sums`."""
    for row in range(rows):
        _add_to_sums(kind, sums, source + row * step, count)


@jit
def add_to_planes(kind: int, target: int, source: int, bias: int, planes: int, step: int, count: int) -> None:
    """Add to the `count` values of each plane the f32 that it has at `bias`; planes are `step` bytes apart."""
    for plane in range(planes):
        _add_one(kind, target + plane * step, source + plane * step, bias + 4 * plane, count)


@jit
def add_to_rows(kind: int, target: int, source: int, bias: int, rows: int, step: int, count: int) -> None:
    """Add to each of `rows` rows, `step` bytes apart, the `count` f32 at `bias`."""
    for row in range(rows):
        _add_each(kind, target + row * step, source + row * step, bias, count)
