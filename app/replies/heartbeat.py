"""A sign of life on a quiet stream, so that nobody in between takes it for dead."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

__all__ = ["INTERVAL_S", "Heartbeat"]

INTERVAL_S = 15.0


class Heartbeat:
    """Call `beat` whenever nothing was written for `interval` seconds, never in the middle of a `write`."""

    def __init__(self, beat: Callable[[], Awaitable[None]], interval: float = INTERVAL_S) -> None:
        self._beat = beat
        self._interval = interval
        self._last = 0.0
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to beat."""
        self._last = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Beat no more."""
        # A beat is one send, which writes all or, while it waits for a slow reader, nothing.
        if self._task is not None:
            self._task.cancel()

    async def write(self, pieces: Callable[[], Awaitable[None]]) -> None:
        """Write something that belongs together."""
        async with self._lock:
            await pieces()
            self._last = asyncio.get_running_loop().time()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._last + self._interval - loop.time())
            if loop.time() >= self._last + self._interval:
                # Waits for a write that is under way; after that one the line was not quiet.
                await self.write(self._beat_if_quiet)

    async def _beat_if_quiet(self) -> None:
        if asyncio.get_running_loop().time() >= self._last + self._interval:
            await self._beat()
