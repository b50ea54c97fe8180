"""The moment when a client leaves: what it asked for stops."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from convgrad._errors import Cancelled

__all__ = ["cancel_on_disconnect"]


class cancel_on_disconnect:  # noqa: N801 - reads as a block: async with cancel_on_disconnect(receive)
    """Cancel the block when the client leaves and raise `Cancelled` from it; the body was read before."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._watch())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        if self._gone:
            self._task.uncancel()
            if kind is not None and issubclass(kind, asyncio.CancelledError):
                raise Cancelled("the client left before its reply was complete") from error

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()
