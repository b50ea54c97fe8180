"""Stop the work of a request when its client disconnects."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from convgrad._errors import Cancelled

__all__ = ["cancel_on_disconnect"]

# Most small calls are over before watching for a disconnect is worth it.
_UNWATCHED_S = 0.002


class cancel_on_disconnect:  # noqa: N801 - reads as a block: async with cancel_on_disconnect(receive)
    """Cancel the block when the client disconnects, and raise `Cancelled`; use it after the body was read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._start = asyncio.get_running_loop().call_later(_UNWATCHED_S, self._begin)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._start.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._gone:
            self._task.uncancel()
            if kind is not None and issubclass(kind, asyncio.CancelledError):
                raise Cancelled("the client disconnected before its reply was complete") from error

    def _begin(self) -> None:
        self._watcher = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()
