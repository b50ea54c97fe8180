"""Where the time of one request went: the parts of `Server-Timing`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["PARTS", "Timings"]

PARTS = ("receive", "decode", "queue", "compute", "encode")


class Timings:
    """Add up seconds by part: `receive`, `decode`, `queue`, `compute`, `encode`."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, part: str, seconds: float) -> None:
        """Add to a part."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time that the block takes to a part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, time.perf_counter() - start)

    def header(self) -> str:
        """Write the `Server-Timing` value: the known parts in milliseconds, in the order of the walk."""
        return ", ".join(f"{part};dur={self.seconds[part] * 1000:.3f}" for part in PARTS if part in self.seconds)
