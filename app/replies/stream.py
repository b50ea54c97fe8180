"""Replies that are sent while they are made. Beats keep proxies from closing a connection that is idle."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from starlette.types import Send

from app.replies.body import send_data, send_head, send_piece
from convgrad._errors import Cancelled
from convgrad._frames import Bytes

__all__ = ["Stream"]

_INTERVAL_S = 15.0


class Stream:
    """Send a reply in pieces; use with ``async with``.

    The head is sent with the first piece, so that an earlier error can still have its own status. `beat` is sent when
    nothing was for `interval` seconds, never in the middle of a `write`.
    """

    beat = b""

    def __init__(
        self, send: Send, media_type: str, headers: Mapping[str, str], *, interval: float = _INTERVAL_S
    ) -> None:
        self._send = send
        self._media_type = media_type
        self._headers = headers
        self._interval = interval
        self._last = 0.0
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.started = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self._writing.acquire()  # after a write that is running
        for task in self._tasks:
            task.cancel()
        if kind is None:
            await self._end()

    async def _end(self) -> None:
        await send_piece(self._send, b"", last=True)

    async def write(self, pieces: Iterable[Bytes]) -> None:
        """Send pieces of the reply."""
        async with self._writing:
            await self._write(pieces)

    async def _write(self, pieces: Iterable[Bytes]) -> None:
        if not self.started:
            self.started = True
            await send_head(self._send, self._media_type, headers=self._headers)
            self._start(self._beat_while_idle())
        for piece in pieces:
            await send_data(self._send, piece)
        self._last = asyncio.get_running_loop().time()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that ends with the stream."""
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._tasks.discard)

    async def _beat_while_idle(self) -> None:
        time = asyncio.get_running_loop().time
        with suppress(Cancelled):  # the client reads too slowly, which the next write finds too
            while True:
                await asyncio.sleep(self._last + self._interval - time())
                async with self._writing:
                    if time() >= self._last + self._interval:
                        await self._write([self.beat])
