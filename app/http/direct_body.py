"""Large bodies without copies: the operating system writes the bytes to their destination, and Python only counts them.

uvicorn's protocol delivers a body as `bytes`, and each byte is copied four times on its way into a tensor. Once an
intake knows the destination of the next bytes (`DirectBody.place`), another protocol takes over the connection until
the body is complete.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

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
        self._targets: deque[memoryview] = deque()
        self._filled = 0  # bytes of the first target
        self._came: deque[tuple[bytes | memoryview, int, int]] = deque()  # received, but not in a message yet
        self._room = bytearray()
        self._reads = 0

    def passed(self, count: int) -> None:
        """Count bytes that the HTTP protocol has received."""
        self._left -= count

    def place(self, targets: Iterable[memoryview]) -> None:
        """Read the bytes that follow those of the last message into `targets`, in order."""
        wanted = [target for target in targets if target]
        if not wanted or not self._left or self._http.transport.is_closing():
            return
        self._targets.extend(wanted)
        if self._reading:
            early = [piece[start:stop] for piece, start, stop in self._came]
            self._came.clear()
        else:
            self._reading = True
            early = [memoryview(bytes(self._cycle.body))]
            self._cycle.body.clear()
            self._http.transport.set_protocol(self)
        for piece in early:
            self._copy(memoryview(piece))
        self._http.flow.resume_reading()

    def forget(self) -> None:
        """Drop all targets: the rest of the body is not wanted."""
        self._came = deque([(b"", 0, 0)] if self._came else [])
        self._targets.clear()
        self._filled = 0

    # Called by the transport.

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Return the memory for the next bytes, never beyond the end of the body."""
        if self._targets:
            return self._targets[0][self._filled : self._filled + min(_ROOM, self._left)]
        self._room = self._room or bytearray(_ROOM)
        return memoryview(self._room)[: self._left]

    def buffer_updated(self, nbytes: int) -> None:
        """Handle bytes that were received."""
        self._left -= nbytes
        if self._targets:
            self._fill(nbytes)
            self._reads += 1
            if self._left and self._reads % _READS == 0:
                self._http.flow.pause_reading()  # until `receive` is called, after the others' turn
        else:
            self._came.append((bytes(self._room[:nbytes]), 0, nbytes))
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
        piece, start, stop = self._came.popleft()
        self._reading = bool(self._left or self._came)
        return {"type": "http.request", "body": piece[start:stop], "more_body": self._reading}

    def _copy(self, data: memoryview) -> None:
        """Copy bytes that arrived before their destination was known."""
        while data and self._targets:
            room = self._targets[0][self._filled :]
            count = min(len(room), len(data))
            room[:count] = data[:count]
            self._fill(count)
            data = data[count:]
        if data:
            self._came.append((bytes(data), 0, len(data)))

    def _fill(self, count: int) -> None:
        target, start = self._targets[0], self._filled
        self._filled += count
        if self._came and self._came[-1][0] is target:
            start = self._came.pop()[1]
        self._came.append((target, start, self._filled))
        if self._filled == len(target):
            self._targets.popleft()
            self._filled = 0
