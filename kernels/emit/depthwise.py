"""Depthwise sums as one instruction sequence: few taps, many groups, so that nothing else may cost time.

A register tile pays for its call, for reading its walk and for adding to memory; with nine taps that is more than the
sums themselves. Here one call has all groups: forward, a few pixels, whose sums begin with their bias and are stored
once; of a filter gradient, a few taps over a box of pixels, in channels that are read where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.emit import simd
from kernels.emit.register_tiles import Walk, sum_box

__all__ = ["LANE_PIXELS", "LINE_TAPS", "lane_sums", "lane_taps"]

LANE_PIXELS = 8
"""Pixels of one call: their sums, a line of weights and their addresses fit the registers."""

LINE_TAPS = 3
"""Taps of a kernel line whose values may stay in registers from one position to the next."""


def lane_sums(width: int) -> Any:
    """Make an intrinsic that sums `LANE_PIXELS` pixels over all taps, for `groups` vectors of `width` groups each.

    Arguments: the addresses of a `kernels.emit.register_tiles.Walk` (lines of weights are one vector), of the first
    line of weights, of its group's line of bias, of src and dst, and of the pixels' byte offsets in both; then the
    number of vectors and the bytes between their weights. Vectors follow each other in src and dst.
    """
    lane = ir.VectorType(simd.F32, width)
    line = 4 * width

    def typer(
        typingctx: Any, walk: Any, v: Any, bias: Any, s: Any, dst: Any, offsets: Any, places: Any, groups: Any,
        panel: Any,
    ) -> Any:  # fmt: skip
        return types.void(*([types.int64] * 9)), codegen

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        where, v, bias, s, dst, offsets, places, groups, panel = values
        walk = simd.fields(builder, where, Walk.dtype, "panel", "scalars", "counts")
        walk.panel = [builder.mul(step, simd.I64(line)) for step in walk.panel]
        rows = [simd.load(builder, builder.add(offsets, simd.I64(8 * m)), simd.I64, 8) for m in range(LANE_PIXELS)]

        def column(carried: list[Any]) -> list[Any]:
            vp, sp, *sums = carried
            weights = simd.load(builder, vp, lane)
            for m, row in enumerate(rows):
                sums[m] = simd.multiply_add(builder, simd.load(builder, builder.add(sp, row), lane), weights, sums[m])
            return [builder.add(vp, walk.panel[2]), builder.add(sp, walk.scalars[2]), *sums]

        def row(carried: list[Any]) -> list[Any]:
            vp, sp, *_ = carried
            sums = simd.loop(builder, walk.counts[2], carried, column, "lane.column", rolled=True)[2:]
            return [builder.add(vp, walk.panel[1]), builder.add(sp, walk.scalars[1]), *sums]

        def plane(carried: list[Any]) -> list[Any]:
            vp, sp, *_ = carried
            sums = simd.loop(builder, walk.counts[1], carried, row, "lane.row", rolled=True)[2:]
            return [builder.add(vp, walk.panel[0]), builder.add(sp, walk.scalars[0]), *sums]

        def group(carried: list[Any]) -> list[Any]:
            vp, bp, sp, to = carried
            start = simd.load(builder, bp, lane)
            sums = simd.loop(
                builder, walk.counts[0], [vp, sp, *[start] * LANE_PIXELS], plane, "lane.plane", rolled=True
            )[2:]
            for m, value in enumerate(sums):
                place = builder.add(to, simd.load(builder, builder.add(places, simd.I64(8 * m)), simd.I64, 8))
                builder.store(value, builder.inttoptr(place, lane.as_pointer()), align=4)
            return [
                builder.add(vp, panel),
                builder.add(bp, panel),
                builder.add(sp, simd.I64(line)),
                builder.add(to, simd.I64(line)),
            ]

        simd.loop(builder, groups, [v, bias, s, dst], group, "lane.group", rolled=True)
        return context.get_dummy_value()

    return intrinsic(typer)


def lane_taps(rows: int, vectors: int, width: int, kind: str, kept: int = 0) -> Any:
    """Make the register tile of `rows` taps of `width` groups each, for tensors whose groups follow each other.

    Arguments are those of `kernels.emit.register_tiles.fma_tile`, but both tensors are read as vectors of stored
    `kind`, the walk's steps are all in bytes, and behind the offsets of the rows stand the accumulator bytes of each
    one. The tile visits all vectors of groups, `vectors` at a time: one that begins inside a cache line shares its last
    line with the next one.

    With `kept` rows are lines of `LINE_TAPS` taps of which the last ones at one position are the first `kept` ones at
    the next: these stay in registers.
    """
    size = 4 if kind == "f32" else 2
    lane, raw = ir.VectorType(simd.F32, width), ir.VectorType(simd.storage(kind), width)

    def typer(typingctx: Any, walk: Any, v: Any, s: Any, offsets: Any, acc: Any) -> Any:
        return types.void(*([types.int64] * 5)), codegen

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        where, v, s, offsets, acc = values
        walk = simd.fields(builder, where, Walk.dtype, "panel", "scalars", "counts", "segment", "groups", "group_bytes")
        row_offsets, places = (
            [simd.load(builder, builder.add(offsets, simd.I64(8 * (first + m))), simd.I64, 8) for m in range(rows)]
            for first in (0, rows)
        )

        def group(count: int) -> Callable[[list[Any]], list[Any]]:
            """Sum `count` vectors of groups."""

            def read(place: Any) -> list[Any]:
                each = [builder.add(place, simd.I64(size * width * j)) for j in range(count)]
                return [simd.widen(builder, simd.load(builder, one, raw, size), kind, width) for one in each]

            def column(carried: list[Any]) -> list[Any]:
                vp, sp, *sums = carried
                known, following, line = sums[count * rows :], [], read(vp)
                for m, offset in enumerate(row_offsets):
                    tap = m % LINE_TAPS
                    first = count * (m // LINE_TAPS * kept + tap)
                    taken = known[first : first + count] if tap < kept else read(builder.add(sp, offset))
                    if tap >= LINE_TAPS - kept:
                        following += taken
                    for j in range(count):
                        sums[count * m + j] = simd.multiply_add(builder, taken[j], line[j], sums[count * m + j])
                sums[count * rows :] = following
                return [builder.add(vp, walk.panel[2]), simd.opaque(builder, builder.add(sp, walk.scalars[2])), *sums]

            def begin(start: list[Any]) -> list[Any]:
                first = [offset for m, offset in enumerate(row_offsets) if m % LINE_TAPS < kept]
                return [value for offset in first for value in read(builder.add(start[1], offset))]

            def body(carried: list[Any]) -> list[Any]:
                vp, sp, to = carried

                def add_sums(sums: list[Any]) -> None:
                    for index, value in enumerate(sums):
                        place = builder.add(
                            places[index // count], builder.mul(walk.group_bytes, simd.I64(index % count))
                        )
                        address = builder.inttoptr(builder.add(to, place), lane.as_pointer())
                        builder.store(builder.fadd(builder.load(address, align=4), value), address, align=4)

                zeros = [ir.Constant(lane, [0.0] * width)] * (count * rows)
                add_sums(sum_box(builder, walk, [vp, sp], zeros, column, add_sums, rolled=True, begin=begin))
                step = simd.I64(size * width * count)
                return [
                    builder.add(vp, step),
                    builder.add(sp, step),
                    builder.add(to, builder.mul(walk.group_bytes, simd.I64(count))),
                ]

            return body

        simd.twice(builder, walk.groups, [v, s, acc], vectors, group)
        return context.get_dummy_value()

    return intrinsic(typer)
