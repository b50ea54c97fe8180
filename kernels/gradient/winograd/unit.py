"""Weight gradients of 3x3 kernels by Winograd's F(3x3, 2x2): 16 products of channels where direct sums have 36.

Loops, outermost first: (8) groups and depths of the kernel; (7) chunks, a balanced tree; (6) slabs of about a hundred
tiles, between which a worker may stop; (5) the four vertical products, for which a slab is transformed; (4) the four
horizontal ones; (3) vectors of channels; (2) register tiles, those of the direct sums; (1) the tiles of a slab, summed
in registers and then added to memory. Loops 1 to 6 are compiled (`kernels.gradient.winograd.driver`).

What decides bits depends on the problem alone, not on the lanes of the target: they are the same on AVX2 and AVX-512.

Units share out groups and channels, or where there are few of these the chunks of the sums, which are then joined
as the same tree.

Sums of integers are exact up to 16 T S G = 2**24 with T tiles and S and G the largest magnitudes, a quarter of what
direct sums reach: V and U are up to four times as large as S and G. Inf and NaN reach every element that direct sums
give them to, and others of the same channels, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import ceil, prod

import numpy as np

from kernels.arena import address, arena_address
from kernels.blocks import STEPS, SUMS
from kernels.cache import cached
from kernels.costs import COSTS
from kernels.dtypes import KINDS
from kernels.emit.brgemm import micro_table
from kernels.emit.compiler import Floats, Records, row_of
from kernels.emit.winograd import FACTORS, TAPS
from kernels.gradient.geometry import geometry
from kernels.gradient.roles import lane_blocks, lines_cost, role_costs
from kernels.gradient.tiles.records import Weights
from kernels.gradient.tiles.unit import BwdWeights, box_of, shares_of, units_of
from kernels.gradient.winograd.driver import add_products, write_taps
from kernels.plan import Kernel, Stop, Storage, Unit, macs_of
from kernels.problem import ConvProblem
from kernels.reduction import chunks_of, sum_chunks, sum_tree
from kernels.winograd.rules import WinogradKernel, plane_products, plane_tiles
from kernels.winograd.tiles import GAP, PAIR, PRODUCTS, WIDTH, cut_slabs, side_of, tiles_of

__all__ = ["BwdWinograd"]

ARENAS = ("stage", "vector"), ("scalar stage", "scalar")
"""Scratch of the lanes and of the scalars: staged lines, and panels."""


@dataclass(frozen=True)
class Layout:
    """The sum of one depth of the kernel, for each depth, in each group.

    `lanes` and `scalars` are blocks of the `channels` of one group. Each depth has a table of `slabs` and the two
    `sides`, those of the lanes first.
    """

    lanes_are_wide: bool
    channels: tuple[int, int]
    lanes: Records
    scalars: Records
    slabs: tuple[Records, ...]
    sides: tuple[Records, ...]
    chunks: int

    def sums_of(self, lanes: Records) -> int:
        """Count the f32 that are summed of some blocks of lanes."""
        return PRODUCTS * (self.channels[1] + 1) * WIDTH * int(lanes["vectors"].sum())


@cached
def layout(problem: ConvProblem) -> Layout:
    """Lay the sums out for `problem`, which has broken none of the rules."""
    dims = problem.dims
    costs = role_costs(problem, geometry(problem))
    lanes_are_wide = costs["wide"] < costs["narrow"]
    counts = dims.narrow_channels, dims.wide_channels
    count, rows = counts[::-1] if lanes_are_wide else counts
    lanes, scalars = lane_blocks(count), lane_blocks(rows)
    lanes["acc"] = 4 * PRODUCTS * (rows + 1) * lanes["lane"]
    spans = [dims.tap_range(0, tap) for tap in range(dims.kernel[0])]
    tiles = [(0, ceil(size / 2)) for size in dims.narrow[1:]]
    slabs = tuple(
        cut_slabs([(0, dims.n * (high - low)), *tiles], dims.narrow[1:], SUMS.winograd_tiles) for low, high in spans
    )
    total = max(int(tiles_of(table).sum()) for table in slabs)
    # more chunks lose fewer digits, and cost passes over sums
    chunks = min(*map(len, slabs), total // (2 * SUMS.winograd_tiles), SUMS.winograd_chunked_sums // prod(counts))
    return Layout(
        lanes_are_wide=lanes_are_wide,
        channels=(count, rows),
        lanes=lanes,
        scalars=scalars,
        slabs=slabs,
        sides=tuple(
            np.concatenate(
                [
                    _side(problem, tap, span, np.concatenate(slabs), wide=wide)
                    for wide in (lanes_are_wide, not lanes_are_wide)
                ]
            )
            for tap, span in enumerate(spans)
        ),
        chunks=chunks_of(chunks),
    )


def _side(problem: ConvProblem, tap: int, span: tuple[int, int], slabs: Records, *, wide: bool) -> Records:
    """Return the wide or the narrow tensor at the positions of one depth of the kernel."""
    dims, (low, high) = problem.dims, span
    channels, spatial = (dims.wide_channels, dims.wide) if wide else (dims.narrow_channels, dims.narrow)
    block = PAIR * (int(tiles_of(slabs).max(initial=0)) + 1)
    return side_of(
        problem, channels, spatial, slabs, wide=wide, first=dims.wide_at(0, tap, low) if wide else low,
        step=dims.strides[0] if wide else 1, frames=max(1, high - low), pads=dims.pads[1:] if wide else (0, 0),
        line=PAIR, block=block, plane=block * ceil(channels / (2 * WIDTH)) + GAP,
    )  # fmt: skip


class BwdWinograd(WinogradKernel):
    """Weight gradients of Convolution and ConvTranspose by Winograd's F(3x3, 2x2)."""

    name = "bwd_weights_winograd"
    of = "ConvolutionBackwardWeights", "ConvTransposeBackwardWeights"

    def __init__(self, direct: Sequence[Kernel]) -> None:
        self._direct = direct

    def cycles(self, problem: ConvProblem) -> tuple[float, float]:
        """Estimate the cycles of Winograd and of direct sums, by the first of the `direct` kernels that takes it."""
        dims, plan = problem.dims, layout(problem)
        vectors = [int(side["vectors"].sum()) for side in (plan.lanes, plan.scalars)]
        wide, narrow = vectors if plan.lanes_are_wide else vectors[::-1]
        frames, sums = dims.n * dims.met(0), vectors[0] * plan.channels[1]
        tiles, products = plane_tiles(dims.narrow[1:]), plane_products(dims.narrow[1:])
        cycles = frames * products * lines_cost(*plan.channels, 1, merged=False)
        cycles += COSTS.transformed * frames * tiles * (narrow + wide)
        cycles += COSTS.tapped * sums * dims.kernel[0] + COSTS.summed * sums * sum(map(len, plan.slabs))
        if problem.data_format == "NCX":
            cycles += COSTS.turned * frames * (narrow * prod(dims.narrow[1:]) + wide * prod(dims.wide[1:]))
        kernel = next(kernel for kernel in self._direct if kernel.refuse(problem) is None)
        assert isinstance(kernel, BwdWeights)
        row = min(role_costs(problem, geometry(problem)).values()) / dims.kernel[2]
        direct = dims.n * prod(dims.met(axis) for axis in range(3)) * row  # taps in the padding are skipped
        return dims.groups * cycles, dims.groups * direct / kernel.speed(problem)

    def units(self, problem: ConvProblem, workers: int) -> tuple[list[Unit], int]:
        """Share out small sums by chunks of tiles (partial sums, then joined) and large ones by groups and vectors of
        channels, where each unit transforms the scalars of its groups anew."""
        plan, groups = layout(problem), problem.groups
        blocks, box = len(plan.lanes), partial(box_of, problem, plan.lanes, plan.lanes_are_wide)
        each = 4 * plan.sums_of(plan.lanes)  # bytes of a group and depth of the kernel
        nbytes = each * groups * len(plan.slabs)
        wanted = max(1, min(workers, problem.macs // STEPS.unit_macs))
        parts = chunks_of(min(wanted, plan.chunks)) if 9 * nbytes <= 16 * STEPS.shared_sums_bytes else 1
        busy = workers if wanted >= workers else 1
        if parts > 1:
            joins = shares_of(groups, blocks, max(1, min(wanted, parts * nbytes // STEPS.shared_sums_bytes)))
            first: list[Unit] = []
            # sums of a part of a group's channels lie side by side only where the kernel has one plane
            shares = shares_of(groups, blocks if len(plan.slabs) == 1 else 1, 1, busy, parts)
            for part, (g0, g1, b0, b1) in product(range(parts), shares):
                share = g0, g1, b0, b1 if len(plan.slabs) == 1 else blocks
                lanes = plan.lanes[share[2] : share[3]]
                start = part * nbytes + g0 * len(plan.slabs) * each + int(lanes["acc"][0])
                place = start, start + 4 * plan.sums_of(lanes) * (g1 - g0) * len(plan.slabs)
                macs = macs_of(problem, box(share)[1]) // parts
                first.append(Unit(len(first), 0, None, None, macs, (*share, part, parts), None, place))
            return first + units_of(problem, box, joins, parts, len(first)), parts * nbytes
        if each > STEPS.unit_sums_bytes:
            wanted = max(wanted, -(-each // STEPS.unit_sums_bytes) * groups)
        return units_of(problem, box, shares_of(groups, blocks, wanted, busy)), 0

    def run(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> bool:  # fmt: skip
        """Compute partial sums, or a tile of the gradient."""
        if stop():
            return False
        (g0, g1, b0, b1), (index, parts) = unit.part[:4], unit.part[4:]
        share, plan = _Share(problem, b0, b1), layout(problem)
        shared = None
        if parts > 1 and scratch is not None:
            shape = parts, problem.groups, len(plan.slabs), plan.sums_of(plan.lanes)
            shared = scratch.view(np.float32).reshape(shape)[..., share.first : share.first + share.floats]
        for group, depth in product(range(g0, g1), range(len(plan.slabs))):
            if index < 0:
                assert shared is not None
                sums: Floats | None = np.ascontiguousarray(sum_tree(shared[:, group, depth]))
            else:
                low, high = (plan.chunks * end // parts for end in (index, index + 1))
                sums = sum_chunks(low, high, share.floats, share.leaf(inputs, group, depth, stop))
            if sums is None:
                return False
            if unit.offset is None:
                assert shared is not None
                shared[index, group, depth] = sums
            else:
                share.write(group, depth, address(sums), output)
        return True


@cached
class _Share:
    """One unit's share: some blocks of lanes, of any group."""

    def __init__(self, problem: ConvProblem, low: int, high: int) -> None:
        self.problem, self.plan = problem, layout(problem)
        plan = self.plan
        self.lanes = plan.lanes[low:high].copy()
        self.first = int(self.lanes["acc"][0]) // 4
        self.lanes["acc"] -= self.lanes["acc"][0]
        self.floats = plan.sums_of(self.lanes)
        group, wide, narrow, tap = problem.weights_strides
        lane, row = (wide, narrow) if plan.lanes_are_wide else (narrow, wide)
        self.steps = group, TAPS * TAPS * tap
        self.weights = row_of(
            Weights, kind=KINDS[problem.dtype], lane_groups=0, groups=1, floats=0, taps=TAPS * TAPS,
            channels=plan.channels[1], tap_rows=1, channel_rows=TAPS * TAPS, start=0, group_step=0, block_step=lane,
            lane_step=lane, channel_step=row, tap_step=tap,
        )  # fmt: skip
        slabs = sum(map(len, plan.slabs)) * problem.groups
        self.batch = max(1, STEPS.batch_macs * slabs // max(1, problem.macs))

    def leaf(self, inputs: Sequence[Storage], group: int, depth: int, stop: Stop) -> Callable[[int, Floats], bool]:
        """Return what sums the products of one chunk of one group and depth; False when `stop` ended that early."""
        plan, slabs, sides = self.plan, self.plan.slabs[depth], self.plan.sides[depth].copy()
        places = self.problem.places if plan.lanes_are_wide else self.problem.places[::-1]
        tensors = np.array([address(inputs[place]) for place in places])
        sides["start"] += tensors + group * np.array(plan.channels) * sides["channel"]
        sides["end"] += tensors
        for side, blocks, (stage, panels) in zip(sides, (self.lanes, plan.scalars), ARENAS, strict=True):
            side["stage"] = arena_address(stage, len(blocks) * int(side["staged"]) // 4)
            side["panels"] = arena_address(panels, FACTORS * int(side["plane"]) // 4)

        def chunk(number: int, sums: Floats) -> bool:
            if not len(slabs):
                sums[...] = 0
            low, end = (len(slabs) * at // plan.chunks for at in (number, number + 1))
            for first in range(low, end, self.batch):
                if stop():
                    return False
                some = slabs[first : min(end, first + self.batch)]
                add_products(micro_table(), sides, self.lanes, plan.scalars, some, address(sums), first == low)
            return True

        return chunk

    def write(self, group: int, depth: int, sums: int, output: Storage) -> None:
        """Write the taps of one group and depth."""
        weights = self.weights.copy()
        weights["start"] = group * self.steps[0] + depth * self.steps[1]
        taps = arena_address("taps", TAPS * TAPS * (self.plan.channels[1] + 1) * PAIR // 4)
        write_taps(self.lanes, weights, sums, taps, address(output))
