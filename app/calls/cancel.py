"""Cancelling calls by request id: `notifications/cancelled` of the JSON-RPC API.

The notification arrives in a request of its own, on any connection. It cancels the request with its `requestId` that
has the same key and session; the session is the header `X-Session-ID` (or `Mcp-Session-Id`) or its absence. Callers
choose ids themselves, so an id that several running requests share cancels none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.calls.call import Call, OnProgress

__all__ = ["NOTIFICATION", "Cancellations", "Running", "session_of"]

NOTIFICATION = "notifications/cancelled"

_HEADERS = ("x-session-id", "mcp-session-id")
_LONGEST = 128

Name = tuple[str, str, Any]


def session_of(headers: Mapping[str, str]) -> str:
    """Return the session that a request belongs to; empty if it names none."""
    return next((headers[name][:_LONGEST] for name in _HEADERS if name in headers), "")


class Running:
    """What a request computes: one call, or those of a graph's nodes one after the other.

    `on_progress`, if set, gets the units that `finish` has computed.
    """

    def __init__(self, on_progress: OnProgress | None = None) -> None:
        self.on_progress = on_progress
        self.cancelled = False
        self._call: Call | None = None

    @contextmanager
    def call(self, call: Call) -> Iterator[None]:
        """Let `cancel` stop a call while the block runs; at once if the request is cancelled already."""
        self._call = call
        if self.cancelled:
            call.cancel()
        try:
            yield
        finally:
            self._call = None

    async def finish(self, call: Call, before: int = 0, total: int | None = None) -> None:
        """Run a call to its end, unless it is cancelled; `before` units of a `total` were computed by others."""
        report = self.on_progress

        async def add(done: int, own: int) -> None:
            assert report is not None
            await report(before + done, total or own)

        with self.call(call):
            await call.finish(None if report is None else add)

    def cancel(self) -> None:
        """Stop the call that runs, and those that follow."""
        self.cancelled = True
        if self._call is not None:
            self._call.cancel()


class Cancellations:
    """The running requests by key, session and id."""

    def __init__(self) -> None:
        self._running: dict[Name, list[Running]] = {}

    @contextmanager
    def register(self, key: str, session: str, request_id: Any) -> Iterator[Running]:
        """Make what the block runs cancellable, unless its request has no id."""
        running = Running()
        if request_id is None:
            yield running
            return
        same = self._running.setdefault((key, session, request_id), [])
        same.append(running)
        try:
            yield running
        finally:
            same.remove(running)
            if not same:
                del self._running[key, session, request_id]

    def cancel(self, key: str, session: str, params: Any) -> None:
        """Handle a notification; nothing happens if it matches no request or several."""
        request_id = params.get("requestId") if isinstance(params, Mapping) else None
        if isinstance(request_id, str | int | float):
            same = self._running.get((key, session, request_id), [])
            if len(same) == 1:
                same[0].cancel()
