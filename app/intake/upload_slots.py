"""Receive only a few large bodies at a time, so that memory is allocated no faster than calls get places in the queue.

The others wait in their sockets. Without slots all bodies that arrive together would be received together, and most of
them only to be rejected, because the queue is full by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from convgrad._errors import Overloaded

__all__ = ["LARGE", "UploadSlot"]

LARGE = 1 << 20
"""Bytes from which a tensor waits for a slot of its request."""

# A slot is released early when less than this has arrived since the last check: slow clients don't block the others.
_LOOK_S, _LEAST_BYTES = 0.25, 1 << 18
_LOOKS = 8
# Clients give up when they can't send for some time, httpx by default after 5 s.
_LONGEST_WAIT_S = 4.0


class UploadSlot:
    """The slot of one request, first come, first served; as many are `free` as the semaphore counts.

    `check` is called when the slot is acquired, and raises if the request must be rejected; `received` returns the
    bytes of its body that have arrived.
    """

    def __init__(self, free: asyncio.Semaphore, check: Callable[[], object], received: Callable[[], int]) -> None:
        self._free, self._check, self._received = free, check, received
        self._acquired = False
        self._acquiring = asyncio.Lock()  # the items of a batch share a slot
        self._timer: asyncio.TimerHandle | None = None

    async def acquire(self) -> None:
        """Acquire the slot, once.

        Raises `Overloaded` if none becomes free within a few seconds, and what `check` raises.
        """
        async with self._acquiring:
            if self._acquired:
                return
            try:
                async with asyncio.timeout(_LONGEST_WAIT_S):
                    await self._free.acquire()
            except TimeoutError:
                raise Overloaded(
                    f"other large bodies are being received, and this one waited {_LONGEST_WAIT_S:g} s",
                    retry_after=1,
                    data={"reason": "queue"},
                ) from None
            self._check_later(_LOOKS)
            try:
                self._check()
            except BaseException:
                self.release()
                raise
            self._acquired = True

    def _check_later(self, looks: int) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_LOOK_S, self._check_speed, looks - 1, self._received() + _LEAST_BYTES)

    def _check_speed(self, looks: int, expected: int) -> None:
        if looks and self._received() >= expected:
            self._check_later(looks)
        else:
            self.release()

    def release(self) -> None:
        """Let the next request have it; calling it again does nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._free.release()
