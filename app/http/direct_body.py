"""Large bodies without copies: the operating system writes the bytes to their destination, and Python only counts them.

uvicorn's protocol delivers a body as `bytes`, and each byte is copied four times on its way into a tensor. Once an
intake knows the destination of the next bytes (`DirectBody.place`), another protocol takes over the connection until
the body is complete.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["LARGE", "DirectReader"]

LARGE = 1 << 20
"""Smaller bodies arrive in a few pieces: there is nothing to gain."""

# Bytes of one read: larger reads are no faster. libuv would read from one socket up to 32 times before it serves
# others; reading pauses after eight: 1 MiB, half a millisecond.
_ROOM, _READS = 1 << 17, 8


class DirectReader(asyncio.BufferedProtocol):
    """Read the rest of one request's body, from the first `place` on; before that it only counts bytes.

    The body of a message is a `memoryview` when its bytes are at their destination already, and `bytes` otherwise.
    """

    def __init__(self, http: HttpToolsProtocol, length: int, done: Callable[[], None]) -> None:
        """Begin to count the body of the connection's latest request; `done` is called when a reader has all of it."""
        self._http = http
        self._cycle = http.cycle
        self._done = done
        self._left = length
        self._reading = False
        self._target = memoryview(b"")  # what is left of it
        self._came: deque[bytes | memoryview] = deque()  # received, but not in a message yet
        self._room = bytearray()
        self._reads = 0

    def passed(self, count: int) -> None:
        """Count bytes that the HTTP protocol has received."""
        self._left -= count

    def place(self, target: memoryview) -> None:
        """Read the bytes that follow those of the last message into `target`, which follows one that is full."""
        if not self._left or self._http.transport.is_closing():
            return
        self._target = target
        if self._reading:
            early = b"".join(self._came)
            self._came.clear()
        else:
            self._reading = True
            early = bytes(self._cycle.body)
            self._cycle.body.clear()
            self._http.transport.set_protocol(self)
        # Copy bytes that arrived before their destination was known.
        count = min(len(target), len(early))
        target[:count] = early[:count]
        self._fill(count)
        if len(early) > count:
            self._came.append(early[count:])
        self._http.flow.resume_reading()

    def forget(self) -> None:
        """Drop the target: the rest of the body is not wanted."""
        self._came = deque([b""] if self._came else [])
        self._target = memoryview(b"")

    # Called by the transport.

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Return the memory for the next bytes, never beyond the end of the body."""
        if self._target:
            return self._target[: min(_ROOM, self._left)]
        self._room = self._room or bytearray(_ROOM)
        return memoryview(self._room)[: self._left]

    def buffer_updated(self, nbytes: int) -> None:
        """Handle bytes that were received."""
        self._left -= nbytes
        if self._target:
            self._fill(nbytes)
            self._reads += 1
            if self._left and self._reads % _READS == 0:
                self._http.flow.pause_reading()  # until `receive` is called, after the others' turn
        else:
            self._came.append(bytes(self._room[:nbytes]))
            self._http.flow.pause_reading()
        self._cycle.message_event.set()
        if not self._left:
            self._done()
        elif self._cycle.response_complete:  # the rest of a rejected body is not read after the reply
            self._http.transport.close()

    def eof_received(self) -> None:
        """Let the transport close."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the memory."""
        self.forget()
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        """Forward to the HTTP protocol."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Forward to the HTTP protocol."""
        self._http.resume_writing()

    async def receive(self) -> Message:
        """Return the next message of the request."""
        cycle = self._cycle
        while self._reading and not (self._came or cycle.disconnected or cycle.response_complete):
            self._http.flow.resume_reading()
            await cycle.message_event.wait()
            cycle.message_event.clear()
        if not self._reading or cycle.disconnected or cycle.response_complete:
            return await cycle.receive()  # type: ignore[return-value] # the same messages, typed as dictionaries
        body = self._came.popleft()
        self._reading = bool(self._left or self._came)
        return {"type": "http.request", "body": body, "more_body": self._reading}

    def _fill(self, count: int) -> None:
        if count:
            self._came.append(self._target[:count])
            self._target = self._target[count:]
