"""Filter gradients on register tiles: packed panels, only real taps, sums in an order that the problem fixes.

Loops, outermost first: slabs of pixels (Python, so that a worker can stop between them); groups; blocks of pixels
that fit L1; vectors of channels; taps; register tiles. Every accumulator tile is summed in registers over one block
and then added to memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels._jit import jit
from kernels.cpu import cpu
from kernels.packing import KINDS, pack_panel, pack_planes
from kernels.plan import Stop, Storage, Unit
from kernels.problem import ConvProblem
from kernels.schedule import LINES, NATIVE, Schedule, schedule, window_shape
from kernels.simd import round_bits
from kernels.tiles import run_tile

__all__ = ["BWD_WEIGHTS", "arena"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

UNIT_MACS = 20_000_000
"""Work that makes a unit worth its message to a worker (about half a millisecond)."""

SHARED_ACC_BYTES = 1 << 20
"""Gradients up to this size are shared out by pixels, larger ones by channels."""

UNIT_ACC_BYTES = 16 << 20
"""Accumulators of one unit that is one of several."""

_round_f16 = round_bits("f16")
_round_bf16 = round_bits("bf16")


@jit(
    "void(int64, int64, int64[::1], int64[::1], int64[:, ::1], int64[:, ::1], int64[:, ::1], int64[::1], int64[::1],"
    " int64[::1], int64[::1], int64, int64, int64[::1], int64[::1], int64[:, ::1], int64, int64)"
)
def _slab(
    kind: int, groups: int, box: Any, block: Any, blocks: Any, ranges: Any, tiles: Any,
    vector: Any, vector_box: Any, vector_lines: Any, vector_moves: Any, vector_scratch: int,
    pack: int, scalar: Any, scalar_box: Any, scalar_cuts: Any, scalar_scratch: int, acc: int,
) -> None:  # fmt: skip
    """Add one slab of pixels to the accumulators of some groups and lane blocks.

    `vector` and `scalar` are (address of position 0 of the first group, end, group bytes, bytes for n, d, h, w,
    channel[, bytes for n, d, h, w as the tiles read them, channel plane]); their boxes are (first n, d, h, w, sizes).
    `vector_lines` are the panel's steps in lines, `vector_moves` those for one narrow position. A row of `blocks` is
    (first channel, valid channels, vectors, first lane, accumulator bytes, panel bytes). The caller owns scratch and
    accumulators; nothing here is checked.
    """
    width = WIDTH
    lines = vector_box[4] * vector_box[5] * vector_box[6] * vector_box[7]
    points = scalar_box[4] * scalar_box[5] * scalar_box[6] * scalar_box[7]
    steps = np.empty(4, np.int64)
    vector_zero = (
        vector_box[0] * vector_lines[0] + vector_box[1] * vector_lines[1]
        + vector_box[2] * vector_lines[2] + vector_box[3] * vector_lines[3]
    )  # fmt: skip
    for g in range(groups):
        # pack the vector tensor: a panel for every lane block
        source = vector[0] + g * vector[2]
        for axis in range(4):
            source += vector_box[axis] * vector[3 + axis]
        for b in range(blocks.shape[0]):
            lanes = blocks[b, 2] * width
            for axis in range(4):
                steps[axis] = 4 * lanes * vector_lines[axis]
            pack_panel(
                kind, lanes, blocks[b, 1], vector_scratch + blocks[b, 5], vector_box[4:], steps,
                source + blocks[b, 0] * vector[7], vector[3:], vector[1],
            )  # fmt: skip
        # pack the scalar tensor where its layout or dtype asks for it
        base = scalar[0] + g * scalar[2]
        if pack != NATIVE:
            source = base
            base = scalar_scratch
            for axis in range(4):
                source += scalar_box[axis] * scalar[3 + axis]
                base -= scalar_box[axis] * scalar[8 + axis]
            if pack == LINES:
                for t in range(scalar_cuts.shape[0]):
                    pack_panel(
                        kind, scalar[11] // 4, scalar_cuts[t, 1], scalar_scratch + t * scalar[12], scalar_box[4:], scalar[8:12],
                        source + scalar_cuts[t, 0] * scalar[7], scalar[3:], scalar[1],
                    )  # fmt: skip
            else:
                pack_planes(
                    kind,
                    scalar[13],
                    scalar_scratch,
                    scalar[12],
                    scalar_box[4:],
                    scalar[8:12],
                    source,
                    scalar[3:],
                    scalar[1],
                )
        sums = acc + g * scalar[14]
        _blocks(
            box,
            block,
            blocks,
            ranges,
            tiles,
            vector_scratch,
            vector_zero,
            vector_moves,
            base,
            scalar[15:19],
            sums,
        )
    _ = lines + points


@jit(
    "void(int64[::1], int64[::1], int64[:, ::1], int64[:, ::1], int64[:, ::1], int64, int64, int64[::1], int64,"
    " int64[::1], int64)"
)
def _blocks(
    box: Any, block: Any, blocks: Any, ranges: Any, tiles: Any,
    panels: int, vector_zero: int, vector_moves: Any, scalars: int, scalar_moves: Any, acc: int,
) -> None:  # fmt: skip
    """Walk the blocks of one slab of one group."""
    width = WIDTH
    offset_table = tiles.ctypes.data
    live = np.empty((ranges.shape[0], 7), np.int64)
    for n in range(box[0], box[1], block[0]):
        n_end = min(n + block[0], box[1])
        for d in range(box[2], box[3], block[1]):
            for h in range(box[4], box[5], block[2]):
                for w in range(box[6], box[7], block[3]):
                    # clip every tap's range to this block once, for all lane blocks
                    count = 0
                    for r in range(ranges.shape[0]):
                        d_low, d_high = max(d, ranges[r, 0]), min(d + block[1], box[3], ranges[r, 1])
                        h_low, h_high = max(h, ranges[r, 2]), min(h + block[2], box[5], ranges[r, 3])
                        w_low, w_high = max(w, ranges[r, 4]), min(w + block[3], box[7], ranges[r, 5])
                        if d_low >= d_high or h_low >= h_high or w_low >= w_high:
                            continue
                        live[count, 0] = (
                            n * vector_moves[0] + d_low * vector_moves[1] + h_low * vector_moves[2]
                            + w_low * vector_moves[3] + ranges[r, 6] - vector_zero
                        )  # fmt: skip
                        live[count, 1] = (
                            n * scalar_moves[0]
                            + d_low * scalar_moves[1]
                            + h_low * scalar_moves[2]
                            + w_low * scalar_moves[3]
                        )
                        live[count, 2] = d_high - d_low
                        live[count, 3] = h_high - h_low
                        live[count, 4] = w_high - w_low
                        live[count, 5] = ranges[r, 7]
                        live[count, 6] = ranges[r, 8]
                        count += 1
                    planes = block[1] > 1
                    for b in range(blocks.shape[0]):
                        vectors = blocks[b, 2]
                        line = 4 * width * vectors
                        panel = panels + blocks[b, 5]
                        sums = acc + blocks[b, 4]
                        for i in range(count):
                            outer = live[i, 2] if planes else n_end - n
                            axis = 1 if planes else 0
                            for t in range(live[i, 5], live[i, 6]):
                                run_tile(
                                    vectors, tiles[t, 1],
                                    panel + live[i, 0] * line, vector_moves[axis] * line, vector_moves[2] * line, vector_moves[3] * line,
                                    scalars + live[i, 1], scalar_moves[axis], scalar_moves[2], scalar_moves[3],
                                    outer, live[i, 3], live[i, 4],
                                    offset_table + 80 * t + 16, sums + tiles[t, 0] * line,
                                )  # fmt: skip


@jit(
    "void(int64, float32[::1], int64, int64, int64[:, ::1], int64, int64, int64, int64, int64, int64, int64, float32[::1], uint16[::1])"
)
def _store(
    kind: int, acc: Any, groups: int, group_floats: int, blocks: Any, taps: int, channels: int,
    group_step: int, lane_step: int, row_step: int, tap_step: int, origin: int, out32: Any, out16: Any,
) -> None:  # fmt: skip
    """Scatter accumulators to the weights' layout, rounding once."""
    width = WIDTH
    for g in range(groups):
        for b in range(blocks.shape[0]):
            lanes = blocks[b, 2] * width
            base = g * group_floats + blocks[b, 4] // 4
            for tap in range(taps):
                for c in range(channels):
                    row = base + (tap * channels + c) * lanes
                    to = origin + g * group_step + blocks[b, 0] * lane_step + c * row_step + tap * tap_step
                    if kind == 0:
                        for lane in range(blocks[b, 1]):
                            out32[to + lane * lane_step] = acc[row + lane]
                    elif kind == 1:
                        for lane in range(blocks[b, 1]):
                            out16[to + lane * lane_step] = _round_f16(acc[row + lane])
                    else:
                        for lane in range(blocks[b, 1]):
                            out16[to + lane * lane_step] = _round_bf16(acc[row + lane])


@jit("void(float32[::1], float32[::1])")
def _add(total: Any, part: Any) -> None:
    """Add partial sums in place."""
    for i in range(total.size):
        total[i] += part[i]


WIDTH = cpu().width
_local = threading.local()


def arena(name: str, floats: int) -> Floats:
    """Give this thread's scratch of that name, grown to `floats`, aligned to a cache line, kept for the next call."""
    held: Floats | None = getattr(_local, name, None)
    if held is None or held.size < floats:
        raw = np.empty(floats + 32, np.float32)
        start = (-raw.ctypes.data // 4) % 16
        held = raw[start : start + floats + 16]
        setattr(_local, name, held)
    return held


class _Operand:
    """One tensor's integers for the compiled driver."""

    def __init__(self, tensor: Any, array: Storage, first_group: int) -> None:
        size = array.itemsize
        self.address = array.ctypes.data + (tensor.origin + first_group * tensor.group) * size
        self.table = [
            self.address, array.ctypes.data + array.nbytes, tensor.group * size,
            *(step * size for step in tensor.steps), tensor.channel * size,
        ]  # fmt: skip


class BwdWeights:
    """Weight gradients of Convolution and ConvTranspose on packed register tiles (`_slab`)."""

    name = "bwd_weights_tiles"

    def refuse(self, problem: ConvProblem) -> str | None:
        """Take every weight gradient."""
        return "computes weight gradients only" if problem.forward else None

    def units(self, problem: ConvProblem, workers: int) -> tuple[list[Unit], int]:
        """Share out small gradients by pixels (partial sums, then tiles) and large ones by groups and channels."""
        plan = schedule(problem)
        blocks = len(plan.blocks)
        floats = plan.rows * plan.lanes * problem.groups
        wanted = max(1, min(4 * workers, problem.macs // UNIT_MACS))
        parts = 1
        while parts * 2 <= min(wanted, plan.chunks):
            parts *= 2
        if parts > 1 and 4 * floats <= SHARED_ACC_BYTES:
            macs = problem.macs // parts
            first = [
                Unit(i, 0, None, None, macs, (0, problem.groups, 0, blocks, i, parts)) for i in range(parts)
            ]
            tiles = self._tiles(problem, plan, min(4, wanted))
            last = [
                Unit(parts + i, 1, offset, shape, 0, (*part, -1, parts))
                for i, (part, offset, shape) in enumerate(tiles)
            ]
            return first + last, parts * floats * 4
        wanted = max(wanted, -(-4 * floats // UNIT_ACC_BYTES))
        tiles = self._tiles(problem, plan, wanted)
        macs = problem.macs // len(tiles)
        return [
            Unit(i, 0, offset, shape, macs, (*part, 0, 1)) for i, (part, offset, shape) in enumerate(tiles)
        ], 0

    def _tiles(
        self, problem: ConvProblem, plan: Schedule, wanted: int
    ) -> list[tuple[tuple[int, int, int, int], tuple[int, ...], tuple[int, ...]]]:
        """Cut the output by groups, then by lane blocks: (groups and blocks, offset, shape) of each tile."""
        groups, blocks = problem.groups, len(plan.blocks)
        by_group = min(groups, wanted)
        by_block = min(blocks, max(1, -(-wanted // by_group))) if by_group == groups else 1
        cuts = []
        for i in range(by_group):
            for j in range(by_block):
                g = (groups * i // by_group, groups * (i + 1) // by_group)
                b = (blocks * j // by_block, blocks * (j + 1) // by_block)
                cuts.append(((*g, *b), *self._box(problem, plan, g, b)))
        return cuts

    def _box(
        self, problem: ConvProblem, plan: Schedule, g: tuple[int, int], b: tuple[int, int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Give offset and shape, in the weights' axes, of some groups and lane blocks."""
        transposed = problem.op.startswith("ConvT")
        vector_letter = "IO"[plan.vector_is_wide == transposed]
        if transposed:
            vector_letter = "O" if plan.vector_is_wide else "I"
        else:
            vector_letter = "I" if plan.vector_is_wide else "O"
        spans = {}
        for letter, channels in (("I", problem.src_channels), ("O", problem.dst_channels)):
            each = channels // problem.groups
            low, high = 0, each
            if letter == vector_letter:
                low, high = (
                    int(plan.blocks[b[0], 0]),
                    int(plan.blocks[b[1] - 1, 0] + plan.blocks[b[1] - 1, 1]),
                )
            if letter != problem.groups_axis:
                # this axis holds all groups: several groups are whole, one may be cut
                low, high = g[0] * each + low, (g[1] - 1) * each + high
            spans[letter] = ((low,), (high - low,))
        spans["X"] = ((0,) * problem.rank, problem.kernel)
        offset = tuple(value for letter in problem.weights_format for value in spans[letter][0])
        shape = tuple(value for letter in problem.weights_format for value in spans[letter][1])
        return offset, shape

    def run(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> bool:  # fmt: skip
        """Compute partial sums or final tiles."""
        plan = schedule(problem)
        g0, g1, b0, b1, index, parts = unit.part
        blocks = _block_table(plan, b0, b1)
        group_floats = int(plan.rows * plan.blocks[b0:b1, 2].sum() * WIDTH)
        floats = (g1 - g0) * group_floats
        if index < 0:
            assert scratch is not None
            self._join(plan, problem, scratch.view(np.float32), unit, blocks, group_floats, output)
            return True
        count = len(plan.slabs)
        chunks = plan.chunks
        low, high = index * chunks // parts, (index + 1) * chunks // parts
        edges = [count * i // chunks for i in range(chunks + 1)]
        total = self._sum(problem, plan, inputs, (g0, g1, b0, b1), blocks, floats, edges, low, high, 0, stop)
        if total is None:
            return False
        if unit.offset is None:
            assert scratch is not None
            scratch.view(np.float32)[index * floats : (index + 1) * floats] = total
        else:
            self._write(problem, plan, total, (g0, g1, b0, b1), blocks, group_floats, output)
        return True

    def _sum(
        self, problem: ConvProblem, plan: Schedule, inputs: Sequence[Storage], part: tuple[int, int, int, int],
        blocks: Ints, floats: int, edges: list[int], low: int, high: int, depth: int, stop: Stop,
    ) -> Floats | None:  # fmt: skip
        """Sum chunks ``low..high`` as a balanced tree, so that any aligned split among workers gives the same bits."""
        if high - low > 1:
            middle = (low + high) // 2
            left = self._sum(problem, plan, inputs, part, blocks, floats, edges, low, middle, depth, stop)
            if left is None:
                return None
            right = self._sum(
                problem, plan, inputs, part, blocks, floats, edges, middle, high, depth + 1, stop
            )
            if right is not None:
                _add(left, right)
            return None if right is None else left
        acc = arena(f"acc{depth}", floats)[:floats]
        acc[...] = 0
        for slab in plan.slabs[edges[low] : edges[high]]:
            if stop():
                return None
            _run_slab(problem, plan, inputs, part, blocks, slab, acc)
        return acc

    def _join(
        self,
        plan: Schedule,
        problem: ConvProblem,
        partial: Floats,
        unit: Unit,
        blocks: Ints,
        group_floats: int,
        output: Storage,
    ) -> None:
        """Add the partial sums of all chunks for some lane blocks and write the tile."""
        g0, g1, b0, b1, _, parts = unit.part
        whole_group = int(plan.rows * plan.lanes)
        floats = problem.groups * whole_group
        first = int(plan.rows * plan.blocks[b0, 3])
        pieces = partial[: parts * floats].reshape(parts, problem.groups, whole_group)[
            :, g0:g1, first : first + group_floats
        ]
        while len(pieces) > 1:
            pieces = pieces[0::2] + pieces[1::2]
        total = np.ascontiguousarray(pieces[0]).reshape(-1)
        self._write(problem, plan, total, (g0, g1, b0, b1), blocks, group_floats, output)

    def _write(
        self, problem: ConvProblem, plan: Schedule, total: Floats, part: tuple[int, int, int, int],
        blocks: Ints, group_floats: int, output: Storage,
    ) -> None:  # fmt: skip
        group, wide, narrow, tap = problem.weights_strides
        lane_step, row_step = (wide, narrow) if plan.vector_is_wide else (narrow, wide)
        flat = output.reshape(-1)
        none32, none16 = np.empty(0, np.float32), np.empty(0, np.uint16)
        out32, out16 = (flat, none16) if problem.dtype == "f32" else (none32, flat)
        _store(
            KINDS[problem.dtype], total, part[1] - part[0], group_floats, blocks, plan.rows // plan.scalar.channels,
            plan.scalar.channels, group, lane_step, row_step, tap, part[0] * group, out32, out16,
        )  # fmt: skip


def _block_table(plan: Schedule, b0: int, b1: int) -> Ints:
    """Give the driver's lane-block rows for blocks ``b0..b1``: accumulators and panels start at the first of them."""
    part = plan.blocks[b0:b1]
    lines = prod(window_shape(plan.axes, plan.slab_shape, plan.vector_is_wide))
    lanes = part[:, 3] - part[0, 3]
    return np.ascontiguousarray(np.column_stack([part, 4 * lanes * plan.rows, 4 * lanes * lines]))


def _run_slab(
    problem: ConvProblem, plan: Schedule, inputs: Sequence[Storage], part: tuple[int, int, int, int],
    blocks: Ints, slab: tuple[int, ...], acc: Floats,
) -> None:  # fmt: skip
    src, diff = inputs
    wide, narrow = (diff, src) if problem.op.startswith("ConvT") else (src, diff)
    vector_array, scalar_array = (wide, narrow) if plan.vector_is_wide else (narrow, wide)
    g0, g1, _, _ = part
    vector = _Operand(plan.vector, vector_array, g0)
    scalar = _Operand(plan.scalar, scalar_array, g0)
    pairs = [(slab[2 * a], slab[2 * a + 1]) for a in range(4)]
    vector_box = [plan.axis_window(plan.vector_is_wide, a, *pairs[a]) for a in range(4)]
    scalar_box = [plan.axis_window(not plan.vector_is_wide, a, *pairs[a]) for a in range(4)]
    strides = [axis.stride for axis in plan.axes]
    vector_moves = [
        s * m if plan.vector_is_wide else s for s, m in zip(plan.vector_steps, strides, strict=True)
    ]
    scalar_moves = [
        s if plan.vector_is_wide else s * m for s, m in zip(plan.scalar_steps, strides, strict=True)
    ]
    vector_lines = prod(window_shape(plan.axes, plan.slab_shape, plan.vector_is_wide))
    scalar_lines = prod(window_shape(plan.axes, plan.slab_shape, not plan.vector_is_wide))
    width = int(blocks[:, 2].sum()) * WIDTH
    vector_scratch = arena("vector", vector_lines * width + 16)
    plane = 0
    scalar_scratch = arena("scalar", 16)
    if plan.scalar_pack != NATIVE:
        per_line = plan.scalar_steps[3] // 4
        plane = 4 * scalar_lines * per_line
        count = len(plan.scalar_lines) if plan.scalar_pack == LINES else plan.scalar.channels
        scalar_scratch = arena("scalar", count * plane // 4 + 16)
    group_bytes = acc.nbytes // (g1 - g0)
    scalar_table = [
        *scalar.table, *plan.scalar_steps, plane, plan.scalar.channels, group_bytes, *scalar_moves,
    ]  # fmt: skip
    _slab(
        KINDS[problem.dtype], g1 - g0, np.array(slab, np.int64), np.array(plan.block_shape, np.int64),
        blocks, plan.ranges, plan.tiles,
        np.array(vector.table, np.int64), _flat_box(vector_box), np.array(plan.vector_steps, np.int64),
        np.array(vector_moves, np.int64), vector_scratch.ctypes.data,
        plan.scalar_pack, np.array(scalar_table, np.int64), _flat_box(scalar_box), plan.scalar_lines,
        scalar_scratch.ctypes.data, acc.ctypes.data,
    )  # fmt: skip


def _flat_box(box: list[tuple[int, int]]) -> Ints:
    return np.array([*(low for low, _ in box), *(high - low for low, high in box)], np.int64)


BWD_WEIGHTS = BwdWeights()
