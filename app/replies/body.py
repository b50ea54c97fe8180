"""Send replies: the head, a whole body, a body in pieces, or one that is sent while it is made (`Stream`)."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from starlette.types import Send

from app.threads import in_thread_if
from convgrad._errors import Cancelled
from convgrad._frames import Bytes

__all__ = ["SMALL", "Stream", "json_bytes", "send_body", "send_data", "send_head", "send_piece", "slices"]

SMALL = 64 << 10
"""A reply up to this size is sent in one piece: copying its parts is cheaper than another write to the socket."""

# Numbers of this length may have taken a millisecond to format; writing 32 KiB to a socket takes some 10 us.
_GIVES_WAY = 4 << 10
# Short pieces that are sent in a millisecond.
_AT_ONCE = 16
# The fastest level: tensors hardly shrink at any. Compressing this much takes a millisecond; more is done in a thread.
_LEVEL, _INLINE = 1, 32 << 10
_WBITS = {"gzip": 31, "deflate": 15}
# Bytes written to the socket at a time. While its client does not read, a reply holds two such pieces of text.
_SLICE = 256 << 10
_JSON = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def json_bytes(value: Any) -> bytes:
    """Encode a value as compact JSON."""
    return _JSON.encode(value).encode()


async def send_head(
    send: Send,
    media_type: str,
    *,
    status: int = 200,
    length: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Send status and headers; without `length` the body is chunked."""
    fields = {"content-type": media_type, **(headers or {})}
    if length is not None:
        fields["content-length"] = str(length)
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def send_piece(send: Send, piece: bytes | memoryview, *, last: bool = False) -> None:
    """Send a piece of the body; after a large one that is not the last, let other tasks run."""
    await send({"type": "http.response.body", "body": piece, "more_body": not last})
    if len(piece) > _GIVES_WAY and not last:
        await asyncio.sleep(0)  # `send` does not wait for a client that reads fast enough


async def send_data(send: Send, data: Bytes) -> None:
    """Send a part of the body of any size, in slices; more has to follow."""
    for piece in slices(data):
        await send_piece(send, piece)


def slices(data: Bytes, size: int = _SLICE) -> Iterator[memoryview]:
    """Cut data into pieces to write at a time."""
    view = memoryview(data)
    for start in range(0, len(view), size):
        yield view[start : start + size]


async def send_body(
    send: Send,
    pieces: Iterable[Bytes],
    media_type: str,
    length: int | None = None,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    coding: str | None = None,
) -> None:
    """Send a reply whose pieces have `length` bytes in all, chunked if that is not known.

    A small one is sent as a whole, another one in slices, between which other tasks run. It is compressed if there is a
    `coding`, large slices in a thread.
    """
    if coding is None and length is not None and length <= SMALL:
        body = b"".join(pieces)  # measured before the head, which has the timings
        await send_head(send, media_type, status=status, length=length, headers=headers)
        await send_piece(send, body, last=True)
        return
    pack: Any = None if coding is None else zlib.compressobj(_LEVEL, zlib.DEFLATED, _WBITS[coding])
    if coding is not None:
        length, headers = None, {**(headers or {}), "content-encoding": coding, "vary": "accept-encoding"}
    await send_head(send, media_type, status=status, length=length, headers=headers)
    for number, part in enumerate(part for piece in pieces for part in slices(piece)):
        sent = part if pack is None else await in_thread_if(len(part) > _INLINE, pack.compress, part)
        if sent:
            await send_piece(send, sent)
        if (number + 1) % _AT_ONCE == 0 or len(part) > _GIVES_WAY > len(sent):
            await asyncio.sleep(0)
    await send_piece(send, b"" if pack is None else pack.flush(), last=True)


_INTERVAL_S = 15.0


class Stream:
    """Send a reply in pieces while it is made; use with ``async with``.

    The head is sent with the first piece, so that an earlier error can still have its own status. `beat` is sent when
    nothing was for `interval` seconds, never in the middle of a `write`: it keeps proxies from closing
    the connection.
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
