"""Heartbeats on an idle stream, so that proxies keep the connection open."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from convgrad._errors import Cancelled

__all__ = ["INTERVAL_S", "Heartbeat"]

INTERVAL_S = 15.0


class Heartbeat:
    """Call `beat` when nothing was written for `interval` seconds, never in the middle of a `write`."""

    def __init__(self, beat: Callable[[], Awaitable[None]], interval: float = INTERVAL_S) -> None:
        self._beat = beat
        self._interval = interval
        self._last = 0.0
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the heartbeat."""
        self._last = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Stop the heartbeat."""
        # A beat is one send, so cancelling it never leaves half a message.
        if self._task is not None:
            self._task.cancel()

    async def write(self, pieces: Callable[[], Awaitable[None]]) -> None:
        """Run `pieces`, which writes, without a beat in between."""
        async with self._lock:
            await pieces()
            self._last = asyncio.get_running_loop().time()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(Cancelled):  # the client reads too slowly, which the next write finds too
            while True:
                await asyncio.sleep(self._last + self._interval - loop.time())
                if loop.time() >= self._last + self._interval:
                    # This waits for a running write, after which the stream is not idle any more.
                    await self.write(self._beat_if_quiet)

    async def _beat_if_quiet(self) -> None:
        if asyncio.get_running_loop().time() >= self._last + self._interval:
            await self._beat()
