"""Depthwise weight gradients as one instruction sequence: few taps, many groups, so that nothing else may cost time.

A register tile pays for its call, for reading its walk and for adding to memory; with nine taps that is more than the
sums themselves. Here one call has all groups: a few taps over a box of pixels, in channels that lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from kernels.emit import simd
from kernels.emit.intrinsics import load_wide, size_of
from kernels.emit.register_tiles import Walk, sum_box

__all__ = ["LINE_TAPS", "lane_taps"]

LINE_TAPS = 3
"""Taps of a kernel line whose values may stay in registers from one position to the next."""


def lane_taps(rows: int, vectors: int, width: int, kind: str, kept: int = 0) -> Callable[..., None]:
    """Make what emits the register tile of `rows` taps of `width` groups each, for tensors with adjacent groups.

    Arguments are those of `kernels.emit.register_tiles.fma_tile`, but both tensors are read as vectors of stored
    `kind`, the walk's steps are all in bytes, and behind the offsets of the rows stand the accumulator bytes of each
    one. The tile visits all vectors of groups, `vectors` at a time: one that begins inside a cache line shares its last
    line with the next one.

    With `kept` rows are lines of `LINE_TAPS` taps of which the last ones at one position are the first `kept` ones at
    the next: these stay in registers.
    """
    size, lane = size_of(kind), ir.VectorType(simd.F32, width)

    def emit(builder: Any, where: Any, v: Any, s: Any, offsets: Any, acc: Any) -> None:
        walk = simd.fields(builder, where, Walk)
        row_offsets, places = (
            [simd.load(builder, builder.add(offsets, simd.I64(8 * (first + m))), simd.I64, 8) for m in range(rows)]
            for first in (0, rows)
        )

        def group(count: int) -> Callable[[list[Any]], list[Any]]:
            """Sum `count` vectors of groups."""

            def read(place: Any) -> list[Any]:
                each = [builder.add(place, simd.I64(size * width * j)) for j in range(count)]
                return [load_wide(builder, one, kind, width) for one in each]

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
                        group = simd.nth(builder, to, walk.group_bytes, index % count)
                        simd.add_to(builder, value, builder.add(group, places[index // count]))

                zeros = [simd.constant(lane, 0.0)] * (count * rows)
                add_sums(sum_box(builder, walk, [vp, sp], zeros, column, add_sums, rolled=True, begin=begin))
                step = simd.I64(size * width * count)
                return [
                    builder.add(vp, step),
                    builder.add(sp, step),
                    simd.nth(builder, to, walk.group_bytes, count),
                ]

            return body

        simd.runs(builder, walk.groups, [v, s, acc], (vectors, 1), group)

    return emit
