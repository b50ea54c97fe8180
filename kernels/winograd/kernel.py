"""What both kernels by Winograd's algorithm have in common: when they are chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kernels.costs import COSTS
from kernels.problem import ConvProblem
from kernels.target import target
from kernels.winograd.rules import refusals

__all__ = ["WinogradKernel"]


class WinogradKernel(ABC):
    """One of the two kernels."""

    of: tuple[str, ...]
    """What it computes (`ConvProblem.op`)."""

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
