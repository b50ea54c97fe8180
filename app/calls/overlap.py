"""Compute while a body arrives: a call begins as soon as the first unit of its plan has its inputs."""

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
    """Begin the call of one request while its tensors come; use with ``async with`` around all of the request.

    One that does not come to its end is stopped, whatever the reason.
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

    async def arrived(self, prepared: Prepared, tensors: Mapping[str, Segment], came: Mapping[str, int]) -> None:
        """Learn how many bytes of each input, by its canonical name, are in the segments of `tensors`."""
        images = complete_images(prepared.op, came) if self._wanted else 0
        first = prepared.plan.units[0].images
        if self._call is not None:
            self._call.arrived(images)
        elif first is not None and first <= images < prepared.op.n:
            call = self._service.call(prepared, tensors, self._lease, timings=self._timings)
            try:
                await call.begin(images)
            except (Overloaded, RateLimited):
                self._wanted = False  # when all is there it may find room, or be refused
            else:
                self._call = call

    async def settle(self, prepared: Prepared, tensors: Mapping[str, Segment]) -> Call:
        """Return the call, now that all is there and checked: the one that has begun, unless it was another."""
        if self._call is not None and self._call.prepared.op == prepared.op:
            return self._call
        if self._call is not None:
            await self._call.abandon()
            self._call = None
        return self._service.call(prepared, tensors, self._lease, timings=self._timings)
