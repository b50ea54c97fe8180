"""Sums of adjacent values in float64, and values plus a bias, as compiled loops over planes or rows.

A data tensor is either planes, one for each image and channel, whose values share a bias (NCX), or rows of all channels
(NXC).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.emit import simd
from kernels.emit.compiler import Doubles, jit
from kernels.emit.intrinsics import load_wide
from kernels.pack.panels import F16, F32, KINDS
from kernels.target import target

__all__ = ["add_to_planes", "add_to_rows", "sum_planes", "sum_rows"]

_F64 = ir.DoubleType()
_I32 = ir.IntType(32)
_LANES = target().lanes
_CHAINS = 4
"""Sums that are formed side by side: an addition takes four cycles."""


def _sum_of(kind: str) -> Any:
    """Make an intrinsic that returns the sum of `count` adjacent values in float64, in a fixed order."""
    size = 4 if kind == "f32" else 2
    lane = ir.VectorType(_F64, _LANES)

    def sum_run(typingctx: Any, source: Any, count: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
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

            source, count = values
            zero = ir.Constant(lane, [0.0] * _LANES)
            start = [source, ir.Constant(_F64, 0.0), *[zero] * _CHAINS]
            widths = (_CHAINS * _LANES, *(width for width in (_LANES,) if width > 1), 1)
            _, single, *sums = simd.runs(builder, count, start, widths, body)
            while len(sums) > 1:
                sums = [builder.fadd(one, other) for one, other in zip(sums[::2], sums[1::2], strict=True)]
            (total,) = sums
            width = _LANES
            while width > 1:
                width //= 2
                halves = [ir.Constant(ir.VectorType(_I32, width), list(range(i, i + width))) for i in (0, width)]
                total = builder.fadd(*(builder.shuffle_vector(total, total, half) for half in halves))
            return builder.fadd(builder.extract_element(total, _I32(0)), single)

        return types.float64(types.int64, types.int64), codegen

    return intrinsic(sum_run)


def _add_sums(kind: str) -> Any:
    """Make an intrinsic that adds `count` adjacent values to as many float64 at `sums`."""
    size = 4 if kind == "f32" else 2

    def add_run(typingctx: Any, sums: Any, source: Any, count: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            def body(width: int) -> Callable[[list[Any]], list[Any]]:
                lane = ir.VectorType(_F64, width)

                def add_some(carried: list[Any]) -> list[Any]:
                    to, place = carried
                    value = builder.fpext(load_wide(builder, place, kind, width), lane)
                    simd.store(builder, builder.fadd(simd.load(builder, to, lane, 8), value), to, 8)
                    return [builder.add(to, simd.I64(8 * width)), builder.add(place, simd.I64(size * width))]

                return add_some

            sums, source, count = values
            simd.twice(builder, count, [sums, source], _LANES, body)
            return context.get_dummy_value()

        return types.void(*([types.int64] * 3)), codegen

    return intrinsic(add_run)


def _add_bias(kind: str, *, each: bool) -> Any:
    """Make an intrinsic that stores `count` adjacent values plus a bias, rounded once.

    The bias is f32: one for `each` value, adjacent too, or one for all. A sum of two f16 or bf16 that was rounded to
    f32 rounds to 16 bits like the exact one, as f32 has more than twice as many digits.
    """
    size = 4 if kind == "f32" else 2

    def add_run(typingctx: Any, target: Any, source: Any, bias: Any, count: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            def body(width: int) -> Callable[[list[Any]], list[Any]]:
                def add_some(carried: list[Any]) -> list[Any]:
                    to, place, there = carried
                    if each:
                        added = simd.load(builder, there, ir.VectorType(simd.F32, width))
                        there = builder.add(there, simd.I64(4 * width))
                    else:
                        added = simd.splat(builder, simd.load(builder, there, simd.F32), width)
                    total = builder.fadd(load_wide(builder, place, kind, width), added)
                    stored = total if kind == "f32" else simd.narrow(builder, total, kind, width)
                    simd.store(builder, stored, to, size)
                    step = simd.I64(size * width)
                    return [builder.add(to, step), builder.add(place, step), there]

                return add_some

            target, source, bias, count = values
            simd.twice(builder, count, [target, source, bias], _LANES, body)
            return context.get_dummy_value()

        return types.void(*([types.int64] * 4)), codegen

    return intrinsic(add_run)


_sum_f32, _sum_f16, _sum_bf16 = (_sum_of(kind) for kind in KINDS)
_add_f32, _add_f16, _add_bf16 = (_add_sums(kind) for kind in KINDS)
_one_f32, _one_f16, _one_bf16 = (_add_bias(kind, each=False) for kind in KINDS)
_each_f32, _each_f16, _each_bf16 = (_add_bias(kind, each=True) for kind in KINDS)


@jit
def sum_planes(kind: int, source: int, images: int, image_step: int, step: int, count: int, sums: Doubles) -> None:
    """Add to each of `sums` the `count` values of its plane of each image; planes are `step` bytes apart."""
    for image in range(images):
        for plane in range(len(sums)):
            place = source + image * image_step + plane * step
            if kind == F32:
                sums[plane] += _sum_f32(place, count)
            elif kind == F16:
                sums[plane] += _sum_f16(place, count)
            else:
                sums[plane] += _sum_bf16(place, count)


@jit
def sum_rows(kind: int, source: int, step: int, rows: int, count: int, sums: int) -> None:
    """Add `rows` rows of `count` values, `step` bytes apart, to as many float64 at `sums`."""
    for row in range(rows):
        place = source + row * step
        if kind == F32:
            _add_f32(sums, place, count)
        elif kind == F16:
            _add_f16(sums, place, count)
        else:
            _add_bf16(sums, place, count)


@jit
def add_to_planes(kind: int, target: int, source: int, bias: int, planes: int, step: int, count: int) -> None:
    """Add to the `count` values of each plane the f32 that it has at `bias`; planes are `step` bytes apart."""
    for plane in range(planes):
        at = plane * step
        if kind == F32:
            _one_f32(target + at, source + at, bias + 4 * plane, count)
        elif kind == F16:
            _one_f16(target + at, source + at, bias + 4 * plane, count)
        else:
            _one_bf16(target + at, source + at, bias + 4 * plane, count)


@jit
def add_to_rows(kind: int, target: int, source: int, bias: int, rows: int, step: int, count: int) -> None:
    """Add to each of `rows` rows, `step` bytes apart, the `count` f32 at `bias`."""
    for row in range(rows):
        at = row * step
        if kind == F32:
            _each_f32(target + at, source + at, bias, count)
        elif kind == F16:
            _each_f16(target + at, source + at, bias, count)
        else:
            _each_bf16(target + at, source + at, bias, count)
