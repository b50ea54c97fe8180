"""Cancelling calls by request id: `notifications/cancelled` of the JSON-RPC API.

The notification arrives in a request of its own, on any connection. It cancels the call with its `requestId` that has
the same key and session; the session is the header `X-Session-ID` (or `Mcp-Session-Id`) or its absence. Callers choose
ids themselves, so an id that several running calls share cancels none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.calls.call import Call

__all__ = ["NOTIFICATION", "Cancellations", "session_of"]

NOTIFICATION = "notifications/cancelled"

_HEADERS = ("x-session-id", "mcp-session-id")
_LONGEST = 128

Name = tuple[str, str, Any]


def session_of(headers: Mapping[str, str]) -> str:
    """Return the session that a request belongs to; empty if it names none."""
    return next((headers[name][:_LONGEST] for name in _HEADERS if name in headers), "")


class Cancellations:
    """The running calls by key, session and id."""

    def __init__(self) -> None:
        self._calls: dict[Name, list[Call]] = {}

    @contextmanager
    def register(self, key: str, session: str, request_id: Any, call: Call) -> Iterator[None]:
        """Make a call cancellable while the block runs, unless it has no id."""
        if request_id is None:
            yield
            return
        calls = self._calls.setdefault((key, session, request_id), [])
        calls.append(call)
        try:
            yield
        finally:
            calls.remove(call)
            if not calls:
                del self._calls[key, session, request_id]

    def cancel(self, key: str, session: str, params: Any) -> None:
        """Handle a notification; nothing happens if it matches no call or several."""
        request_id = params.get("requestId") if isinstance(params, Mapping) else None
        if isinstance(request_id, str | int | float):
            calls = self._calls.get((key, session, request_id), [])
            if len(calls) == 1:
                calls[0].cancel()
