"""Remember how problems are laid out: many small ones, and few large ones, whose tables take tens of megabytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from math import prod
from typing import TypeVar

from kernels.problem import ConvProblem

__all__ = ["recent"]

_MANY, _FEW = 256, 2
# Tables for more positions or weights than this take megabytes, and those for a sixteenth as many channels or taps.
_LARGE = 1 << 22

T = TypeVar("T")


def recent(make: Callable[[ConvProblem], T]) -> Callable[[ConvProblem], T]:
    """Keep what `make` gave for the last problems: bounded memory, whatever problems callers name."""
    many, few = lru_cache(_MANY)(make), lru_cache(_FEW)(make)

    @wraps(make)
    def remembered(problem: ConvProblem) -> T:
        return (few if _size(problem) > _LARGE else many)(problem)

    return remembered


def _size(problem: ConvProblem) -> int:
    positions = problem.n * max(prod(problem.src_spatial), prod(problem.dst_spatial))
    taps, channels = prod(problem.kernel), max(problem.src_channels, problem.dst_channels) // problem.groups
    return max(positions, prod(problem.weights_shape), 16 * taps, 16 * channels)
