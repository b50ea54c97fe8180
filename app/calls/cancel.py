"""Cancelling calls by request id.

The request to cancel has the id, and the same tenant (`RequestContext.tenant`) and session as the request that cancels
it, which arrives on any connection. Callers choose ids themselves, so an id that several running requests share cancels
none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.calls.work import Work

__all__ = ["Cancellations", "Running"]

Name = tuple[str, str, Any]


class Running:
    """A request's work; exists before the work does, so that it can always be cancelled."""

    def __init__(self) -> None:
        self.cancelled = False
        self._work: Work | None = None

    def add(self, work: Work) -> None:
        """Let `cancel` stop this work; at once if the request is cancelled already."""
        self._work = work
        if self.cancelled:
            work.cancel()

    def cancel(self) -> None:
        """Stop the work, or refuse to start it."""
        self.cancelled = True
        if self._work is not None:
            self._work.cancel()


class Cancellations:
    """The running requests by tenant, session and id."""

    def __init__(self) -> None:
        self._running: dict[Name, list[Running]] = {}

    @contextmanager
    def register(self, tenant: str, session: str, request_id: Any) -> Iterator[Running]:
        """Make what the block runs cancellable, unless its request has no id."""
        running = Running()
        if request_id is None:
            yield running
            return
        same = self._running.setdefault((tenant, session, request_id), [])
        same.append(running)
        try:
            yield running
        finally:
            same.remove(running)
            if not same:
                del self._running[tenant, session, request_id]

    def cancel(self, tenant: str, session: str, request_id: Any) -> None:
        """Cancel a request; nothing happens if none has the id, or several."""
        same = self._running.get((tenant, session, request_id), [])
        if len(same) == 1:
            same[0].cancel()
