"""The arithmetic: problems as plain integers in, units of work and exact bits out."""

from kernels.plan import Plan, Unit, box
from kernels.problem import ConvProblem, storage_dtype
from kernels.registry import compute, explain, plan, run_unit, warmup

__all__ = [
    "ConvProblem",
    "Plan",
    "Unit",
    "box",
    "compute",
    "explain",
    "plan",
    "run_unit",
    "storage_dtype",
    "warmup",
]
