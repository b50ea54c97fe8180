"""The units of a verification: first the exact sums, box by box; then one unit judges and writes the report.

The scratch has the `verify.sums.Sums` of all elements: two float64 for each, three where the dtype is f64. Where the
kernel declares that it rounds its inputs, a unit before all others writes them to the scratch as they are read
(`verify.reading`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from kernels.plan import Plan, Stop, Storage, Unit, box
from kernels.problem import ConvProblem
from kernels.reference import REFERENCE
from kernels.registry import register
from verify.arithmetic import PLAIN, Arithmetic
from verify.compared import Compared
from verify.reading import Inputs, read_bytes
from verify.report import as_json, report_on
from verify.stopping import Stopped, raising
from verify.sums import unit_sums

__all__ = [
    "REPORT_BYTES",
    "VERIFY",
    "Verification",
    "VerifyKernel",
    "copied_bytes",
    "in_full",
    "plan_verification",
    "read_report",
    "verification_macs",
    "verification_scratch",
    "write_output",
]

READ, JUDGE = (-1, 0), (-1, 1)
"""Parts of the units that read the inputs, and that judge."""

REPORT_BYTES = 1 << 20
"""A report takes some tens of kilobytes; the first 8 bytes are its length."""


@dataclass(frozen=True)
class Verification:
    """The verification of a problem's result, which follows the problem's own inputs; the output is a report."""

    problem: ConvProblem
    arithmetic: Arithmetic
    explain: bool = False

    @property
    def dtype(self) -> str:
        """The dtype of the inputs."""
        return self.problem.dtype

    @property
    def n(self) -> int:
        """Number of images."""
        return self.problem.n

    @property
    def macs(self) -> int:
        """Multiply-adds, all of them."""
        return verification_macs(self.dtype, self.problem.macs)

    @property
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the inputs and of the result to verify."""
        return *self.problem.input_shapes, self.problem.output_shape

    def result_of(self, inputs: Sequence[Storage]) -> Storage:
        """Return the result to verify."""
        return inputs[-1]

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the report."""
        return (REPORT_BYTES,)

    @property
    def output_dtype(self) -> np.dtype[Any]:
        """Dtype of the report: bytes."""
        return np.dtype(np.uint8)


def plan_verification(
    problem: ConvProblem, *, workers: int = 1, explain: bool = False, arithmetic: Arithmetic | None = None
) -> Plan:
    """Plan the verification of a problem's result, of a kernel with this arithmetic.

    `explain` also tests hypotheses about a result that passes.
    """
    said = arithmetic or Arithmetic.usual(problem.dtype)
    return in_full(Verification(problem, said, explain), VERIFY.name, workers)


def in_full(task: Verification, kernel: str, workers: int) -> Plan:
    """Return the plan of a task that needs all exact sums."""
    first, _ = REFERENCE.units(task.problem, workers)
    sums = [(verification_macs(task.dtype, unit.macs), (workers, unit.index)) for unit in first]
    return staged(task, kernel, sums, verification_scratch(task.problem, task.arithmetic))


def staged(task: Verification, kernel: str, sums: Sequence[tuple[int, tuple[int, int]]], scratch: int) -> Plan:
    """Return the plan of a verification: read the inputs if they are rounded, sum in units, judge.

    `sums` has the multiply-adds of each unit, and what tells it which it is.
    """
    read = [Unit(0, 0, None, None, 0, READ)] if task.arithmetic.readings else []
    first = len(read)
    units = [Unit(first + at, first, None, None, macs, part) for at, (macs, part) in enumerate(sums)]
    last = Unit(first + len(units), first + 1, None, None, 0, JUDGE)
    return Plan(task, kernel, (*read, *units, last), first + 2, scratch, ())


def verification_macs(dtype: str, macs: int) -> int:
    """Return the multiply-adds of a verification: sums, of f64 as long as ten of float64, and those of squares."""
    return (11 if dtype == "f64" else 2) * macs


def verification_scratch(problem: ConvProblem, arithmetic: Arithmetic = PLAIN) -> int:
    """Return the bytes of scratch of a verification."""
    return 8 * max(1, _arrays(problem) * prod(problem.output_shape)) + read_bytes(problem, arithmetic)


def _arrays(problem: ConvProblem) -> int:
    return 3 if problem.dtype == "f64" else 2


def copied_bytes(problem: ConvProblem, workers: int) -> int:
    """Return the bytes that a verification copies as float64: one image of each tensor for each unit, 12 a value."""
    units = min(workers, len(REFERENCE.units(problem, workers)[0]))
    whole = [problem.forward and place > 0 for place in range(len(problem.input_shapes))]
    sizes = [prod(shape[0 if all_of_it else 1 :]) for shape, all_of_it in zip(problem.input_shapes, whole, strict=True)]
    return 12 * units * sum(sizes)


def read_report(output: bytes | memoryview) -> dict[str, Any]:
    """Return the report in a verification's output."""
    length = int.from_bytes(output[:8], "little")
    found: dict[str, Any] = json.loads(bytes(output[8 : 8 + length]))
    return found


class VerifyKernel:
    """Computes the units of `plan_verification`."""

    name = "verify"

    def run(
        self, verification: Verification, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> bool:  # fmt: skip
        """Compute the exact sums of one box, or the report."""
        try:
            self._run(verification, unit, inputs, output, scratch, raising(stop))
        except Stopped:
            return False
        return True

    def _run(
        self, verification: Verification, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> None:  # fmt: skip
        stop()
        assert scratch is not None
        problem, given = verification.problem, inputs[: len(verification.problem.input_shapes)]
        result = verification.result_of(inputs)
        shape = (_arrays(problem), *problem.output_shape)
        room = Inputs(problem, verification.arithmetic, given, scratch[8 * max(1, prod(shape)) :])
        exact, spread, *low = scratch[: 8 * prod(shape)].view(np.float64).reshape(shape)
        if unit.part == READ:
            room.read(result, stop)
            return
        given = room.given
        if unit.part != JUDGE:
            summed = REFERENCE.units(problem, unit.part[0])[0][unit.part[1]]
            if exact.size:
                sums = unit_sums(problem, summed, given, stop)
                for array, values in zip((exact, spread, *low), (sums.high, sums.spread, sums.low), strict=False):
                    box(array, summed)[...] = values
            return
        compared = Compared(
            problem, given, result, exact, low[0] if low else None, spread, verification.explain,
            arithmetic=verification.arithmetic,
        )  # fmt: skip
        self._report(verification, compared, room, output, stop)

    def _report(
        self, verification: Verification, compared: Compared, room: Inputs, output: Storage, stop: Stop
    ) -> None:
        """Write what the sums are for."""
        write_output(as_json(room.described(report_on(compared, stop), compared.result, stop)), output)


def write_output(text: bytes, output: Storage) -> None:
    """Write a report, which `read_report` reads, to the output of a verification."""
    data = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    assert data.size <= output.size
    output[: data.size] = data


VERIFY = VerifyKernel()
register(VERIFY)
