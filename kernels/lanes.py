"""Depthwise sums as one instruction sequence: few taps, many groups, so that nothing else may cost time.

A register tile pays for its call, for reading its walk and for adding to memory; with nine taps that is more than the
sums themselves. Here one call has a few pixels for all groups, begins with their bias and stores each sum once.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.simd import _F32 as F32
from kernels.simd import _I64 as I64
from kernels.simd import _fma as fma
from kernels.simd import _load as load_vector
from kernels.simd import _loop as loop

__all__ = ["LANE_PIXELS", "lane_sums"]

LANE_PIXELS = 8
"""Pixels of one call: their sums, a line of weights and their addresses fit the registers."""


def lane_sums(width: int) -> Any:
    """Make an intrinsic that sums `LANE_PIXELS` pixels over all taps, for `groups` vectors of `width` groups each.

    Arguments: the addresses of the walk (see `kernels.simd.fma_tile`; lines of weights are one vector), of the first
    line of weights, of its group's line of bias, of src and dst, and of the pixels' byte offsets in both; then the
    number of vectors and the bytes between their weights. Vectors follow each other in src and dst.
    """
    lane = ir.VectorType(F32, width)
    line = 4 * width

    def typer(
        typingctx: Any, walk: Any, v: Any, bias: Any, s: Any, dst: Any, offsets: Any, places: Any, groups: Any,
        panel: Any,
    ) -> Any:  # fmt: skip
        return types.void(*([types.int64] * 9)), codegen

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        walk, v, bias, s, dst, offsets, places, groups, panel = values
        multiply_add = fma(builder, lane)
        steps = [load_vector(builder, builder.add(walk, I64(8 * i)), I64, 8) for i in range(9)]
        for i in range(3):
            steps[i] = builder.mul(steps[i], I64(line))
        rows = [load_vector(builder, builder.add(offsets, I64(8 * m)), I64, 8) for m in range(LANE_PIXELS)]

        def column(carried: list[Any]) -> list[Any]:
            vp, sp, *sums = carried
            weights = load_vector(builder, vp, lane)
            for m, row in enumerate(rows):
                sums[m] = builder.call(
                    multiply_add, [load_vector(builder, builder.add(sp, row), lane), weights, sums[m]]
                )
            return [builder.add(vp, steps[2]), builder.add(sp, steps[5]), *sums]

        def row(carried: list[Any]) -> list[Any]:
            vp, sp, *_ = carried
            sums = loop(builder, steps[8], carried, column, "lane.column", rolled=True)[2:]
            return [builder.add(vp, steps[1]), builder.add(sp, steps[4]), *sums]

        def plane(carried: list[Any]) -> list[Any]:
            vp, sp, *_ = carried
            sums = loop(builder, steps[7], carried, row, "lane.row", rolled=True)[2:]
            return [builder.add(vp, steps[0]), builder.add(sp, steps[3]), *sums]

        def group(carried: list[Any]) -> list[Any]:
            vp, bp, sp, to = carried
            start = load_vector(builder, bp, lane)
            sums = loop(builder, steps[6], [vp, sp, *[start] * LANE_PIXELS], plane, "lane.plane", rolled=True)[2:]
            for m, value in enumerate(sums):
                place = builder.add(to, load_vector(builder, builder.add(places, I64(8 * m)), I64, 8))
                builder.store(value, builder.inttoptr(place, lane.as_pointer()), align=4)
            return [
                builder.add(vp, panel),
                builder.add(bp, panel),
                builder.add(sp, I64(line)),
                builder.add(to, I64(line)),
            ]

        loop(builder, groups, [v, bias, s, dst], group, "lane.group", rolled=True)
        return context.get_dummy_value()

    return intrinsic(typer)
