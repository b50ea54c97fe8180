"""The kernels in the order in which they are asked; the reference, which takes everything, comes last."""

from __future__ import annotations

from functools import cache

from kernels.bwd_weights import BWD_WEIGHTS
from kernels.conv_transpose import CONV_TRANSPOSE
from kernels.cpu import cpu
from kernels.plan import Kernel, plan
from kernels.problem import ConvProblem
from kernels.reference_kernel import REFERENCE

__all__ = ["by_name", "candidates", "explain"]

KERNELS: tuple[Kernel, ...] = (BWD_WEIGHTS, CONV_TRANSPOSE, REFERENCE)

if cpu().dots:  # compiled only where the processor can run it
    from kernels.bwd_dots import BWD_DOTS

    KERNELS = (BWD_DOTS, *KERNELS)

if cpu().dots == "amx":
    from kernels.fwd_dots import FWD_DOTS

    KERNELS = (FWD_DOTS, *KERNELS)


def candidates(reference: bool) -> tuple[Kernel, ...]:
    """Give the kernels to ask, in order."""
    return (REFERENCE,) if reference else KERNELS


@cache
def by_name(name: str) -> Kernel:
    """Find a kernel by its name."""
    return next(kernel for kernel in KERNELS if kernel.name == name)


def explain(problem: ConvProblem) -> str:
    """Say which kernel takes `problem` and why the ones before it refused."""
    chosen = plan(problem)
    return "\n".join([*chosen.refusals, f"{chosen.kernel}: taken, {len(chosen.units)} units"])
