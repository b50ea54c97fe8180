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

from kernels._jit import Floats, Halves, Table, Vector, jit
from kernels.arena import arena
from kernels.bwd_weights import BATCH_MACS, BwdWeights, Part
from kernels.cpu import cpu
from kernels.dot_schedule import DotSchedule, dot_schedule
from kernels.dots import BEGIN, END, EXACT, STEP, TILE, call_dots, dot_table
from kernels.packing import F16, KINDS
from kernels.plan import Storage, Unit
from kernels.planes import pack_pairs, pack_planes16, plane_finite, split_f16
from kernels.problem import ConvProblem
from kernels.simd import round_bits

__all__ = ["BWD_DOTS"]

BLOCK_STEPS = 16
"""Steps of one walk over blocks and taps: 32 channels of both tensors are 64 KB."""

LEAST_USE = {("amx", "bf16"): 0.2, ("amx", "f16"): 0.85, ("avx512bf16", "bf16"): 0.6}
"""Share of multiplications that are not by filling zeros, above which these instructions outdo f32 ones."""

_BLOCK = 4 * TILE * TILE

_round_f16 = round_bits("f16")
_round_bf16 = round_bits("bf16")


@jit
def _pack(
    parts: int, channels: int, blocks: int, boxes: Table, src: int, src_steps: Vector, dst: int, plane: int,
    dst_steps: Vector, finite: Vector,
) -> None:  # fmt: skip
    """Pack one tensor's planes for a slab, in two parts for f16, and say which blocks are finite."""
    pack_planes16(channels, blocks, boxes, src, src_steps, dst, plane, dst_steps)
    size = TILE * plane
    if parts == 2:
        split_f16(dst, dst + blocks * size, blocks * size // 16)
    for i in range(blocks):
        finite[i] = 1 if plane_finite(dst + i * size, size // 32) else 0


@jit
def _walk(
    table: Vector, parts: int, steps: int, taps: Table, a: int, a_blocks: int, a_plane: int, a_finite: Vector, b: int,
    b_blocks: int, b_block: int, b_finite: Vector, acc: int, acc_step: int,
) -> None:  # fmt: skip
    """Sum all pairs of finite blocks, two by two where all four are."""
    a_part, b_part = TILE * a_blocks * a_plane, b_blocks * b_block
    for first in range(0, steps, BLOCK_STEPS):
        count = min(BLOCK_STEPS, steps - first)
        for j0 in range(0, b_blocks, 2):
            across = min(2, b_blocks - j0)
            for i0 in range(0, a_blocks, 2):
                down = min(2, a_blocks - i0)
                whole = a_finite[i0 : i0 + down].sum() * b_finite[j0 : j0 + across].sum() == down * across
                size = 2 if whole else 1
                for j in range(j0, j0 + across, size):
                    for i in range(i0, i0 + down, size):
                        if a_finite[i] + b_finite[j] != 2:
                            continue
                        entry = table[1 + 2 * (min(size, down) - 1) + min(size, across) - 1]
                        from_a, from_b = a + TILE * i * a_plane + 64 * first, b + j * b_block + 1024 * first
                        for t in range(taps.shape[0]):
                            sums = acc + j * acc_step + (taps[t, 1] * a_blocks + i) * _BLOCK
                            for p in range(parts * parts):
                                call_dots(
                                    entry, from_a + p // parts * a_part + taps[t, 0], a_plane,
                                    from_b + p % parts * b_part, b_block, count, sums, acc_step, 0,
                                )  # fmt: skip


@jit
def _walk_exactly(
    table: Vector, parts: int, slab: Vector, steps: Vector, taps: Table, a: int, a_blocks: int, a_plane: int,
    a_finite: Vector, b: int, b_blocks: int, b_block: int, b_finite: Vector, acc: int, acc_step: int,
) -> None:  # fmt: skip
    """Sum all pairs of blocks of which one is not finite, over the pixels for which each tap is inside."""
    a_rest, b_rest = (parts - 1) * TILE * a_blocks * a_plane, (parts - 1) * b_blocks * b_block
    for j in range(b_blocks):
        for i in range(a_blocks):
            if a_finite[i] + b_finite[j] == 2:
                continue
            for t in range(taps.shape[0]):
                sums = acc + j * acc_step + (taps[t, 1] * a_blocks + i) * _BLOCK
                low, high = max(slab[6], taps[t, 6]), min(slab[7], taps[t, 7])
                for n in range(slab[1] - slab[0] if low < high else 0):
                    for d in range(max(slab[2], taps[t, 2]), min(slab[3], taps[t, 3])):
                        for h in range(max(slab[4], taps[t, 4]), min(slab[5], taps[t, 5])):
                            place = n * steps[0] + (d - slab[2]) * steps[1] + (h - slab[4]) * steps[2]
                            place += (low - slab[6]) * steps[3]
                            call_dots(
                                table[EXACT], a + TILE * i * a_plane + taps[t, 0] + place, a_plane, b + j * b_block,
                                b_rest, high - low, sums, place // 2, a_rest,
                            )  # fmt: skip


@jit
def add_dots(
    table: Vector, parts: int, groups: int, slabs: Table, taps: Table, panel_steps: Vector, sizes: Vector,
    a: Vector, a_boxes: Table, a_steps: Vector, b: Vector, b_boxes: Table, b_steps: Vector,
    panels: int, planes: int, acc: int, acc_bytes: int, acc_step: int,
) -> None:  # fmt: skip
    """Add slabs of pixels to the accumulators of `groups` groups, [block of b][tap][block of a][16][16].

    `a` and `b` are each tensor's address and its bytes between groups; for the other tables see
    `kernels.dot_schedule`. `sizes` are channels, blocks of 16 and bytes of a plane of a, then of b, then positions.
    `panels` holds a's planes and b's pairs, `planes` b's planes. The caller owns all of them.
    """
    a_blocks, a_plane, b_blocks, b_plane = sizes[1], sizes[2], sizes[4], sizes[5]
    a_finite, b_finite = np.empty(a_blocks, np.int64), np.empty(b_blocks, np.int64)
    a_rows, b_rows = a_boxes.shape[0] // slabs.shape[0], b_boxes.shape[0] // slabs.shape[0]
    b_block, pairs = 32 * sizes[6], panels + parts * a_blocks * TILE * a_plane
    for s in range(slabs.shape[0]):
        steps = ((slabs[s, 1] - slabs[s, 0]) * panel_steps[0] // 2 + STEP - 1) // STEP
        for g in range(groups):
            _pack(
                parts, sizes[0], a_blocks, a_boxes[s * a_rows : (s + 1) * a_rows], a[0] + g * a[1], a_steps, panels,
                a_plane, panel_steps, a_finite,
            )  # fmt: skip
            _pack(
                parts, sizes[3], b_blocks, b_boxes[s * b_rows : (s + 1) * b_rows], b[0] + g * b[1], b_steps, planes,
                b_plane, panel_steps, b_finite,
            )  # fmt: skip
            pack_pairs(parts * b_blocks, pairs, planes, b_plane, sizes[6])
            sums = acc + g * acc_bytes
            call_dots(table[BEGIN], 0, 0, 0, 0, 0, 0, 0, 0)
            _walk(
                table, parts, steps, taps, panels, a_blocks, a_plane, a_finite, pairs, b_blocks, b_block, b_finite,
                sums, acc_step,
            )  # fmt: skip
            call_dots(table[END], 0, 0, 0, 0, 0, 0, 0, 0)
            _walk_exactly(
                table, parts, slabs[s], panel_steps, taps, panels, a_blocks, a_plane, a_finite, pairs, b_blocks,
                b_block, b_finite, sums, acc_step,
            )  # fmt: skip


@jit
def store_dots(kind: int, acc: Floats, counts: Vector, steps: Vector, out: Halves) -> None:
    """Scatter accumulators to the weights' layout, rounding once.

    `counts` are groups, channels of b, taps, channels of a; `steps` are the first output element, then the elements
    between groups, channels of b, taps and channels of a.
    """
    read = 0
    for g in range(counts[0]):
        for j in range(0, counts[1], TILE):
            for t in range(counts[2]):
                for i in range(0, counts[3], TILE):
                    place = steps[0] + g * steps[1] + j * steps[2] + t * steps[3] + i * steps[4]
                    for m in range(min(TILE, counts[3] - i)):
                        for lane in range(min(TILE, counts[1] - j)):
                            value = acc[read + TILE * m + lane]
                            to = place + m * steps[4] + lane * steps[2]
                            out[to] = _round_f16(value) if kind == F16 else _round_bf16(value)
                    read += TILE * TILE


class DotPart(Part):
    """One unit's share: some groups and blocks of b's channels, over some chunks of the pixels."""

    plan: DotSchedule  # type: ignore[assignment]  # the sums read what both kinds of schedule have

    def __init__(self, problem: ConvProblem, plan: DotSchedule, unit: Unit) -> None:
        self.problem, self.plan = problem, plan
        self.g0, self.g1, self.b0, self.b1, self.index, self.parts = unit.part
        self.first_lane, self.width = TILE * self.b0, TILE * (self.b1 - self.b0)
        self.channels = int(plan.blocks[self.b0 : self.b1, 1].sum())
        self.group_floats = plan.rows * self.width
        self.floats = (self.g1 - self.g0) * self.group_floats
        self.slabs = np.array(plan.slabs, np.int64)
        self.batch = max(1, BATCH_MACS * len(plan.slabs) // max(1, problem.macs))
        self.b_steps = plan.b_steps

    def _add_slabs(self, inputs: Sequence[Storage], some: slice, acc: Floats) -> None:
        plan = self.plan
        wide, narrow = inputs[::-1] if self.problem.op.startswith("ConvT") else inputs
        parts, blocks, slabs = 2 if self.problem.dtype == "f16" else 1, self.b1 - self.b0, self.slabs[some]
        a_bytes, b_bytes = TILE * plan.a_blocks * plan.a_plane, TILE * blocks * plan.b_plane
        panels = arena("vector", parts * (a_bytes + 32 * blocks * plan.positions) // 4)
        planes = arena("scalar", parts * b_bytes // 4)
        a = wide.ctypes.data + 2 * (plan.a.origin + self.g0 * plan.a.group)
        b = narrow.ctypes.data + 2 * (self.g0 * plan.b.group + self.first_lane * plan.b.channel)
        sizes = (
            plan.a.channels, plan.a_blocks, plan.a_plane, self.channels, blocks, plan.b_plane, plan.positions,
        )  # fmt: skip
        add_dots(
            dot_table(), parts, self.g1 - self.g0, slabs, plan.taps, plan.panel_steps, np.array(sizes, np.int64),
            np.array((a, 2 * plan.a.group), np.int64), plan.a_boxes[some].reshape(-1, 6), plan.a_steps,
            np.array((b, 2 * plan.b.group), np.int64), plan.b_boxes[some].reshape(-1, 6), plan.b_steps,
            panels.ctypes.data, planes.ctypes.data, acc.ctypes.data, 4 * self.group_floats, 4 * TILE * plan.rows,
        )  # fmt: skip

    def write(self, total: Floats, output: Storage) -> None:
        """Round the sums once and put them where the weights' layout wants them."""
        plan = self.plan
        group, wide, narrow, tap = self.problem.weights_strides
        counts = (self.g1 - self.g0, self.channels, plan.rows // (TILE * plan.a_blocks), plan.a.channels)
        steps = (self.g0 * group + self.first_lane * narrow, group, narrow, tap, wide)
        store_dots(
            KINDS[self.problem.dtype], total, np.array(counts, np.int64), np.array(steps, np.int64), output.reshape(-1)
        )


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
