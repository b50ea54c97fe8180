"""The units of a fast verification: project images, then judge the projections and one dst channel in full."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from kernels.plan import Plan, Stop, Storage, Unit
from kernels.problem import ConvProblem
from kernels.registry import register
from verify.arithmetic import PLAIN, Arithmetic
from verify.compared import Compared
from verify.parts import Part, origin, part_of
from verify.projections import Projected, Projection, projected_macs
from verify.reading import Inputs, read_bytes
from verify.report import as_json, report_on
from verify.stopping import Stopped, raising
from verify.sums import sums_of
from verify.unit import JUDGE, READ, Verification, staged, write_output

__all__ = ["VERIFY_FAST", "FastVerification", "fast_scratch", "plan_fast_verification", "projections_of"]


_AT_RANDOM = 256
"""Elements of a result that passes which are verified in full: a few channels, for all taps or pixels.

Fewer would not show what their errors are made of (`verify.hypotheses`).
"""


@dataclass(frozen=True)
class FastVerification(Verification):
    """The verification of a problem's result by random projections, which `seed` draws."""

    seed: int = 0

    @property
    def macs(self) -> int:
        """Multiply-adds of all projections."""
        return projected_macs(self.problem)


def plan_fast_verification(
    problem: ConvProblem, *, explain: bool = False, arithmetic: Arithmetic | None = None, seed: int | None = None
) -> Plan:
    """Plan a fast verification, with a random seed by default: no kernel can know the projections."""
    said = arithmetic or Arithmetic.usual(problem.dtype)
    task = FastVerification(problem, said, explain, secrets.randbits(62) if seed is None else seed)
    blocks = Projection(problem, 0).blocks
    sums = [(task.macs // blocks, (0, block)) for block in range(blocks)]
    return staged(task, VERIFY_FAST.name, sums, fast_scratch(problem, said))


def fast_scratch(problem: ConvProblem, arithmetic: Arithmetic = PLAIN) -> int:
    """Return the bytes of scratch of a fast verification."""
    return _slot_bytes(Projection(problem, 0)) + read_bytes(problem, arithmetic)


def projections_of(plan: Plan) -> tuple[Plan, Plan] | None:
    """Return the plans of the projections, whose tensors with images may be on a GPU, and of the rest after them.

    None if the plan is another, or rounds the inputs before they are projected.
    """
    if not isinstance(plan.problem, FastVerification) or plan.problem.arithmetic.readings:
        return None
    *projections, rest = plan.units
    return replace(plan, units=tuple(projections)), replace(plan, units=(rest,))


def _slot_bytes(projection: Projection) -> int:
    return 8 * projection.slots * projection.blocks


class FastKernel:
    """Computes the units of `plan_fast_verification`."""

    name = "verify_fast"

    def run(
        self, task: FastVerification, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> bool:  # fmt: skip
        """Project one block, or write the report."""
        try:
            self._run(task, unit, inputs, output, scratch, raising(stop))
        except Stopped:
            return False
        return True

    def _run(
        self, task: FastVerification, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> None:  # fmt: skip
        stop()
        assert scratch is not None
        problem, (*given, result) = task.problem, inputs
        projection = Projection(problem, task.seed, task.arithmetic)
        size = _slot_bytes(projection)
        room = Inputs(problem, task.arithmetic, given, scratch[size:])
        slots = scratch[:size].view(np.float64).reshape(projection.blocks, projection.slots)
        if unit.part == READ:
            room.read(result, stop)
        elif unit.part == JUDGE:
            report = _report(task, projection, room.given, result, slots, stop)
            write_output(as_json(room.described(report, result, stop)), output)
        else:
            projection.run(unit.part[1], room.given, result, slots[unit.part[1]], stop)


def _report(
    task: FastVerification, projection: Projection, inputs: Sequence[Storage], result: Storage,
    slots: np.ndarray[Any, Any], stop: Stop,
) -> dict[str, Any]:  # fmt: skip
    problem = task.problem
    projected = projection.judge(inputs, slots, stop)
    if projected.passed:
        rng = np.random.default_rng([task.seed, 4])
        around = tuple([int(rng.integers(size)) for size in problem.output_shape])
        part = part_of(problem, inputs, around, _AT_RANDOM)
    else:
        part = projection.suspect(inputs, result, stop)
    report = _part_report(task, part, result, stop)
    if not projected.passed and report["passed"]:
        projected = projection.judge(inputs, slots, stop, report["difficulty"])
    return report | {
        "shape": list(problem.output_shape),
        "elements": prod(problem.output_shape),
        "passed": report["passed"] and projected.passed,
        "projections": _described(projection, projected, part, report["elements"]),
    }


def _described(projection: Projection, projected: Projected, part: Part, elements: int) -> dict[str, Any]:
    return {
        "count": projection.count,
        "passed": projected.passed,
        "exact": projected.exact,
        "mean_square": {"measured": projected.mean_square[0], "limit": projected.mean_square[1]},
        "largest": {"measured": projected.largest[0], "limit": projected.largest[1]},
        "detection": {"every_element": projected.every_element, "one_element": projected.one_element},
        "checked": {"first": origin(part.place), "shape": list(part.problem.output_shape), "elements": elements},
    }  # fmt: skip


def _part_report(task: FastVerification, part: Part, result: Storage, stop: Stop) -> dict[str, Any]:
    """Judge a part of the result in full, with the indexes of the whole tensors."""
    problem, first = part.problem, origin(part.place)
    sums = sums_of(problem, part.inputs, stop)
    some = np.ascontiguousarray(result[part.place])
    compared = Compared(
        problem, part.inputs, some, sums.high, None, sums.spread, task.explain, arithmetic=task.arithmetic
    )
    report = report_on(compared, stop, whole=task.problem.output_shape, first=first)
    if report["worst"] is None:
        return report
    worst = report["worst"]
    worst["index"] = [at + start for at, start in zip(worst["index"], first, strict=True)]
    for term in worst["largest"]:
        term["at"] = [
            [at + start for at, start in zip(index, origin(place), strict=True)]
            for index, place in zip(term["at"], part.input_places, strict=False)
        ]
    return report


VERIFY_FAST = FastKernel()
register(VERIFY_FAST)
