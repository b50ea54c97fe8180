"""What a call may take: work, output and memory, and the workers that it is planned for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from engine.container import memory_bytes

__all__ = ["Limits", "ProcessLimits"]


class Limits(Protocol):
    """The limits of a service (`app.settings.Settings`) or of this process; sizes are in bytes."""

    @property
    def work_limit(self) -> float:
        """Most multiply-adds of a call."""

    @property
    def output_limit(self) -> float:
        """Largest outputs of a call, together."""

    @property
    def memory_budget(self) -> int:
        """Largest tensors and scratch of a call, together."""

    @property
    def full_verification(self) -> float:
        """Most multiply-adds of a verification by the reference; beyond it, projections verify by default."""

    @property
    def planned_workers(self) -> int:
        """Workers for which calls are cut into units."""

    @property
    def worker_count(self) -> int:
        """Workers of this machine, which verify."""


@dataclass(frozen=True)
class ProcessLimits:
    """The limits of calls in this process: the machine's memory, and no others."""

    planned_workers: int
    work_limit: float = math.inf
    output_limit: float = math.inf
    full_verification: float = 1e13
    memory_budget: int = field(default_factory=memory_bytes)

    @property
    def worker_count(self) -> int:
        """The threads of a call."""
        return self.planned_workers
