"""Calls that can be cancelled by name: `notifications/cancelled` of the JSON-RPC API.

The notification comes in a request of its own, on any connection. It means the call with its `requestId` of the
same key and the same session; a session is what both requests say in `X-Session-ID` (or `Mcp-Session-Id`), or that
both say nothing. Ids are the callers' own, so a name that several running calls have means none of them.
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
    """Read the session that a request belongs to; empty where it names none."""
    return next((headers[name][:_LONGEST] for name in _HEADERS if name in headers), "")


class Cancellations:
    """Know the running calls by key, session and id."""

    def __init__(self) -> None:
        self._calls: dict[Name, list[Call]] = {}

    @contextmanager
    def named(self, key: str, session: str, request_id: Any, call: Call) -> Iterator[None]:
        """Let a call be cancelled while the block runs; one without an id can't be."""
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
        """Carry out a notification; one that means no call, or several, does nothing."""
        request_id = params.get("requestId") if isinstance(params, Mapping) else None
        if isinstance(request_id, str | int | float):
            calls = self._calls.get((key, session, request_id), [])
            if len(calls) == 1:
                calls[0].cancel()
