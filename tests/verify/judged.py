"""Run a verification as the workers do."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels import run_unit
from tests.kernels.harness import problem_of, stored
from tests.problems import Case, Tensor
from verify.unit import plan_verification, read_report

__all__ = ["verify"]


def verify(case: Case, inputs: dict[str, Tensor], result: Tensor) -> dict[str, Any]:
    """Return the report on a result."""
    plan = plan_verification(problem_of(case))
    output, scratch = np.zeros(plan.problem.output_shape, np.uint8), np.zeros(plan.scratch_bytes, np.uint8)
    tensors = [*map(stored, inputs.values()), stored(result)]
    for unit in plan.units:
        assert run_unit(plan, unit, tensors, output, scratch)
    return read_report(output.tobytes())
