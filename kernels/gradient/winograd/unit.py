"""Weight gradients of 3x3 kernels by Winograd's F(3x3, 2x2): 16 products of channels where direct sums have 36.

Loops, outermost first: (8) groups and depths of the kernel; (7) chunks, a balanced tree; (6) slabs of about a hundred
tiles, between which a worker may stop; (5) the four vertical products, for which a slab is transformed; (4) the four
horizontal ones; (3) vectors of channels; (2) register tiles, those of the direct sums; (1) the tiles of a slab, summed
in registers and then added to memory. Loops 1 to 6 are compiled (`kernels.gradient.winograd.driver`).

Units share out groups and channels, or where there are few of these the chunks of the sums, which are then joined
as the same tree.

Sums of integers are exact up to 16 T S G = 2**24 with T tiles and S and G the largest magnitudes, a quarter of what
direct sums reach: V and U are up to four times as large as S and G. Inf and NaN reach every element that direct sums
give them to, and others of the same channels, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import memset
from functools import partial
from math import prod

import numpy as np
import numpy.typing as npt

from kernels.arena import address, arena_address
from kernels.blocks import STEPS
from kernels.cache import cached
from kernels.costs import COSTS
from kernels.dtypes import KINDS
from kernels.emit.brgemm import micro_table
from kernels.emit.compiler import row_of
from kernels.emit.winograd import TAPS
from kernels.gradient.geometry import geometry
from kernels.gradient.roles import lines_cost, role_costs
from kernels.gradient.tiles.records import Block, Weights
from kernels.gradient.tiles.unit import BwdWeights, box_of, cut_shares, units_of
from kernels.gradient.winograd.driver import TAKEN_ROWS, ProductRun, add_products, write_taps
from kernels.gradient.winograd.layout import layout, side_records
from kernels.plan import Kernel, Stop, Storage, Unit
from kernels.problem import ConvProblem
from kernels.reduction import chunks_of, sum_chunks, sum_tree
from kernels.winograd.kernel import WinogradKernel
from kernels.winograd.records import PRODUCTS, Room
from kernels.winograd.tiles import STAGED_LINE
from kernels.winograd.work import plane_products, plane_tiles

__all__ = ["BwdWinograd"]

Floats = npt.NDArray[np.float32]


class BwdWinograd(WinogradKernel):
    """Weight gradients of Convolution and ConvTranspose by Winograd's F(3x3, 2x2)."""

    name = "bwd_weights_winograd"
    of = "ConvolutionBackwardWeights", "ConvTransposeBackwardWeights"

    def __init__(self, direct: Sequence[Kernel]) -> None:
        self._direct = direct

    def cycles(self, problem: ConvProblem) -> tuple[float, float]:
        """Estimate the cycles of Winograd and of direct sums, by the first of the `direct` kernels that takes it."""
        dims, plan = problem.dims, layout(problem)
        lanes, vectors = dims.narrow_channels, [int(side["vectors"].sum()) for side in (plan.lanes, plan.scalars)]
        narrow, wide = vectors
        if plan.lanes_are_wide:
            lanes, narrow, wide = dims.wide_channels, wide, narrow
        frames, sums = dims.n * dims.met(0), vectors[0] * plan.rows
        tiles, products = plane_tiles(dims.narrow[1:]), plane_products(dims.narrow[1:])
        cycles = frames * products * lines_cost(lanes, plan.rows, 1, merged=False)
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
        plan = layout(problem)
        groups, blocks, box_at = (
            problem.groups,
            len(plan.lanes),
            partial(box_of, problem, plan.lanes, plan.lanes_are_wide),
        )
        nbytes = plan.sums_bytes * groups * len(plan.slabs)
        wanted = max(1, min(workers, problem.macs // STEPS.unit_macs))
        parts = chunks_of(min(wanted, plan.chunks)) if nbytes <= STEPS.winograd_shared_bytes else 1
        if parts == 1:
            least = -(-plan.sums_bytes // STEPS.winograd_sums_bytes)
            by_group = groups if least > 1 else min(groups, wanted)  # a box is of several groups or a part of one
            by_block = min(blocks, max(least, -(-wanted // by_group) if by_group == groups else 1))
            shares = cut_shares(by_group, by_block, groups, blocks)
            return units_of(problem, shares, box_at), 0
        macs = problem.macs // parts
        first = [Unit(i, 0, None, None, macs, (0, groups, 0, blocks, i, parts)) for i in range(parts)]
        joining = max(1, min(wanted, parts * nbytes // STEPS.join_bytes))
        by_group = min(groups, joining)
        shares = cut_shares(by_group, min(blocks, joining // by_group), groups, blocks)
        return first + units_of(problem, shares, box_at, parts), parts * nbytes

    def run(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> bool:  # fmt: skip
        """Compute partial sums, or a tile of the gradient."""
        if stop():
            return False
        share, (index, parts) = _share(problem, unit.part[:4]), unit.part[4:]
        shared = None if parts == 1 or scratch is None else scratch.view(np.float32).reshape(parts, -1)
        chunks = share.plan.chunks
        for group, depth in np.ndindex(share.g1 - share.g0, len(share.plan.slabs)):
            group += share.g0
            if index < 0:
                assert shared is not None
                sums: Floats | None = np.ascontiguousarray(sum_tree(shared[:, share.place(group, depth)]))
            else:
                low, high = (chunks * end // parts for end in (index, index + 1))
                sums = sum_chunks(low, high, share.nbytes // 4, share.leaf(inputs, group, depth, stop))
            if sums is None:
                return False
            if unit.offset is None:
                assert shared is not None
                shared[index, share.place(group, depth)] = sums
            else:
                share.write(group, depth, address(sums), output)
        return True


class _Share:
    """One unit's share: some groups and blocks of lanes."""

    def __init__(self, problem: ConvProblem, part: tuple[int, ...]) -> None:
        self.problem, self.plan = problem, layout(problem)
        plan = self.plan
        self.g0, self.g1, b0, b1 = part
        self.lanes = plan.lanes[b0:b1].copy()
        self.first = int(self.lanes["sums"][0])
        for name in ("sums", "panel", "stage"):
            self.lanes[name] -= self.lanes[name][0]
        last = self.lanes[-1]
        self.nbytes = int(last["sums"] + PRODUCTS * last["plane"])
        self.blocks = np.zeros(len(self.lanes), Block.dtype)
        for name in ("first", "valid", "vectors"):
            self.blocks[name] = self.lanes[name]
        group, wide, narrow, tap = problem.weights_strides
        lane, row = (wide, narrow) if plan.lanes_are_wide else (narrow, wide)
        self.steps = group, TAPS * TAPS * tap
        self.weights = row_of(
            Weights, kind=KINDS[problem.dtype], lane_groups=0, groups=1, floats=0, taps=TAPS * TAPS, channels=plan.rows,
            tap_rows=1, channel_rows=TAPS * TAPS if tap == 1 else 1, start=0, group_step=0, block_step=lane,
            lane_step=lane, channel_step=row, tap_step=tap,
        )  # fmt: skip
        slabs = sum(map(len, plan.slabs)) * problem.groups
        self.batch = max(1, STEPS.batch_macs * slabs // max(1, problem.macs))

    def place(self, group: int, depth: int) -> slice:
        """Return where the sums of one group and depth lie among all partial sums."""
        start = (group * len(self.plan.slabs) + depth) * self.plan.sums_bytes + self.first
        return slice(start // 4, (start + self.nbytes) // 4)

    def leaf(self, inputs: Sequence[Storage], group: int, depth: int, stop: Stop) -> Callable[[int, Floats], bool]:
        """Return what sums the products of one chunk of one group and depth; False when `stop` ended that early."""
        plan, slabs = self.plan, self.plan.slabs[depth]
        wide, narrow = inputs[::-1] if self.problem.transposed else inputs
        sides = side_records(plan, depth, group)
        tensors = [address(each) for each in ((wide, narrow) if plan.lanes_are_wide else (narrow, wide))]
        names, sizes = (("stage", "vector"), ("scalar stage", "scalar")), zip(plan.staged, plan.panels, strict=True)
        rooms = np.zeros(2, Room.dtype)
        rooms["tensor"], rooms["zeros"] = tensors, arena_address("zeros", STAGED_LINE // 4)
        for room, (stage, panels), (staged, packed) in zip(rooms, names, sizes, strict=True):
            room["stage"], room["panels"] = arena_address(stage, staged), arena_address(panels, packed)

        def chunk(number: int, sums: Floats) -> bool:
            if not len(slabs):
                sums[...] = 0
            memset(int(rooms["zeros"][0]), 0, STAGED_LINE)
            low, end = (len(slabs) * at // plan.chunks for at in (number, number + 1))
            for first in range(low, end, self.batch):
                if stop():
                    return False
                run = row_of(ProductRun, begins=first == low, firsts=plan.firsts, sums=address(sums))
                some = slabs[first : min(end, first + self.batch)]
                add_products(micro_table(), run, sides, rooms, self.lanes, plan.scalars, some, plan.tiles)
            return True

        return chunk

    def write(self, group: int, depth: int, sums: int, output: Storage) -> None:
        """Write the taps of one group and depth."""
        weights = self.weights.copy()
        weights["start"] = group * self.steps[0] + depth * self.steps[1]
        taps = arena_address("taps", TAPS * TAPS * TAKEN_ROWS * STAGED_LINE // 4)
        write_taps(self.lanes, self.blocks, weights, sums, taps, address(output))


@cached
def _share(problem: ConvProblem, part: tuple[int, ...]) -> _Share:
    """Prepare a unit's tables once."""
    return _Share(problem, part)
