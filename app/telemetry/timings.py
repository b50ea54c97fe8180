"""Where the time of a request went, by phase, for `Server-Timing`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

__all__ = ["PARTS", "Timings"]

PARTS = ("receive", "decode", "queue", "compute", "encode")


class _Measure:
    __slots__ = ("_part", "_start", "_timings")

    def __init__(self, timings: Timings, part: str) -> None:
        self._timings = timings
        self._part = part

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._timings.add(self._part, time.perf_counter() - self._start)


class Timings:
    """Add up seconds by part: `receive`, `decode`, `queue`, `compute`, `encode`."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, part: str, seconds: float) -> None:
        """Add to the time of a part."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def measure(self, part: str) -> _Measure:
        """Add the time of a ``with`` block to a part."""
        return _Measure(self, part)

    def each(self, part: str, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Yield `pieces`, adding the time it takes to produce each of them to a part."""
        source = iter(pieces)
        while True:
            with self.measure(part):
                piece = next(source, None)
            if piece is None:
                return
            yield piece

    def header(self) -> str:
        """Return the `Server-Timing` value: the known parts in milliseconds, in processing order."""
        return ", ".join(f"{part};dur={self.seconds[part] * 1000:.3f}" for part in PARTS if part in self.seconds)
