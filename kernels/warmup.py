"""Compile, or load from the cache, everything that a call may need, before the first call."""

from __future__ import annotations

from collections.abc import Iterator

import kernels.registry  # noqa: F401 -- importing the kernels registers their compiled functions
from kernels.emit.compiler import ENTRIES
from kernels.target import target

__all__ = ["warmup"]


def warmup() -> Iterator[tuple[int, int]]:
    """Make every compiled specialisation ready in this process and yield (done, total) as it goes."""
    entries = ENTRIES if target().compiles else []
    for done, entry in enumerate(entries):
        yield done, len(entries)
        entry.make()
    yield len(entries), len(entries)
