"""What both kernels by Winograd's algorithm have in common: when they are chosen, and direct sums for the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from kernels.costs import COSTS
from kernels.plan import Kernel, Stop, Storage
from kernels.problem import ConvProblem
from kernels.target import target
from kernels.winograd.rules import refusals

__all__ = ["WinogradKernel"]


class WinogradKernel(ABC):
    """One of the two kernels; `direct` are those that take what it leaves, in order."""

    of: tuple[str, ...]
    """What it computes (`ConvProblem.op`)."""

    def __init__(self, direct: Sequence[Kernel]) -> None:
        self._direct = direct

    def refuse(self, problem: ConvProblem) -> str | None:
        """Take what the caller has chosen it for, if the rules allow it, or what it is faster for."""
        if problem.op not in self.of:
            return f"computes {' and '.join(self.of)} only"
        if problem.algorithm == "direct":
            return "algorithm is direct"
        if broken := refusals(problem):
            return "; ".join(map(str, broken))
        return self._slower(problem) if problem.algorithm == "auto" else None

    def _slower(self, problem: ConvProblem) -> str | None:
        """Return why direct sums are chosen; None where Winograd is faster."""
        if problem.dtype == "bf16" and target().dots:
            return "algorithm is auto; this processor multiplies bf16 at least about as fast as winograd"
        cycles, direct = self.cycles(problem)
        share = cycles / max(1.0, direct)
        if share < COSTS.winograd_share:
            return None
        return (
            f"algorithm is auto; winograd pays below {COSTS.winograd_share:.0%} of direct sums' cycles, and is"
            f" estimated at {share:.0%}"
        )

    @abstractmethod
    def cycles(self, problem: ConvProblem) -> tuple[float, float]:
        """Estimate the cycles of Winograd and of direct sums."""

    def taker(self, problem: ConvProblem) -> Kernel:
        """Return the kernel that sums `problem` directly."""
        return next(kernel for kernel in self._direct if kernel.refuse(problem) is None)

    def sum_whole(self, problem: ConvProblem, inputs: Sequence[Storage], output: Storage, stop: Stop) -> bool:
        """Compute all of `problem` directly; False when `stop` said so."""
        kernel = self.taker(problem)
        units, nbytes = kernel.units(problem, 1)
        scratch = np.empty(nbytes, np.uint8) if nbytes else None
        return all(kernel.run(problem, each, inputs, output, scratch, stop) for each in units)
