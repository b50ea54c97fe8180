"""What a unit reads and writes, so that no more than that travels between machines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kernels import Plan, Unit
from kernels.problem import ConvProblem

__all__ = ["Portion", "can_travel", "portions", "rest", "scratch_share", "single"]


@dataclass(frozen=True, slots=True)
class Portion:
    """The part of one input that a unit reads: from `low` up to `high` along `axis`, or all if `high` is None."""

    low: int = 0
    high: int | None = None
    axis: int = 0

    @property
    def index(self) -> tuple[slice, ...]:
        """What selects the part in a tensor."""
        return *(slice(None),) * self.axis, slice(self.low, self.high)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a tensor whose shape is `whole`."""
        high = whole[self.axis] if self.high is None else self.high
        return *whole[: self.axis], high - self.low, *whole[self.axis + 1 :]


_WHOLE = Portion()


def can_travel(plan: Plan) -> bool:
    """Whether the units of a plan may run on other machines: each writes a box, or its share of the scratch.

    Units of a verification share their scratch in another way.
    """
    return isinstance(plan.problem, ConvProblem) and plan.problem.n > 0


def portions(plan: Plan, unit: Unit) -> tuple[Portion, ...]:
    """Return what a unit of the first stage reads of each input.

    A unit of partial sums reads the images from where the unit before it stops, the one that both may share included.
    A unit of a forward operation reads the images that it writes, one of a weights gradient the channels of its box.
    """
    problem = plan.problem
    inputs = len(problem.input_shapes)
    if unit.images is not None and unit.offset is None:
        before = plan.units[unit.index - 1].images if unit.index else None
        return (Portion(max(0, (before or 0) - 1), unit.images),) * inputs
    if isinstance(problem, ConvProblem) and unit.offset and unit.shape:
        if problem.forward:
            return Portion(unit.offset[0], unit.offset[0] + unit.shape[0]), *(_WHOLE,) * (inputs - 1)
        if problem.computes == "diff_weights" and problem.groups == 1:
            return _channels(problem, unit, "I"), _channels(problem, unit, "O")
    return (_WHOLE,) * inputs


def _channels(problem: ConvProblem, unit: Unit, letter: Literal["I", "O"]) -> Portion:
    """Return the channels of src, `I`, or of diff_dst, `O`, whose weights are in the box of a unit."""
    assert unit.offset is not None
    assert unit.shape is not None
    place = problem.weights_format.index(letter)
    if problem.weights_format.index("X") < place:
        place += len(problem.kernel) - 1
    low, size = unit.offset[place], unit.shape[place]
    if size == problem.weights_shape[place]:
        return _WHOLE
    return Portion(low, low + size, 1 if problem.data_format == "NCX" else problem.rank + 1)


def scratch_share(plan: Plan, unit: Unit) -> slice:
    """Return the bytes of the scratch that a unit of the first stage writes: the shares are equal and in order."""
    size = plan.scratch_bytes // sum(each.stage == 0 for each in plan.units)
    return slice(unit.index * size, (unit.index + 1) * size)


def single(plan: Plan, unit: Unit) -> Plan:
    """Return a plan of this unit alone, which is quick to send."""
    return replace(plan, units=(unit,), stages=unit.stage + 1, refusals=())


def rest(plan: Plan, done: set[int]) -> tuple[Plan, tuple[Unit, ...]]:
    """Return a plan of the units whose index is not among those `done`, and these units as the whole plan has them."""
    left = tuple(unit for unit in plan.units if unit.index not in done)
    stages = sorted({unit.stage for unit in left})
    units = tuple(replace(unit, index=i, stage=stages.index(unit.stage)) for i, unit in enumerate(left))
    return replace(plan, units=units, stages=len(stages)), left
