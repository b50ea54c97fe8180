"""The memory of a request: allocated for it, returned in any case.

`Lease` owns what a request has allocated. A call takes its tensors over with `hand_over`; leaving the lease returns the
rest to the pool, after errors and disconnects too.
"""

from __future__ import annotations

from typing import Protocol, Self

from app.intake.upload_slots import LARGE, UploadSlot
from app.pool.buffers import Segment, SegmentPool
from app.telemetry.context import RequestContext

__all__ = ["DirectBody", "Lease"]

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
        slot: UploadSlot | None = None,
    ) -> None:
        self.context = context
        self._pool = pool
        self._slot = slot
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
        if nbytes >= LARGE and self._slot is not None:
            await self._slot.acquire()
        segment = await self._pool.acquire_async(max(nbytes, 1), self.context.owner)
        self._held[id(segment)] = segment
        return segment

    def on_heap(self, nbytes: int) -> bool:
        """Whether a small tensor may stay on the heap; then its bytes are subtracted from what others may have."""
        self._heap -= nbytes if (fits := nbytes <= self._heap) else 0
        return fits

    async def count(self, nbytes: int) -> None:
        """Count memory that is no segment until the lease ends; waits and raises as `acquire` does."""
        if nbytes >= LARGE and self._slot is not None:
            await self._slot.acquire()
        self._pool.count(nbytes)
        self._counted.append(nbytes)

    def share(self, segment: Segment) -> Segment:
        """Own another lease of a segment's memory; return it."""
        shared = segment.share()
        self._held[id(shared)] = shared
        return shared

    def received(self) -> None:
        """Release the upload slot: the body has arrived, and nothing that is allocated from now on waits for one."""
        if self._slot is not None:
            self._slot.release()
            self._slot = None

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
