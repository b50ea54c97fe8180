"""Receive only a few large bodies at a time, so that memory is allocated no faster than calls get places in the queue.

The others wait in their sockets. Without turns all bodies that arrive together would be received together, and most of
them only to be rejected, because the queue is full by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from convgrad._errors import Overloaded

__all__ = ["LARGE", "Turn", "Turns"]

LARGE = 1 << 20
"""Bytes of a tensor for which its request waits for a turn."""

# A turn ends early when less than this has arrived since the last look: slow clients don't block the others.
_LOOK_S, _LEAST_BYTES = 0.25, 1 << 18
_LOOKS = 8
# Clients give up when they can't send for some time, httpx by default after 5 s.
_LONGEST_WAIT_S = 4.0


class Turns:
    """Give turns to at most `most` requests at a time, first come, first served."""

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)

    def turn(self, check: Callable[[], object], received: Callable[[], int]) -> Turn:
        """Return the turn of one request.

        `check` is called when the turn comes, and raises if the request must be rejected; `received` returns how many
        bytes of its body have arrived.
        """
        return Turn(self._free, check, received)


class Turn:
    """The turn of one request."""

    def __init__(self, free: asyncio.Semaphore, check: Callable[[], object], received: Callable[[], int]) -> None:
        self._free, self._check, self._received = free, check, received
        self._had = False
        self._beginning = asyncio.Lock()  # the items of a batch share a turn
        self._timer: asyncio.TimerHandle | None = None

    async def begin(self) -> None:
        """Wait for the turn, once.

        Raises `Overloaded` if it does not come within a few seconds, and what `check` raises.
        """
        async with self._beginning:
            if not self._had:
                await self._begin()

    async def _begin(self) -> None:
        try:
            async with asyncio.timeout(_LONGEST_WAIT_S):
                await self._free.acquire()
        except TimeoutError:
            raise Overloaded(
                f"other large bodies are being received, and this one waited {_LONGEST_WAIT_S:g} s",
                retry_after=1,
                data={"reason": "queue"},
            ) from None
        self._look_later(_LOOKS)
        try:
            self._check()
        except BaseException:
            self.end()
            raise
        self._had = True

    def _look_later(self, looks: int) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_LOOK_S, self._look, looks - 1, self._received() + _LEAST_BYTES)

    def _look(self, looks: int, expected: int) -> None:
        if looks and self._received() >= expected:
            self._look_later(looks)
        else:
            self.end()

    def end(self) -> None:
        """Let the next request begin; calling it again does nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._free.release()
