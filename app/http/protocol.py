"""The HTTP protocol of a connection: what uvicorn's leaves to the application, or does too slowly.

Heads: uvicorn limits neither their length nor their fields, keeps each field as a tuple of some 150 bytes, adds the
trailers of a chunked body to the fields of the head, and the parser joins the pieces of a long field with every read.

Pipelined requests: uvicorn parses all that one read brings, up to 256 KiB, and creates objects of some 2 KiB for each
request in it before any of them has shown a key. And it tells only the last of them that the client has disconnected.

Timeouts between requests, for the head of the next one and for reading the last reply: uvicorn would wait forever.
`Exchange` has those of a request. A slow client occupies no worker, but a connection and memory.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.http.direct_body import LARGE, DirectReader
from app.http.exchange import DIRECT_BODY, RELEASE, TRANSPORT, content_length
from app.http.upgrades import make_parser
from schemas.broken_rules import safe_key

__all__ = ["MAX_FIELDS", "MAX_HEAD", "MAX_VALUE", "MAX_WAITING", "HttpProtocol", "http_protocol"]

MAX_HEAD = 64 << 10
"""Bytes that the parser may take without an end of a head or a byte of a body."""
MAX_FIELDS = 128
"""Fields of a head."""
MAX_VALUE = 8 << 10
"""Bytes of the values of one field, also if it is repeated, and of the request target, as nginx and Apache have it.

Parsing them takes a microsecond or two for each byte, without a break.
"""
MAX_WAITING = 32
"""Requests of a connection that may wait for the one before."""

# Every head ends with one; in a body it only cuts what is parsed at a time.
_EMPTY_LINE = re.compile(rb"\n\r?\n")
# Checks per `slow_s` that the unsent bytes have become fewer.
_CHECKS = 8


class HttpProtocol(HttpToolsProtocol):
    """Reject long heads with 400, and so trailers and chunk extensions; ignore trailers, cookies and upgrades.

    Parses no further while `MAX_WAITING` requests wait, and answers all of them, in order. Gives requests with a large
    body a `DirectReader`. Closes connections that do not send a complete head, or do not read a complete reply, in
    time.
    """

    slow_s = 30.0
    slow_rate = 16 << 10
    direct_bodies: set[DirectReader]
    """Those of the server's connections that are being read."""
    once = False
    """Whether the connection closes after one request."""
    entered: Callable[[], object] | None = None
    """Called when the connection is registered with the server."""
    release_reservation: Callable[[], object] | None = None
    """See `RequestContext.release_reservation`."""

    _in_head = False
    _progress = 0  # ends of heads and messages, and pieces of bodies
    _unfinished = 0  # bytes since then
    _fault = ""
    _running: RequestResponseCycle | None = None
    _unparsed, _at = b"", 0
    _rejection: str | None = None
    """Why the request after the waiting ones is invalid, if it is."""
    _direct_body: DirectReader | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None
    _due = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = make_parser(self)
        self.app = partial(_until_cancelled, self.app)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in the base class
        """Prepare for requests, and start the timeout of the first."""
        super().connection_made(transport)
        self.flow = _Flow(transport)
        if self.entered is not None:
            self.entered()
        self._arm_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers, and tell every request of the connection that its client has disconnected."""
        self._cancel_head_timer()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
        if self.release_reservation is not None:
            self.release_reservation()
        self._direct_body = None
        self._unparsed, self._at = b"", 0
        for cycle in (self._running, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        self._running = None
        super().connection_lost(exc)
        # uvicorn does not after an error, and its timer would keep the connection's memory for a minute
        self._unset_keepalive_if_required()

    # What arrives.

    def data_received(self, data: bytes) -> None:
        """Parse the next bytes, or store them while too many requests wait; ignore bytes after an invalid request.

        Bytes between two requests do not extend the timeout.
        """
        if self._rejection is None:
            self._unparsed, self._at = (self._unparsed[self._at :] + data if self._unparsed else data), 0
            self._parse()
        if self.timeout_keep_alive_task is None and (self.cycle is None or self.cycle.response_complete):
            self._arm_head_timer()

    def _parse(self) -> None:
        while self._at < len(self._unparsed) and (room := MAX_WAITING - len(self.pipeline)) > 0:
            start, self._at = self._at, _end_of_heads(self._unparsed, self._at, room)
            piece, before = self._unparsed[start : self._at], self._progress
            super().data_received(piece)
            self._unfinished = self._unfinished + len(piece) if self._progress == before else 0
            if self._unfinished > MAX_HEAD and not self.transport.is_closing():
                self.send_400_response(f"The request head exceeds {MAX_HEAD} bytes.")
            if self.transport.is_closing() or self._rejection is not None:
                self._at = len(self._unparsed)
        if self._at == len(self._unparsed):
            self._unparsed = b""
        self.flow.hold(bool(self._unparsed))  # type: ignore[attr-defined] # of our own class

    def on_message_begin(self) -> None:
        """Begin a request and tell it of its connection."""
        super().on_message_begin()
        self._in_head = True
        self._add_to_scope({TRANSPORT: self.transport, RELEASE: self.release_reservation})
        self._arm_head_timer()

    def _add_to_scope(self, members: dict[str, Any]) -> None:
        cast("Scope", self.scope).update(members)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a field to the head."""
        # No page uses cookies. FastAPI parses them for each, and `http.cookies` takes quadratic time for backslashes
        # in older releases of Python, such as 3.11.7.
        if not self._in_head or name.lower() == b"cookie":
            return
        if len(self.headers) == MAX_FIELDS:
            self._stop(f"The request head has more than {MAX_FIELDS} fields.")
        super().on_header(name, value)

    def _stop(self, fault: str) -> NoReturn:
        self._fault = fault
        raise ValueError(fault)  # which stops the parser

    def _check_head(self) -> None:
        if self.parser.get_method() == b"CONNECT":  # after it, uvicorn would wait for a protocol that nobody speaks
            self._stop("This server is not a proxy.")
        if len(self.url) > MAX_VALUE:
            self._stop(f"The request target has {len(self.url)} bytes; at most {MAX_VALUE} are allowed.")
        if sum(len(value) for _, value in self.headers) > MAX_VALUE:
            sizes = Counter[bytes]()
            for name, value in self.headers:
                sizes[name] += len(value)
            ((name, size),) = sizes.most_common(1)
            if size > MAX_VALUE:
                shown = safe_key(name.decode("latin-1"))
                self._stop(f"The header {shown} has {size} bytes; at most {MAX_VALUE} are allowed.")

    def on_headers_complete(self) -> None:
        """Handle the request, with a `DirectReader` if its body is large."""
        self._check_head()
        self._cancel_head_timer()
        self._in_head = False
        self._progress += 1
        super().on_headers_complete()
        length = content_length(self.headers) or 0
        self._direct_body = None
        if length >= LARGE and self.scheme == "http":
            self._direct_body = DirectReader(self, length, self.direct_bodies)
            self._add_to_scope({DIRECT_BODY: self._direct_body})
        if self.once and self.cycle is not None:
            self.cycle.default_headers = [*self.cycle.default_headers, (b"connection", b"close")]

    def on_body(self, body: bytes) -> None:
        """Receive bytes of a body whose destination is not known yet."""
        self._progress += 1
        super().on_body(body)
        if self._direct_body is not None:
            self._direct_body.passed(len(body))

    def on_message_complete(self) -> None:
        """End the request."""
        self._progress += 1
        super().on_message_complete()

    # What is sent.

    def send_400_response(self, msg: str) -> None:
        """Reject an invalid request once those before it are answered, and close the connection.

        uvicorn would write its reply at once: as that to an earlier request, or into the middle of one.
        """
        self._cancel_head_timer()  # the requests before may take longer
        if self.pipeline and self.cycle.more_body:  # the invalid one waits itself, and its body never ends
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self._running  # type: ignore[assignment] # one runs
        elif self._running is None or (self.cycle is self._running and self.cycle.more_body):
            if self._running is not None and self._running.response_started:
                self.transport.close()
            else:
                super().send_400_response(self._fault or msg)
            return
        self._rejection = self._fault or msg

    def on_response_complete(self) -> None:
        """Start the request that waits next, parse more, and check that the client reads what is still unsent."""
        self._running = None
        super().on_response_complete()
        if self._unparsed:
            self._parse()
        elif self._rejection is not None and self._running is None and not self.transport.is_closing():
            super().send_400_response(self._rejection)
        if unsent := self.transport.get_write_buffer_size():
            self._due = self.loop.time() + self.slow_s + unsent / self.slow_rate
            if self._reader_timer is None:
                self._check_reader_later(unsent, 0)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    # Timeouts.

    def _check_reader_later(self, unsent: int, checks: int) -> None:
        self._reader_timer = self.loop.call_later(self.slow_s / _CHECKS, self._check_reader, unsent, checks)

    def _check_reader(self, before: int, checks: int) -> None:
        self._reader_timer = None
        if not (unsent := self.transport.get_write_buffer_size()):
            return
        checks = 0 if unsent < before else checks + 1
        if self._running is not None:  # its own timeouts apply
            self._check_reader_later(unsent, 0)
        elif checks == _CHECKS or self.loop.time() > self._due:
            self.transport.abort()
        else:
            self._check_reader_later(unsent, checks)

    def _arm_head_timer(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.slow_s, self._on_head_timeout)

    def _on_head_timeout(self) -> None:
        """Close the connection, unless reading is paused because requests wait for the one before."""
        self._head_timer = None
        if self.flow.read_paused:
            self._arm_head_timer()
        else:
            self.transport.abort()

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def http_protocol(slow_s: float, slow_rate: int, base: type[HttpProtocol] = HttpProtocol) -> type[asyncio.Protocol]:
    """Create the protocol class for uvicorn with these limits, those of `app.http.exchange.Limits`."""
    return type(base.__name__, (base,), {"slow_s": slow_s, "slow_rate": slow_rate, "direct_bodies": set()})


async def _until_cancelled(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Run the application; uvicorn would log the traceback of each request that it cancels when it stops."""
    with suppress(asyncio.CancelledError):
        await app(scope, receive, send)


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
