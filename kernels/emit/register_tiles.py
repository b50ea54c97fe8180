"""Register tiles: walks over boxes of pixels that keep their sums in registers.

The one tile serves the whole convolution family. Over a box of ``outer x rows x cols`` positions it computes

    acc[m, :] += sum over positions p of scalar[m, p] * vector[p, :]

`vector` walks a packed panel, `scalar[m, p]` is read where it lies: each of the MR rows has its own byte offset, so
channels, taps and pixels in any layout can be rows, and strides and dilations are only other steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from kernels.blocks import STEPS
from kernels.emit import simd
from kernels.emit.compiler import Record, Vector, numbers

__all__ = ["Walk", "fma_tile", "sum_box"]


class Walk(Record):
    """A walk over a box of positions, along (outer, row, column).

    Steps of the vector `panel` are in lines (see `fma_tile`), those of the `scalars` in bytes. Each of the `counts` is
    at least 1. From one accumulator row to the next it is `acc_step` lines, and `segment` is the logarithm of the
    positions that are summed in registers. The sums are added to the accumulators. Only
    `kernels.emit.depthwise.lane_taps` reads the number of vectors of groups and the accumulator bytes between them.
    """

    panel: Vector = numbers(3)
    scalars: Vector = numbers(3)
    counts: Vector = numbers(3)
    acc_step: int
    segment: int
    groups: int
    group_bytes: int


def sum_box(
    builder: Any,
    walk: Any,
    places: list[Any],
    zeros: list[Any],
    column: Callable[[list[Any]], list[Any]],
    add_sums: Callable[[list[Any]], None],
    rolled: bool,
    begin: Callable[[list[Any]], list[Any]] = lambda _: [],
) -> list[Any]:
    """Emit the loops of a walk from the two `places` on around `column`; give the sums that are left at the end.

    `walk` has the fields of a `Walk`: the steps of the first place, here in bytes, and of the second, the counts, and
    the logarithm of the positions after which `add_sums` adds to memory. `begin` gives, from the places, what else
    `column` carries along: values behind the sums.
    """
    outers, lines, columns = walk.counts
    most = builder.shl(simd.I64(1), walk.segment)
    segments = builder.lshr(builder.add(columns, builder.sub(most, simd.I64(1))), walk.segment)

    def segment(carried: list[Any]) -> list[Any]:
        vp, sp, left, pending, *sums = carried
        take = builder.select(builder.icmp_signed("<", left, most), left, most)
        carried = [vp, sp, *sums, *begin([vp, sp])]
        if rolled:
            carried = simd.loop(builder, take, carried, column, "col", rolled=True)
        else:  # what a loop itself costs is shared by two columns
            carried = simd.runs(builder, take, carried, (2, 1), lambda size: column if size == 1 else two)
        vp, sp, *sums = carried[: 2 + len(zeros)]
        pending = builder.add(pending, take)
        full = builder.icmp_signed(">=", pending, most)
        here = builder.block
        with builder.if_then(full):
            add_sums(sums)
            flushed = builder.block
        merged = simd.join(builder, [pending, *sums], here, [simd.I64(0), *zeros], flushed)
        return [vp, sp, builder.sub(left, take), *merged]

    def two(carried: list[Any]) -> list[Any]:
        return column(column(carried))

    def row(carried: list[Any]) -> list[Any]:
        vp, sp, pending, *sums = carried
        pending, *sums = simd.loop(builder, segments, [vp, sp, columns, pending, *sums], segment, "segment")[3:]
        return [builder.add(vp, walk.panel[1]), builder.add(sp, walk.scalars[1]), pending, *sums]

    def outer(carried: list[Any]) -> list[Any]:
        vp, sp, pending, *sums = carried
        pending, *sums = simd.loop(builder, lines, [vp, sp, pending, *sums], row, "row")[2:]
        return [builder.add(vp, walk.panel[0]), builder.add(sp, walk.scalars[0]), pending, *sums]

    return simd.loop(builder, outers, [*places, simd.I64(0), *zeros], outer, "outer")[3:]


def fma_tile(rows: int, vectors: int, width: int, ahead: bool = False) -> Callable[..., None]:
    """Make what emits the register tile of `rows` x (`vectors` x `width`) f32 accumulators.

    A tile takes five 64-bit integers: the addresses of a `Walk`, the vector panel, the scalar base, `rows`
    int64 byte offsets of the scalars, and the first accumulator line. A line is ``vectors * width`` f32.

    The tile starts from zero in registers and adds to memory after every segment of positions or some more, and at the
    end: sums of sums lose fewer digits than one long sum. One that asks `ahead` is for vectors that are not in a cache.
    """
    line = 4 * vectors * width

    def emit(builder: Any, place: Any, v: Any, s: Any, offsets: Any, acc: Any) -> None:
        lane = ir.VectorType(simd.F32, width)
        walk = simd.fields(builder, place, Walk)
        walk.panel = [builder.mul(step, simd.I64(line)) for step in walk.panel]
        acc_step = builder.mul(walk.acc_step, simd.I64(line))
        row_offsets = [simd.load(builder, builder.add(offsets, simd.I64(8 * m)), simd.I64, 8) for m in range(rows)]
        lines = [simd.nth(builder, acc, acc_step, m) for m in range(rows)]
        for address in lines:
            simd.prefetch(builder, address)

        def add_sums(sums: list[Any]) -> None:
            for index, value in enumerate(sums):
                m, j = divmod(index, vectors)
                simd.add_to(builder, value, builder.add(lines[m], simd.I64(4 * width * j)))

        def column(carried: list[Any]) -> list[Any]:
            vp, sp, *sums = carried
            loaded = [simd.load(builder, builder.add(vp, simd.I64(4 * width * j)), lane) for j in range(vectors)]
            for place in range(0, line if ahead else 0, 64):
                simd.prefetch(builder, builder.add(vp, simd.I64(STEPS.panel_ahead_bytes + place)))
            for m in range(rows):
                scalar = simd.splat(builder, simd.load(builder, builder.add(sp, row_offsets[m]), simd.F32), width)
                for j in range(vectors):
                    sums[m * vectors + j] = simd.multiply_add(builder, scalar, loaded[j], sums[m * vectors + j])
            return [builder.add(vp, walk.panel[2]), simd.opaque(builder, builder.add(sp, walk.scalars[2])), *sums]

        zero = simd.constant(lane, 0.0)
        sums = sum_box(builder, walk, [v, s], [zero] * (rows * vectors), column, add_sums, rolled=False)
        add_sums(sums)

    return emit
