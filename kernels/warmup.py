"""Compile, or load from the cache, everything that a call may need, before the first call."""

from __future__ import annotations

from collections.abc import Iterator

import kernels.registry  # noqa: F401 -- importing the kernels registers their compiled functions
from kernels.emit.compiler import LAZY

__all__ = ["warmup"]


def warmup() -> Iterator[tuple[int, int]]:
    """Make every compiled specialisation ready in this process and yield (done, total) as it goes."""
    for done, prepare in enumerate(LAZY):
        yield done, len(LAZY)
        prepare()
    yield len(LAZY), len(LAZY)
