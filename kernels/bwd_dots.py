"""Filter gradients of bf16 and f16 on products of bf16 pairs, where the processor has instructions for them.

Zeros multiply here: those that fill up channels, pairs and steps, and those of the padding. With finite data they add
nothing. A block of 16 channels that holds Inf or NaN among a slab's pixels is summed pixel by pixel over real taps
instead, for that slab; the slabs and blocks depend on the problem alone, so the bits do not depend on the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from kernels._jit import Floats, Table, Vector, jit
from kernels.arena import address, arena_address
from kernels.bwd_weights import BATCH_MACS, BwdWeights, Part
from kernels.cpu import cpu
from kernels.dot_schedule import DotSchedule, dot_schedule
from kernels.dots import BEGIN, BLOCKS, END, EXACT, ROWS, STAGE, STEP, TILE, call_dots, dot_table
from kernels.packing import KINDS
from kernels.plan import Storage, Unit
from kernels.planes import pack_pairs16, pack_planes16, plane_finite, split_f16
from kernels.problem import ConvProblem

__all__ = ["BWD_DOTS"]

BLOCK_PIXELS = 320 if cpu().dots == "amx" else 512
"""Pixels of one walk at the most: 32 staged rows, or 32 channels of b, leave room for others in the first cache."""

STAGE_BYTES = 2 * ROWS * (2 * BLOCK_PIXELS + 64) if cpu().dots == "amx" else 0
"""Staged rows, an odd number of cache lines each."""

LEAST_USE = {("amx", "bf16"): 0.3, ("amx", "f16"): 0.5, ("avx512bf16", "bf16"): 0.45}
"""Share of multiplications that are not by filling zeros, above which these instructions outdo f32 ones."""

LINE = 4 * TILE
"""Bytes of an accumulator row."""


@jit
def _finite(channels: int, block: int, panel: int, plane: int, finite: Vector) -> None:
    """Say which blocks of 16 channels, of `block` bytes, are finite; of the last one only its channels' planes."""
    for i in range(finite.size):
        size = block if channels >= TILE * (i + 1) else plane * (channels - TILE * i)
        finite[i] = 1 if plane_finite(panel + i * block, size // 64) else 0


if cpu().dots == "amx":

    @jit
    def _add_rows(
        table: Vector, parts: int, i0: int, i1: int, steps: int, offsets: Vector, taps: int, a: int, a_part: int,
        b: int, b_blocks: int, b_block: int, b_finite: Vector, acc: int, acc_step: int, stage: int,
    ) -> None:  # fmt: skip
        """Stage 32 rows at a time and sum them with all finite blocks of b.

        Their sums stay in the second cache for all pixels, and the rows of one walk in the first.
        """
        last, b_part = min(offsets.size, TILE * i1 * taps), b_blocks * b_block
        walks = (steps * STEP + BLOCK_PIXELS - 1) // BLOCK_PIXELS
        for row in range(TILE * i0 * taps, last, 2 * ROWS):
            down = min(2, (last - row) // ROWS)
            for walk in range(walks):
                first, end = steps * walk // walks, steps * (walk + 1) // walks
                count = end - first
                pitch = LINE * (count | 1)
                for p in range(parts):
                    call_dots(
                        table[STAGE], a + p * a_part + LINE * first, offsets.ctypes.data + 8 * row, 0, pitch, count,
                        stage, 0, down * ROWS,
                    )  # fmt: skip
                    for j0 in range(0, b_blocks, 2):
                        across = min(2, b_blocks - j0)
                        size = across if b_finite[j0] + b_finite[j0 + across - 1] == 2 else 1
                        for j in range(j0, j0 + across, size):
                            for q in range(parts if b_finite[j] == 1 else 0):
                                call_dots(
                                    table[BLOCKS + 2 * (down - 1) + size - 1], stage, pitch,
                                    b + q * b_part + j * b_block + STEP // 2 * LINE * first, b_block, count,
                                    acc + j * acc_step + row * LINE, acc_step, 0,
                                )  # fmt: skip

else:

    @jit
    def _add_rows(
        table: Vector, parts: int, i0: int, i1: int, steps: int, offsets: Vector, taps: int, a: int, a_part: int,
        b: int, b_blocks: int, b_block: int, b_finite: Vector, acc: int, acc_step: int, stage: int,
    ) -> None:  # fmt: skip
        """Sum the rows with two blocks of b at a time, where both are finite: their pixels stay in the first cache."""
        last, pairs = min(offsets.size, TILE * i1 * taps), steps * STEP // 2
        for first in range(0, pairs, BLOCK_PIXELS // 2):
            count = min(BLOCK_PIXELS // 2, pairs - first)
            for j0 in range(0, b_blocks, 2):
                across = min(2, b_blocks - j0)
                size = across if b_finite[j0] + b_finite[j0 + across - 1] == 2 else 1
                for j in range(j0, j0 + across, size):
                    for row in range(TILE * i0 * taps, last if b_finite[j] == 1 else 0, ROWS):
                        call_dots(
                            table[BLOCKS + size - 1], a + 4 * first, offsets.ctypes.data + 8 * row,
                            b + j * b_block + LINE * first, b_block, count, acc + j * acc_step + row * LINE, acc_step,
                            0,
                        )  # fmt: skip


@jit
def _walk(
    table: Vector, parts: int, pixels: int, offsets: Vector, taps: int, a: int, a_part: int, a_finite: Vector,
    b: int, b_blocks: int, b_block: int, b_finite: Vector, acc: int, acc_step: int, stage: int,
) -> None:  # fmt: skip
    """Sum the rows of finite channels, as many in a row as there are, with finite blocks of b."""
    steps, i = (pixels + STEP - 1) // STEP, 0
    while i < a_finite.size:
        start = i
        while i < a_finite.size and a_finite[i] == 1:
            i += 1
        if start < i:
            _add_rows(
                table, parts, start, i, steps, offsets, taps, a, a_part, b, b_blocks, b_block, b_finite, acc, acc_step,
                stage,
            )  # fmt: skip
        else:
            i += 1


@jit
def _walk_exactly(
    table: Vector, parts: int, slab: Vector, steps: Vector, shifts: Table, taps: int, channels: int,
    a: int, a_plane: int, a_rest: int, a_finite: Vector, b: int, b_blocks: int, b_block: int, b_finite: Vector,
    acc: int, acc_step: int,
) -> None:  # fmt: skip
    """Sum all pairs of blocks of which one is not finite, over the pixels for which each tap is inside."""
    b_rest = (parts - 1) * b_blocks * b_block
    for j in range(b_blocks):
        for c in range(channels):
            if a_finite[c // TILE] + b_finite[j] == 2:
                continue
            for t in range(shifts.shape[0]):
                sums = acc + j * acc_step + (c * taps + shifts[t, 1]) * LINE
                low, high = max(slab[6], shifts[t, 6]), min(slab[7], shifts[t, 7])
                for n in range(slab[1] - slab[0] if low < high else 0):
                    for d in range(max(slab[2], shifts[t, 2]), min(slab[3], shifts[t, 3])):
                        for h in range(max(slab[4], shifts[t, 4]), min(slab[5], shifts[t, 5])):
                            place = n * steps[0] + (d - slab[2]) * steps[1] + (h - slab[4]) * steps[2]
                            place += (low - slab[6]) * steps[3]
                            call_dots(
                                table[EXACT], a + c * a_plane + shifts[t, 0] + place, a_rest, b + j * b_block, b_rest,
                                high - low, sums, place // 2, 0,
                            )  # fmt: skip


@jit
def add_dots(
    table: Vector, parts: int, groups: int, slabs: Table, shifts: Table, offsets: Vector, taps: int,
    panel_steps: Vector, sizes: Vector, a: Vector, a_boxes: Table, a_steps: Vector,
    b: Vector, b_boxes: Table, b_steps: Vector, panels: int, acc: int, acc_bytes: int, acc_step: int,
) -> None:  # fmt: skip
    """Add slabs of pixels to the accumulators of `groups` groups, [block of b][channel of a][tap][16].

    `a` and `b` are each tensor's address and its bytes between groups; for the other tables see
    `kernels.dot_schedule`. `sizes` are channels, planes and bytes of a plane of a, then channels and blocks of b, and
    positions of all images and of one. `panels` holds a's planes, b's pairs and staged rows. The caller owns all of
    them.
    """
    channels, a_plane, b_blocks, b_block = sizes[0], sizes[2], sizes[4], 32 * sizes[5]
    a_blocks, a_part, b_part = (channels + TILE - 1) // TILE, sizes[1] * a_plane, b_blocks * b_block
    a_finite, b_finite = np.empty(a_blocks, np.int64), np.empty(b_blocks, np.int64)
    a_rows, b_rows = a_boxes.shape[0] // slabs.shape[0], b_boxes.shape[0] // slabs.shape[0]
    pairs, stage = panels + parts * a_part, panels + parts * (a_part + b_part)
    for s in range(slabs.shape[0]):
        pixels = (slabs[s, 1] - slabs[s, 0] - 1) * panel_steps[0] // 2 + sizes[6]
        a_now, b_now = a_boxes[s * a_rows : (s + 1) * a_rows], b_boxes[s * b_rows : (s + 1) * b_rows]
        for g in range(groups):
            last = s if g > 0 else s - 1
            a_before, b_before = (
                a_boxes[last * a_rows : (last + 1) * a_rows],
                b_boxes[last * b_rows : (last + 1) * b_rows],
            )
            pack_planes16(channels, sizes[1], a_now, a_before, a[0] + g * a[1], a_steps, panels, a_plane, panel_steps)
            pack_pairs16(sizes[3], b_blocks, b_now, b_before, b[0] + g * b[1], b_steps, pairs, b_block, panel_steps)
            if parts == 2:
                split_f16(panels, panels + a_part, a_part // 16)
                split_f16(pairs, pairs + b_part, b_part // 16)
            _finite(channels, TILE * a_plane, panels, a_plane, a_finite)
            _finite(TILE * b_blocks, b_block, pairs, 0, b_finite)
            sums = acc + g * acc_bytes
            call_dots(table[BEGIN], 0, 0, 0, 0, 0, 0, 0, 0)
            _walk(
                table, parts, pixels, offsets, taps, panels, a_part, a_finite, pairs, b_blocks, b_block, b_finite,
                sums, acc_step, stage,
            )  # fmt: skip
            call_dots(table[END], 0, 0, 0, 0, 0, 0, 0, 0)
            _walk_exactly(
                table, parts, slabs[s], panel_steps, shifts, taps, channels, panels, a_plane, (parts - 1) * a_part,
                a_finite, pairs, b_blocks, b_block, b_finite, sums, acc_step,
            )  # fmt: skip


class DotPart(Part):
    """One unit's share: some groups and blocks of b's channels, over some chunks of the pixels."""

    plan: DotSchedule  # type: ignore[assignment]  # the sums read what both kinds of schedule have

    def __init__(self, problem: ConvProblem, plan: DotSchedule, unit: Unit) -> None:
        self.problem, self.plan = problem, plan
        self.g0, self.g1, self.b0, self.b1, self.index, self.parts = unit.part
        mine = plan.blocks[self.b0 : self.b1]
        self.first_lane, self.width = int(mine[0, 3]), TILE * len(mine)
        self.blocks = np.column_stack([mine, 4 * (mine[:, 3] - self.first_lane) * plan.rows, 0 * mine[:, 3]])
        self.group_floats = plan.rows * self.width
        self.floats = (self.g1 - self.g0) * self.group_floats
        self.slabs = np.array(plan.slabs, np.int64)
        self.batch = max(1, BATCH_MACS * len(plan.slabs) // max(1, problem.macs))
        self.sizes = np.array(
            (plan.channels, plan.a_planes, plan.a_plane, int(mine[:, 1].sum()), len(mine), plan.positions, plan.pixels),
            np.int64,
        )
        self.stores = (KINDS[problem.dtype], 0, self.blocks, *self._strides())

    def _add_slabs(self, inputs: Sequence[Storage], some: slice, acc: Floats) -> None:
        plan = self.plan
        wide, narrow = inputs[::-1] if self.problem.op.startswith("ConvT") else inputs
        parts = 2 if self.problem.dtype == "f16" else 1
        panels = plan.a_planes * plan.a_plane + 2 * self.width * plan.positions
        a = wide.ctypes.data + 2 * (plan.a.origin + self.g0 * plan.a.group)
        b = narrow.ctypes.data + 2 * (self.g0 * plan.b.group + self.first_lane * plan.b.channel)
        add_dots(
            dot_table(), parts, self.g1 - self.g0, self.slabs[some], plan.shifts, plan.offsets, plan.taps,
            plan.panel_steps, self.sizes,
            np.array((a, 2 * plan.a.group), np.int64), plan.a_boxes[some].reshape(-1, 6), plan.a_steps,
            np.array((b, 2 * plan.b.group), np.int64), plan.b_boxes[some].reshape(-1, 6), plan.b_steps,
            arena_address("vector", (parts * panels + STAGE_BYTES) // 4), address(acc), 4 * self.group_floats,
            4 * TILE * plan.rows,
        )  # fmt: skip


@lru_cache(maxsize=256)
def _part(problem: ConvProblem, unit: Unit) -> DotPart:
    plan = dot_schedule(problem)
    assert plan is not None
    return DotPart(problem, plan, unit)


class BwdDots(BwdWeights):
    """Weight gradients of Convolution and ConvTranspose from products of bf16 pairs."""

    name = f"bwd_weights_{cpu().dots}"

    def refuse(self, problem: ConvProblem) -> str | None:
        """Take 16-bit weight gradients whose channels and pixels fill the registers well."""
        if problem.forward:
            return "computes weight gradients only"
        least = LEAST_USE.get((cpu().dots, problem.dtype))
        if least is None:
            return f"{problem.dtype} is no sum of few bf16 products"
        plan = dot_schedule(problem)
        if plan is None:
            return "pixels with zeros between them would take too much room"
        if plan.use < least and not cpu().imitated:
            return f"only {plan.use:.0%} of its products would not be filling zeros, at least {least:.0%} pay"
        return None

    def schedule(self, problem: ConvProblem) -> Any:
        """Lay out the sum."""
        return dot_schedule(problem)

    def part(self, problem: ConvProblem, unit: Unit) -> Part:
        """Prepare a unit."""
        return _part(problem, unit)


BWD_DOTS = BwdDots()
