"""Units of weight gradients on products of bf16 pairs, and when these are worth it."""

from __future__ import annotations

from collections.abc import Sequence

from kernels.arena import address, arena_address
from kernels.cache import cached
from kernels.emit.compiler import Floats, Records, row_of
from kernels.emit.dots import STAGED, TILE, dot_table
from kernels.gradient.dots.driver import STAGE_BYTES, add_dots
from kernels.gradient.dots.records import DotCall, DotShare, Packing
from kernels.gradient.dots.schedule import DotSchedule, dot_schedule
from kernels.gradient.tiles.unit import BwdWeights, Part
from kernels.plan import Storage, Unit
from kernels.problem import ConvProblem, wrapped
from kernels.target import target

__all__ = ["BWD_DOTS"]

LEAST_USE = 0.3 if STAGED else 0.45
"""Share of multiplications that are not by filling zeros, above which these instructions outdo f32 ones."""

BATCH = 4 if STAGED else 1
"""Times as much work between two looks at whether to stop as in `kernels.gradient.tiles.unit`: it is done in less
time."""


class DotPart(Part):
    """One unit's share: some groups and blocks of b's channels, over some chunks of the pixels."""

    plan: DotSchedule

    faster = BATCH

    def __init__(self, problem: ConvProblem, plan: DotSchedule, unit: Unit) -> None:
        super().__init__(problem, plan, unit)
        self.share = self._share(int(self.blocks["valid"].sum()))
        self.panels = (plan.a_planes * plan.a_plane + 2 * self.width * plan.positions + STAGE_BYTES) // 4

    def _share(self, channels: int) -> Records:
        """Return what is packed and summed, of b so many `channels`."""
        plan, a, b = self.plan, self.plan.row_tensor, self.plan.lane_tensor
        a_source, a_group, b_source, b_group = wrapped(
            2 * step
            for step in (
                a.origin + self.g0 * a.group, a.group,
                b.origin + self.g0 * b.group + self.first_lane * b.channel, b.group,
            )
        )  # fmt: skip
        rows = row_of(
            Packing, channels=plan.channels, source=a_source, channel=plan.a_steps[4], strides=plan.a_steps[:4],
            target=0, planes=plan.a_planes, plane=plan.a_plane, steps=plan.panel_steps, pairs=False,
        )  # fmt: skip
        lanes = row_of(
            Packing, channels=channels, source=b_source, channel=plan.b_steps[4], strides=plan.b_steps[:4],
            target=plan.a_planes * plan.a_plane, planes=self.width // TILE, plane=2 * TILE * plan.positions,
            steps=plan.panel_steps, pairs=True,
        )  # fmt: skip
        return row_of(
            DotShare,
            groups=self.g1 - self.g0,
            taps=plan.taps,
            live=plan.live,
            phases=plan.boxes.shape[1] - 1,
            acc_group=4 * self.group_floats,
            acc_block=4 * TILE * plan.rows,
            a_group=a_group,
            b_group=b_group,
            tile_channels=plan.tile_channels,
            row_bytes=plan.row_bytes,
            row_sums=plan.row_sums,
            a=tuple(rows[0]),
            b=tuple(lanes[0]),
        )

    def add_slabs(self, inputs: Sequence[Storage], some: slice, acc: Floats) -> None:
        """Pack both tensors as pairs, and multiply."""
        plan = self.plan
        wide, narrow = inputs[::-1] if self.problem.transposed else inputs
        a, b = (narrow, wide) if plan.vector_is_wide else (wide, narrow)
        place = arena_address("vector", self.panels)
        call = row_of(
            DotCall, a=address(a), b=address(b), panels=place, acc=address(acc), offsets=address(plan.offsets),
            rows=len(plan.offsets),
        )  # fmt: skip
        add_dots(dot_table(), self.share, call, plan.slabs[some], plan.boxes[some].reshape(-1), plan.tap_table)


class BwdDots(BwdWeights):
    """Weight gradients of Convolution and ConvTranspose from products of bf16 pairs."""

    name = f"bwd_weights_{target().dots}"

    def refuse(self, problem: ConvProblem) -> str | None:
        """Take weight gradients whose channels and pixels fill the registers well."""
        if problem.computes != "diff_weights":
            return "computes weight gradients only"
        if problem.dtype != "bf16":
            return "dot products take bf16 only"
        plan = dot_schedule(problem)
        if plan is None:
            return "pixels with zeros between them would take too much room"
        if plan.use < LEAST_USE and not target().imitated:
            return f"only {plan.use:.0%} of its products would not be filling zeros, at least {LEAST_USE:.0%} pay"
        return None

    def speed(self, problem: ConvProblem) -> int:
        """Return the estimated speed, as a multiple of that on f32 tiles."""
        return BATCH

    def schedule(self, problem: ConvProblem) -> DotSchedule:
        """Lay out the sum."""
        plan = dot_schedule(problem)
        assert plan is not None
        return plan

    @cached
    def part(self, problem: ConvProblem, unit: Unit) -> Part:
        """Prepare a unit."""
        return DotPart(problem, self.schedule(problem), unit)


BWD_DOTS = BwdDots()
