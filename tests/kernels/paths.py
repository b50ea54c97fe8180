"""The code paths that this machine can run or imitate, besides its own: settings that choose each in a new process.

The path is chosen when the kernels are imported, so each one needs its own process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from kernels.target import IMITATE, NAME, Target, host_target, narrower, target

__all__ = ["INNER", "imitated_paths", "inside", "narrower_paths", "some"]

INNER = "CONVGRAD_TEST_INNER"
"""Set in the processes that test another path."""


def inside() -> bool:
    """Return whether this process tests another path than the machine's own."""
    return INNER in os.environ


def some(count: int) -> int:
    """Return a number of random problems: a third of it in the processes that test another path."""
    return -(-count // 3) if inside() else count


def _settings(**settings: str) -> dict[str, str]:
    return {**settings, INNER: "1"}


def narrower_paths() -> dict[str, dict[str, str]]:
    """Return the settings of each path narrower than this process's own, by name.

    The compiler is restricted to the narrower target as well, so it can't emit instructions that the target lacks.
    """
    if inside() or target().imitated:
        return {}
    return {step.name: _settings(**{NAME: step.name}) for step in _steps()}


def _steps() -> Iterator[Target]:
    step = narrower(target())
    while step.compiles:
        yield step
        step = narrower(step)


def imitated_paths() -> dict[str, dict[str, str]]:
    """Return the settings of the paths whose instructions this processor lacks and can imitate."""
    if inside() or target().arch != "x86_64":
        return {}
    lacking = [name for name in ("avx512bf16", "amx-bf16") if name not in host_target().features]
    return {name: _settings(**{IMITATE: name}) for name in lacking}
