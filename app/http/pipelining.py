"""Pipelined requests: at most 32 wait for the one before them, and the rest of what the client sent is not parsed yet.

uvicorn parses all that one read brings, up to 256 KiB, and creates objects of some 2 KiB for each request in it before
any of them has shown a key. And it tells only the last of them that the client has disconnected.
"""

from __future__ import annotations

import re
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from app.http.heads import HeadLimitProtocol

__all__ = ["MAX_WAITING", "PipeliningProtocol"]

MAX_WAITING = 32
"""Requests of a connection that may wait for the one before."""

# Every head ends with one; in a body it only cuts what is parsed at a time.
_EMPTY_LINE = re.compile(rb"\n\r?\n")


class PipeliningProtocol(HeadLimitProtocol):
    """Parse no further while `MAX_WAITING` requests wait; answer all of them, in order."""

    _running: RequestResponseCycle | None = None
    _unparsed, _at = b"", 0
    _rejection: str | None = None
    """Why the request after the waiting ones is invalid, if it is."""

    def connection_made(self, transport: Any) -> None:
        """Prepare for requests."""
        super().connection_made(transport)
        self.flow = _Flow(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of the connection that its client has disconnected."""
        self._unparsed, self._at = b"", 0
        for cycle in (self._running, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        self._running = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the next bytes, or store them while too many requests wait; ignore bytes after an invalid request."""
        if self._rejection is not None:
            return
        self._unparsed, self._at = (self._unparsed[self._at :] + data if self._unparsed else data), 0
        self._parse()

    def on_response_complete(self) -> None:
        """Start the request that waits next, and parse more."""
        self._running = None
        super().on_response_complete()
        if self._unparsed:
            self._parse()
        elif self._rejection is not None and self._running is None and not self.transport.is_closing():
            super().send_400_response(self._rejection)

    def send_400_response(self, msg: str) -> None:
        """Reject an invalid request once those before it are answered, and close the connection.

        uvicorn would write its reply at once: as that to an earlier request, or into the middle of one.
        """
        if self.pipeline and self.cycle.more_body:  # the invalid one waits itself, and its body never ends
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self._running  # type: ignore[assignment] # one runs
        elif self._running is None or (self.cycle is self._running and self.cycle.more_body):
            if self._running is not None and self._running.response_started:
                self.transport.close()
            else:
                super().send_400_response(msg)
            return
        self._rejection = msg

    def _parse(self) -> None:
        while self._at < len(self._unparsed) and (room := MAX_WAITING - len(self.pipeline)) > 0:
            start, self._at = self._at, _end_of_heads(self._unparsed, self._at, room)
            super().data_received(self._unparsed[start : self._at])
            if self.transport.is_closing() or self._rejection is not None:
                self._at = len(self._unparsed)
        if self._at == len(self._unparsed):
            self._unparsed = b""
        self.flow.hold(bool(self._unparsed))  # type: ignore[attr-defined] # of our own class

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)


class _Flow(FlowControl):
    """Keep reading paused while it is held: uvicorn resumes it whenever an application waits for a message."""

    _held = False

    def hold(self, held: bool) -> None:
        """Stop reading, or continue."""
        if held == self._held:
            return
        self._held = held
        if held:
            self.pause_reading()
        else:
            self.resume_reading()

    def resume_reading(self) -> None:
        """Continue reading, unless that is held."""
        if not self._held:
            super().resume_reading()


def _end_of_heads(data: bytes, start: int, most: int) -> int:
    """Return where `most` heads from `start` on may end, at the earliest, or the length of `data` if it has fewer."""
    first = data.find(b"\n", start)  # base64 has none, and this search takes a tenth of the time
    if first >= 0:
        for number, line in enumerate(_EMPTY_LINE.finditer(data, first), 1):
            if number == most:
                return line.end()
    return len(data)
