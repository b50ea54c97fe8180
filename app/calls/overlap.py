"""Compute while the body arrives: a call begins as soon as the first unit of its plan has its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from app.calls.planning import complete_images
from convgrad._errors import Overloaded, RateLimited

if TYPE_CHECKING:
    from app.calls.call import Call, Prepared
    from app.calls.service import Service
    from app.intake.sinks import Lease
    from app.pool.buffers import Segment
    from app.telemetry.timings import Timings

__all__ = ["OverlappedCall"]


class OverlappedCall:
    """Begin the call of one request while its tensors arrive; use ``async with`` around the whole request.

    Leaving the block stops a call that was begun and never entered.
    """

    def __init__(self, service: Service, lease: Lease, timings: Timings) -> None:
        self._service = service
        self._lease = lease
        self._timings = timings
        self._call: Call | None = None
        self._wanted = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._call is not None:
            await self._call.abandon()

    async def advance(self, prepared: Prepared, tensors: Mapping[str, Segment], received: Mapping[str, int]) -> None:
        """Begin or advance the call; `received` counts the bytes of each input, by canonical name, in `tensors`."""
        images = complete_images(prepared.op, received) if self._wanted else 0
        first = prepared.plan.units[0].images
        if self._call is not None:
            self._call.advance(images)
        elif first is not None and first <= images < prepared.op.n:
            call = self._service.call(prepared, tensors, self._lease, timings=self._timings)
            try:
                await call.begin(images)
            except (Overloaded, RateLimited):
                self._wanted = False  # the complete call may find room later
            else:
                self._call = call

    async def complete(self, prepared: Prepared, tensors: Mapping[str, Segment]) -> Call:
        """Return the call once all tensors have arrived and passed the checks: the one begun, if it is the same."""
        if self._call is not None and self._call.prepared.op == prepared.op:
            return self._call
        if self._call is not None:
            await self._call.abandon()
            self._call = None
        return self._service.call(prepared, tensors, self._lease, timings=self._timings)
