"""Run a verification as the workers do."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels import Plan, run_unit
from tests.kernels.harness import problem_of, stored
from tests.problems import Case, Tensor
from verify.arithmetic import Arithmetic
from verify.unit import plan_verification, read_report

__all__ = ["memory_of", "verify"]


def memory_of(plan: Plan) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return output and scratch for a verification."""
    return np.zeros(plan.problem.output_shape, np.uint8), np.zeros(plan.scratch_bytes, np.uint8)


def verify(
    case: Case, inputs: dict[str, Tensor], result: Tensor, plan: Plan | None = None, said: Arithmetic | None = None
) -> dict[str, Any]:
    """Return the report on a result, by any plan, of a kernel that declares its arithmetic."""
    plan = plan or plan_verification(problem_of(case), arithmetic=said)
    output, scratch = memory_of(plan)
    tensors = [*map(stored, inputs.values()), stored(result)]
    for unit in plan.units:
        assert run_unit(plan, unit, tensors, output, scratch)
    return read_report(output.tobytes())
