"""Lanes that are the dst channels of groups: each src value is packed for all lanes of its group, or exchanged."""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir

from kernels.emit import simd
from kernels.emit.compiler import emitted
from kernels.target import target

__all__ = ["MULTIPLIERS", "grouped", "repeat_groups"]

WIDTH = target().lanes

MULTIPLIERS = (2, 4)
"""Dst channels of a group: few, and whole groups fill a vector."""

_INDEX = ir.VectorType(ir.IntType(32), WIDTH)


def grouped(src_channels: int, dst_channels: int) -> bool:
    """Return whether groups have as many src as dst channels, several, and two groups or more fill a vector."""
    return 1 < src_channels == dst_channels < WIDTH and WIDTH % dst_channels == 0


def _permuted(builder: Any, value: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), ir.Constant(_INDEX, order))


def _case(many: Any, builder: Any, emit: Any) -> None:
    """Emit a choice between the `MULTIPLIERS`."""
    simd.switch(builder, builder.lshr(many, simd.I64(2)), [partial(emit, each) for each in MULTIPLIERS])


@emitted
def repeat_groups(builder: Any, many: Any, place: Any, line: Any, count: Any) -> None:
    """Repeat each f32 of some lines (at least 1), `line` bytes apart, so many times, in place.

    Lines are whole vectors, and a vector behind the last one may be read.
    """
    vectors = builder.sdiv(line, simd.I64(4 * WIDTH))

    def some(each: int) -> list[Any]:
        def one(places: list[Any]) -> list[Any]:
            def vector(carried: list[Any]) -> list[Any]:
                at = builder.sub(carried[0], simd.I64(1))
                first = builder.add(places[0], builder.mul(at, simd.I64(4 * WIDTH // each)))
                value = simd.load(builder, first, ir.VectorType(simd.F32, WIDTH))
                to = builder.add(places[0], builder.mul(at, simd.I64(4 * WIDTH)))
                simd.store(builder, _permuted(builder, value, [i // each for i in range(WIDTH)]), to)
                return [at]

            simd.loop(builder, vectors, [vectors], vector, "vector", rolled=True)
            return [builder.add(places[0], line)]

        simd.loop(builder, count, [place], one, "line", rolled=True)
        return []

    _case(many, builder, some)
