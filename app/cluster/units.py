"""What a unit reads and writes, so that no more than that travels between machines."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import numpy.typing as npt

from kernels import Plan, Unit, box
from kernels.problem import ConvProblem, storage_dtype
from kernels.reference import ReferenceKernel

__all__ = ["Portion", "arguments", "can_travel", "first_stage", "portions", "write"]

Array = npt.NDArray[Any]


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

_MOST_STRIDED_BYTES = 64 << 20
"""Size of a tensor up to which inner channels are cut out: a worker then touches every page of the whole one."""


def can_travel(plan: Plan) -> bool:
    """Whether the units of a plan may run on other machines: each writes a box, or its share of the scratch.

    Their work must be in the first stage, the only one that is sent. Verifications lay out their scratch differently,
    and the reference stays here because `Costs` has no rate for it.
    """
    if not isinstance(plan.problem, ConvProblem) or plan.problem.n == 0 or plan.kernel == ReferenceKernel.name:
        return False
    return plan.stages == 1 or plan.units[0].macs > 0


def portions(plan: Plan, unit: Unit) -> tuple[Portion, ...]:
    """Return what a unit of the first stage reads of each input.

    A unit of partial sums reads the images that it names, one of a forward operation the images that it writes, and one
    of a weights gradient the channels of its box.
    """
    problem = plan.problem
    inputs = len(problem.input_shapes)
    if unit.images is not None and unit.offset is None:
        return (_images(problem.n, *unit.images),) * inputs
    if isinstance(problem, ConvProblem) and unit.offset and unit.shape:
        if problem.forward:
            return _images(problem.n, unit.offset[0], unit.offset[0] + unit.shape[0]), *(_WHOLE,) * (inputs - 1)
        # Winograd looks whether all of the inputs are integers
        if problem.computes == "diff_weights" and problem.groups == 1 and problem.algorithm == "direct":
            return _channels(problem, unit, "I"), _channels(problem, unit, "O")
    return (_WHOLE,) * inputs


def _images(count: int, low: int, high: int) -> Portion:
    return _WHOLE if high - low == count else Portion(low, high)


def _channels(problem: ConvProblem, unit: Unit, letter: Literal["I", "O"]) -> Portion:
    """Return the channels of src, `I`, or of diff_dst, `O`, whose weights are in the box of a unit."""
    assert unit.offset is not None
    assert unit.shape is not None
    place = problem.weights_format.index(letter)
    if problem.weights_format.index("X") < place:
        place += len(problem.kernel) - 1
    low, size = unit.offset[place], unit.shape[place]
    inner = problem.data_format == "NXC"
    nbytes = prod(problem.input_shapes["IO".index(letter)]) * storage_dtype(problem.dtype).itemsize
    if size == problem.weights_shape[place] or (inner and nbytes > _MOST_STRIDED_BYTES):
        return _WHOLE
    return Portion(low, low + size, problem.rank + 1 if inner else 1)


def first_stage(plan: Plan) -> int:
    """Return the number of units of the first stage, which come before all others."""
    return bisect_left(plan.units, 1, key=lambda unit: unit.stage)


def arguments(plan: Plan, index: int) -> tuple[Plan, tuple[Portion, ...], slice | None]:
    """Return what a unit of the first stage takes beside its inputs: its own plan, its portions and its share."""
    unit = plan.units[index]
    single = replace(plan, units=(replace(unit, index=0, stage=0),), stages=1, refusals=())  # quick to send
    return single, portions(plan, unit), None if unit.scratch is None else slice(*unit.scratch)


def write(unit: Unit, result: Array, output: Array, scratch: Array) -> None:
    """Put the result of a unit of the first stage in its place: a box of the output, or its share of the scratch."""
    if unit.scratch is not None:
        scratch[slice(*unit.scratch)] = result
    else:
        box(output, unit)[...] = result
