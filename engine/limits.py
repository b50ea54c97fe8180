"""What a call may take: work and memory, and the workers that it is planned for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from engine.container import memory_bytes

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """The limits of calls, by default the memory of this process alone; sizes are in bytes."""

    workers: int
    """Workers of this machine, which verify."""
    remote_workers: int = 0
    """Workers of other machines: calls are cut into units for both."""
    work_limit: float = math.inf
    """Most multiply-adds of a call."""
    output_limit: float = math.inf
    """Largest outputs of a call, together."""
    memory_budget: int = field(default_factory=memory_bytes)
    """Largest tensors and scratch of a call, together."""
    full_verification: float = 1e13
    """Most multiply-adds of a verification by the reference; beyond it, projections verify by default."""
