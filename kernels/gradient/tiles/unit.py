"""Filter gradients on register tiles: packed panels, only real taps, sums in an order that the problem fixes.

Loops, outermost first: (8) chunks, a balanced tree; (7) slabs of pixels, between which a worker may stop; (6) groups;
(5) blocks of pixels that fit L1; (4) vectors of channels; (3) taps; (2) register tiles; (1) the pixels of a block,
summed in registers and then added to memory. Loops 1 to 6 are compiled (`kernels.gradient.tiles.driver`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.arena import address, arena_address
from kernels.blocks import STEPS
from kernels.cache import cached
from kernels.dtypes import KINDS
from kernels.emit.brgemm import micro_table
from kernels.emit.compiler import Records, row_of, values_of
from kernels.emit.depthwise import depthwise_entry
from kernels.gradient.roles import Sum
from kernels.gradient.tiles.driver import WIDTH, add_slabs, store
from kernels.gradient.tiles.records import Line, Place, Source, TileCall, TileShare, Weights
from kernels.gradient.tiles.schedule import Operand, Schedule, schedule
from kernels.plan import Stop, Storage, Unit, macs_of, work_of
from kernels.problem import ConvProblem, storage_dtype, wrapped
from kernels.reduction import sum_chunks, sum_tree

__all__ = ["BWD_WEIGHTS", "BwdWeights", "Cut", "Part", "box_of", "shares_of", "units_of"]

Floats = npt.NDArray[np.float32]
Cut = tuple[int, int, int, int]
Shape = tuple[int, ...]

IDLE = 1.15
"""How much longer than in more shares a gradient may take in few of them."""


class BwdWeights:
    """Weight gradients of Convolution and ConvTranspose on packed register tiles."""

    name = "bwd_weights_tiles"

    def refuse(self, problem: ConvProblem) -> str | None:
        """Take every weight gradient."""
        return None if problem.computes == "diff_weights" else "computes weight gradients only"

    def speed(self, problem: ConvProblem) -> int:
        """Return the estimated speed, as a multiple of that on f32 tiles."""
        return 1

    def schedule(self, problem: ConvProblem) -> Sum:
        """Lay out the sum."""
        return schedule(problem)

    @cached
    def part(self, problem: ConvProblem, unit: Unit) -> Part:
        """Prepare a unit's tables once: a service sees the same shapes again and again."""
        return TilePart(problem, schedule(problem), unit)

    def units(self, problem: ConvProblem, workers: int) -> tuple[list[Unit], int]:
        """Share out small gradients by pixels (partial sums, then tiles), large ones by groups and channels.

        Where either alone leaves workers without a unit, they are shared out by both.
        """
        plan = self.schedule(problem)
        box = partial(_box, problem, plan)
        acc_bytes = 4 * plan.rows * plan.lanes * plan.groups
        blocks = 1 if plan.lanes_are_groups else len(plan.blocks)
        unit = STEPS.unit_macs * self.speed(problem)
        wanted = max(1, min(workers, -(-work_of(problem) // unit)), min(4 * workers, problem.macs // (2 * unit)))
        busy = workers if wanted >= workers else 1
        parts, slabs, small = 1, len(plan.slabs), acc_bytes <= STEPS.shared_sums_bytes
        while 2 * parts <= min(wanted, plan.chunks):
            few = (
                parts * plan.groups * blocks < min(wanted, workers) and 2 * parts * acc_bytes <= STEPS.most_shared_bytes
            )
            if not (small or few) or (2 * parts > workers and slabs % (2 * parts) and slabs < 4 * parts):
                break  # also where some would have one slab and others two
            parts *= 2
        if parts == 1:
            if not plan.scalars_in_place:
                # every unit packs the scalars anew
                wanted = min(wanted, workers)
            slab_macs = problem.macs // max(1, slabs)
            least = max(acc_bytes // STEPS.unit_sums_bytes, slab_macs // (4 * STEPS.batch_macs)) + 1
            wanted = max(wanted, -(-least // workers) * workers if least > 1 else 1)
            return units_of(problem, box, shares_of(plan.groups, blocks, wanted, busy)), 0
        ends = [slabs * (i * plan.chunks // parts) // plan.chunks for i in range(parts + 1)]
        shares = shares_of(plan.groups, blocks, 1, busy, parts)
        joins = shares_of(plan.groups, blocks, max(1, min(workers, parts * acc_bytes // STEPS.shared_sums_bytes)))
        partial_sums = [(part, share) for part in range(parts) for share in shares]
        first = [
            Unit(
                i, 0, None, None, macs_of(problem, box(share)[1]) // parts, (*share, part, parts),
                _images(problem, plan, *ends[part : part + 2]), _scratch(plan, share, part),
            )
            for i, (part, share) in enumerate(partial_sums)
        ]  # fmt: skip
        return first + units_of(problem, box, joins, parts, len(first)), parts * acc_bytes

    def run(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> bool:  # fmt: skip
        """Compute partial sums or a final tile."""
        # laying out the tables may take as long as computing
        if stop():
            return False
        self.schedule(problem)
        if stop():
            return False
        part = self.part(problem, unit)
        plan = part.plan
        if part.index < 0:
            assert scratch is not None
            part.write(np.ascontiguousarray(sum_tree(part.of_chunks(scratch))).reshape(-1), output)
            return True
        low, high = part.index * plan.chunks // part.parts, (part.index + 1) * plan.chunks // part.parts
        total = part.sum(inputs, low, high, stop)
        if total is None:
            return False
        if unit.offset is None:
            assert scratch is not None
            part.of_chunks(scratch)[part.index] = total.reshape(-1, part.group_floats)
        else:
            part.write(total, output)
        return True


class Part(ABC):
    """One unit's share: some groups and lane blocks, over some chunks of the pixels."""

    faster = 1
    """Times as much work between two looks at whether to stop: it is done in less time."""

    plan: Sum

    def __init__(self, problem: ConvProblem, plan: Sum, unit: Unit) -> None:
        self.problem, self.plan = problem, plan
        self.g0, self.g1, self.b0, self.b1, self.index, self.parts = unit.part
        mine = plan.blocks if plan.lanes_are_groups else plan.blocks[self.b0 : self.b1]
        self.first_lane = int(mine[0]["lane"])
        self.width = int(mine["vectors"].sum()) * WIDTH
        self.blocks = mine.copy()
        self.blocks["acc"] = 4 * (mine["lane"] - self.first_lane) * plan.rows
        self.group_floats = plan.rows * self.width
        self.floats = (self.g1 - self.g0) * self.group_floats
        macs = problem.macs * self.width // max(1, plan.lanes * len(plan.slabs))
        self.batch = max(1, self.faster * STEPS.batch_macs // max(1, macs))
        self.lane_groups = problem.groups - self.g0 * WIDTH if plan.lanes_are_groups else 0
        self.layout = self._layout()

    @abstractmethod
    def add_slabs(self, inputs: Sequence[Storage], some: slice, acc: Floats) -> None:
        """Add some slabs of pixels to the accumulators."""

    def sum(self, inputs: Sequence[Storage], low: int, high: int, stop: Stop) -> Floats | None:
        """Sum some chunks; None when `stop` ended that early."""
        count, chunks = len(self.plan.slabs), self.plan.chunks

        def chunk(number: int, acc: Floats) -> bool:
            acc[...] = 0
            end = count * (number + 1) // chunks
            for first in range(count * number // chunks, end, self.batch):
                if stop():
                    return False
                self.add_slabs(inputs, slice(first, min(end, first + self.batch)), acc)
            return True

        return sum_chunks(low, high, self.floats, chunk)

    def of_chunks(self, scratch: Storage) -> Floats:
        """Return this share's partial sums, of each part of the pixels and each group, in the shared scratch."""
        plan = self.plan
        first, sums = plan.rows * self.first_lane, scratch.view(np.float32)
        pieces = sums[: self.parts * plan.groups * plan.rows * plan.lanes].reshape(self.parts, plan.groups, -1)
        return pieces[:, self.g0 : self.g1, first : first + self.group_floats]

    def _layout(self) -> Records:
        """Return where in the output the accumulators belong."""
        plan = self.plan
        group, wide, narrow, tap = self.problem.weights_strides
        block, row = (wide, narrow) if plan.vector_is_wide else (narrow, wide)
        lane, step = (group, group * WIDTH) if plan.lanes_are_groups else (block, group)
        return row_of(
            Weights,
            kind=KINDS[self.problem.dtype],
            lane_groups=self.lane_groups,
            groups=self.g1 - self.g0,
            floats=self.group_floats,
            taps=plan.taps,
            channels=plan.channels,
            tap_rows=plan.tap_step,
            channel_rows=plan.channel_step,
            start=self.g0 * step,
            group_step=step,
            block_step=block,
            lane_step=lane,
            channel_step=row,
            tap_step=tap,
        )

    def write(self, total: Floats, output: Storage) -> None:
        """Round the sums once and put them where the weights' layout wants them."""
        store(address(total), self.blocks, self.layout, address(output))


class TilePart(Part):
    """A share that is summed on register tiles."""

    plan: Schedule

    def __init__(self, problem: ConvProblem, plan: Schedule, unit: Unit) -> None:
        super().__init__(problem, plan, unit)
        lanes = self.blocks["lane"] - self.first_lane
        self.blocks["panel"] = 4 * self.blocks["first"] if plan.in_place else 4 * lanes * plan.vector.points
        packed, panel = min(plan.packed_groups, self.g1 - self.g0), plan.vector.points * self.width
        self.arenas = packed * panel, packed * plan.scalar.scratch
        groups, stored = self.g1 - self.g0, problem.dtype if plan.direct else "f32"
        self.table = micro_table()
        if plan.lanes_are_groups:
            self.table = np.array([depthwise_entry("taps", stored)])
        self.share = row_of(
            TileShare,
            kind=KINDS[problem.dtype],
            groups=1 if plan.direct else groups,
            together=packed,
            lanewise=plan.lanes_are_groups,
            lane_groups=self.lane_groups,
            vectors=groups if plan.direct else 1,
            acc_bytes=4 * self.group_floats,
            scalar_row=plan.scalar_row,
            acc_step=plan.channel_step,
            segment=plan.segment,
            merged=plan.merged,
            block=plan.block,
            vector=self._source(plan.vector, plan.in_place, 4 * panel),
            scalar=self._source(plan.scalar, plan.scalars_in_place, 4 * plan.scalar.scratch),
        )
        lines, size = np.zeros(len(lanes), Line.dtype), storage_dtype(problem.dtype).itemsize
        lines["source"] = size * self.blocks["first"] * plan.vector.tensor.channel
        lines["valid"], lines["lanes"] = self.blocks["valid"], self.blocks["vectors"] * WIDTH
        lines["place"] = self.blocks["panel"]
        (self.ranges, self.tiles), self.lines = plan.tables, np.concatenate([lines, plan.scalar_lines])

    def _source(self, operand: Operand, in_place: bool, panels: int) -> tuple[Any, ...]:
        """Return a tensor as the driver reads it, the first group counted from the tensor's own address."""
        problem, tensor = self.problem, operand.tensor
        size = storage_dtype(problem.dtype).itemsize
        is_dst = operand.is_wide == problem.transposed
        start, group, lane, *strides = wrapped(
            size * step
            for step in (
                tensor.origin + self.g0 * operand.group, operand.group, operand.lane, *tensor.steps
            )
        )  # fmt: skip
        return values_of(
            Source,
            start=start,
            nbytes=size * prod(problem.input_shapes[is_dst]),
            group=group,
            lane=lane,
            strides=strides,
            steps=operand.steps,
            moves=operand.moves,
            in_place=in_place,
            panels=group if in_place else panels,
        )

    def add_slabs(self, inputs: Sequence[Storage], some: slice, acc: Floats) -> None:
        """Pack both tensors, where they are not read in place, and walk them."""
        plan = self.plan
        wide, narrow = inputs[::-1] if self.problem.transposed else inputs
        vector, scalar = (wide, narrow) if plan.vector_is_wide else (narrow, wide)
        call = row_of(
            TileCall,
            vector=values_of(Place, tensor=address(vector), panels=arena_address("vector", self.arenas[0])),
            scalar=values_of(Place, tensor=address(scalar), panels=arena_address("scalar", self.arenas[1])),
            acc=address(acc),
        )  # fmt: skip
        add_slabs(self.table, self.share, call, self.plan.slabs[some], self.blocks, self.lines, self.ranges, self.tiles)


def _images(problem: ConvProblem, plan: Sum, low: int, high: int) -> tuple[int, int]:
    """Return the images of some slabs: they are the outermost axis with positions, or a part of it."""
    outermost = next((a for a, axis in enumerate(plan.axes) if axis.size > 1), 0)
    first, end = (int(plan.slabs[name][at, outermost]) for name, at in (("low", low), ("high", high - 1)))
    size = plan.axes[outermost].size
    return first * problem.n // size, -(-end * problem.n // size)


def _scratch(plan: Sum, share: Cut, part: int) -> tuple[int, int]:
    """Return the bytes of the shared scratch in which a share of the output leaves its sums of a part of the pixels.

    A share is of whole groups, or of one.
    """
    g0, g1, b0, b1 = share
    blocks = plan.blocks if plan.lanes_are_groups else plan.blocks[b0:b1]
    row, lanes = 4 * plan.rows, int(blocks["vectors"].sum()) * WIDTH
    start = row * ((part * plan.groups + g0) * plan.lanes + int(blocks["lane"][0]))
    return start, start + row * (g1 - g0) * lanes


def shares_of(groups: int, blocks: int, least: int, workers: int = 1, parts: int = 1) -> list[Cut]:
    """Cut groups, then blocks of lanes, into equal parts: low and high of both for each share.

    There are at least so many shares, if that is possible, and more where otherwise some of the `workers` would wait
    for others. Each share has a unit for each of some `parts` of the pixels.
    """
    cuts = [(min(groups, n), min(blocks, -(-n // groups))) for n in range(least, least + workers)]
    # units of the busiest worker, times groups and blocks of the largest unit
    times = [-(-parts * i * j // workers) * -(-groups // i) * -(-blocks // j) for i, j in cuts]
    by_group, by_block = next(cut for cut, time in zip(cuts, times, strict=True) if time <= IDLE * min(times))
    return [
        (groups * i // by_group, groups * (i + 1) // by_group, blocks * j // by_block, blocks * (j + 1) // by_block)
        for i in range(by_group)
        for j in range(by_block)
    ]


def units_of(
    problem: ConvProblem, box: Callable[[Cut], tuple[Shape, Shape]], shares: Sequence[Cut], parts: int = 1,
    first: int = 0,
) -> list[Unit]:  # fmt: skip
    """Return a unit for each share, numbered from the `first` on, which computes its `box` of the output.

    With several `parts` it adds up partial sums of the pixels, after the units that have left them.
    """
    units: list[Unit] = []
    for number, share in enumerate(shares, first):
        offset, shape = box(share)
        if parts == 1:
            units.append(Unit(number, 0, offset, shape, macs_of(problem, shape), (*share, 0, 1)))
        else:
            units.append(Unit(number, 1, offset, shape, 0, (*share, -1, parts)))
    return units


def _box(problem: ConvProblem, plan: Sum, part: Cut) -> tuple[Shape, Shape]:
    """Return offset and shape, in the weights' axes, of some groups and lane blocks."""
    if not plan.lanes_are_groups:
        return box_of(problem, plan.blocks, plan.vector_is_wide, part)
    groups, dims = (part[0] * WIDTH, min(problem.groups, part[1] * WIDTH)), problem.dims
    return problem.weights_box(groups, (0, dims.wide_channels), (0, dims.narrow_channels))


def box_of(problem: ConvProblem, blocks: Records, lanes_are_wide: bool, part: Cut) -> tuple[Shape, Shape]:
    """Return offset and shape, in the weights' axes, of some groups and blocks of lanes.

    Lanes are channels of one of the two tensors.
    """
    g0, g1, b0, b1 = part
    first, last, dims = blocks[b0], blocks[b1 - 1], problem.dims
    lanes = int(first["first"]), int(last["first"] + last["valid"])
    wide, narrow = (lanes, (0, dims.narrow_channels)) if lanes_are_wide else ((0, dims.wide_channels), lanes)
    return problem.weights_box((g0, g1), wide, narrow)


BWD_WEIGHTS = BwdWeights()
