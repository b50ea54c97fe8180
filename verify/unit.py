"""The units of a verification: first the reference and its error bounds, box by box; then one unit writes the report.

The scratch has two float64 for each element of the result, the exact value and the bound of its error, then for each
unit of the first stage the largest sum of magnitudes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.plan import Plan, Stop, Storage, Unit, box
from kernels.problem import ConvProblem
from kernels.reference import REFERENCE
from kernels.registry import register
from verify.report import Compared, sum_bound, write_report

__all__ = ["VERIFY", "Verification", "plan_verification", "read_report", "verification_scratch"]

REPORT_BYTES = 1 << 20
"""A report takes some tens of kilobytes; the first 8 bytes are its length."""


@dataclass(frozen=True)
class Verification:
    """The verification of a problem's result, which follows the problem's own inputs; the output is a report."""

    problem: ConvProblem

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
        """Multiply-adds: of the reference, and of the sums of magnitudes."""
        return 2 * self.problem.macs

    @property
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the inputs and of the result to verify."""
        return *self.problem.input_shapes, self.problem.output_shape

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the report."""
        return (REPORT_BYTES,)

    @property
    def output_dtype(self) -> np.dtype[Any]:
        """Dtype of the report: bytes."""
        return np.dtype(np.uint8)


def plan_verification(problem: ConvProblem, *, workers: int = 1) -> Plan:
    """Plan the verification of a problem's result."""
    first, _ = REFERENCE.units(problem, workers)
    units = [Unit(unit.index, 0, None, None, 2 * unit.macs, (0, unit.index)) for unit in first]
    last = Unit(len(units), 1, None, None, 0, (1, 0))
    scratch = verification_scratch(problem, len(units))
    return Plan(Verification(problem), VERIFY.name, (*units, last), 2, scratch, ())


def verification_scratch(problem: ConvProblem, units: int) -> int:
    """Return the bytes of scratch of a verification whose first stage has so many units."""
    return 8 * (2 * prod(problem.output_shape) + units)


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
        """Compute reference and bounds of one box, or the report."""
        if stop():
            return False
        assert scratch is not None
        problem, (*given, result) = verification.problem, inputs
        size = prod(problem.output_shape)
        floats: npt.NDArray[np.float64] = scratch.view(np.float64)
        exact, bound = (floats[at : at + size].reshape(problem.output_shape) for at in (0, size))
        stage, index = unit.part
        if stage == 0:
            return _reference(problem, index, given, exact, bound, floats[2 * size :], stop)
        peak = floats[2 * size :].max(initial=0.0)
        compared = Compared(problem, given, result, exact, bound, float(peak))
        text = write_report(compared, stop)
        if text is None:
            return False
        data = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
        assert data.size <= output.size
        output[: data.size] = data
        return True


def _reference(
    problem: ConvProblem, index: int, inputs: Sequence[Storage], exact: npt.NDArray[np.float64],
    bound: npt.NDArray[np.float64], peaks: npt.NDArray[np.float64], stop: Stop,
) -> bool:  # fmt: skip
    """Compute the exact values and the bounds of one unit of the reference kernel; False when `stop` said so."""
    unit = REFERENCE.units(problem, 1)[0][index]
    peaks[index] = 0.0
    if exact.size == 0:
        return True
    values = REFERENCE.values(problem, unit, inputs, stop)
    if values is None:
        return False
    box(exact, unit)[...] = values
    del values
    sums = REFERENCE.values(problem, unit, inputs, stop, absolute=True)
    if sums is None:
        return False
    peaks[index] = sums.max(initial=0.0)
    box(bound, unit)[...] = sum_bound(sums, REFERENCE.terms(problem, unit), problem.dtype)
    return True


VERIFY = VerifyKernel()
register(VERIFY)
