"""The memory of a request: allocated for it, returned in any case.

`Lease` owns what a request has allocated. A call takes its tensors over with `hand_over`; leaving the lease returns the
rest to the pool, after errors and disconnects too.

Only a few large bodies are received at a time (`UploadSlot`), so that memory is allocated no faster than calls get
places in the queue; the others wait in their sockets. Otherwise all bodies that arrive together would be received
together, and most of them only to be rejected, because the queue is full by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, Self

from app.pool.buffers import Segment, SegmentPool
from app.telemetry.context import RequestContext
from convgrad._errors import Overloaded

__all__ = ["LARGE", "DirectBody", "Lease", "UploadSlot"]

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
        self._timer: asyncio.TimerHandle | None = None

    async def acquire(self) -> None:
        """Acquire the slot, once.

        Raises `Overloaded` if none becomes free within a few seconds, and what `check` raises.
        """
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


# The small tensors of a request stay on the heap up to this size together, which a call rarely exceeds.
_HEAP = 256 << 10


class DirectBody(Protocol):
    """Read the rest of a body from the socket straight into its destination."""

    def place(self, target: memoryview) -> None:
        """Read the next bytes of the body into this."""

    def forget(self) -> None:
        """Stop reading into it."""


class Lease:
    """Own the segments of one request until a call takes them over."""

    def __init__(
        self,
        pool: SegmentPool,
        context: RequestContext,
        direct_body: DirectBody | None = None,
        slot: Callable[[], UploadSlot] | None = None,
    ) -> None:
        """Own nothing yet; `slot` makes the upload slot, if one is needed."""
        self.context = context
        self._pool = pool
        self._make_slot = slot
        self._slot: UploadSlot | None = None
        self._direct_body = direct_body
        self._held: dict[int, Segment] = {}
        self._counted: list[int] = []
        self._heap = _HEAP

    def __enter__(self) -> Self:
        return self

    async def acquire(self, nbytes: int) -> Segment:
        """Allocate a segment without blocking the event loop; for a large one, wait for an upload slot.

        Raises what `SegmentPool.acquire` raises, and what rejects the request once it has a slot.
        """
        await self._wait_for_slot(nbytes)
        segment = await self._pool.acquire_async(max(nbytes, 1), self.context.owner)
        self._held[id(segment)] = segment
        return segment

    async def _wait_for_slot(self, nbytes: int) -> None:
        if nbytes >= LARGE and self._make_slot is not None:
            self._slot = self._slot or self._make_slot()
            await self._slot.acquire()

    def on_heap(self, nbytes: int) -> bool:
        """Whether a small tensor may stay on the heap; then its bytes are subtracted from what others may have."""
        self._heap -= nbytes if (fits := nbytes <= self._heap) else 0
        return fits

    async def count(self, nbytes: int) -> None:
        """Count memory that is no segment until the lease ends; waits and raises as `acquire` does."""
        await self._wait_for_slot(nbytes)
        self._pool.count(nbytes)
        self._counted.append(nbytes)

    def share(self, segment: Segment) -> Segment:
        """Own another lease of a segment's memory; return it."""
        shared = segment.share()
        self._held[id(shared)] = shared
        return shared

    def received(self) -> None:
        """Release the upload slot: the body has arrived, and nothing that is allocated from now on waits for one."""
        self._make_slot = None
        if self._slot is not None:
            self._slot.release()

    def release(self, segment: Segment) -> None:
        """Return one segment early."""
        if self._held.pop(id(segment), None) is not None:
            segment.release()

    def hand_over(self, segment: Segment) -> Segment:
        """Pass ownership of the segment to a call, which then releases it."""
        del self._held[id(segment)]
        return segment

    def place(self, target: memoryview) -> None:
        """Read the next bytes of the body straight into `target` where possible; these arrive as `memoryview`."""
        if self._direct_body is not None:
            self._direct_body.place(target)

    def __exit__(self, *_: object) -> None:
        """Return the segments that no call took over."""
        self.received()
        if self._direct_body is not None:
            self._direct_body.forget()
        while self._held:
            self._held.popitem()[1].release()
        self.forget()

    def forget(self) -> None:
        """Stop counting memory outside segments: it has been freed."""
        while self._counted:
            self._pool.count(-self._counted.pop())
