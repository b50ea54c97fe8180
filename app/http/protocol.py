"""The HTTP protocol of a connection: uvicorn's, with bounds on heads, pipelined requests and slow clients.

uvicorn limits neither the length of a head nor the time that it takes, parses every request that one read brings, and
waits forever for a client that does not read the end of its replies.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, NoReturn, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.http.direct_body import LARGE, DirectReader

__all__ = ["CONNECTION", "DIRECT_BODY", "FULL", "MAX_HEAD", "MAX_WAITING", "SLOW_S", "HttpProtocol"]

CONNECTION, DIRECT_BODY, FULL = "convgrad.connection", "convgrad.direct_body", "convgrad.full"
"""Added to the scope of a request: its connection's number; the `DirectReader` of a large body without TLS; and the
limit of connections, if it is exceeded."""

MAX_HEAD = 16 << 10
"""Bytes of a head, and of anything else that is neither head nor body, such as trailers."""
MAX_WAITING = 32
"""Requests of a connection that may wait for the one before."""
SLOW_S = 30.0
"""Seconds that a client may take for a head, the next bytes of a body, or to read what is sent to it."""

_LONG_HEAD = f"The request head exceeds {MAX_HEAD} bytes."
# More digits are no length, and `int` refuses thousands of them.
_LONGEST_LENGTH = 18
_FRAMING = (b"content-length", b"transfer-encoding")
_CHECKS = 4  # per `SLOW_S`


class HttpProtocol(HttpToolsProtocol):
    """Reject long heads and too many waiting requests; close connections of clients that send or read too slowly."""

    slow_s = SLOW_S

    _running: RequestResponseCycle | None = None
    _direct_body: DirectReader | None = None
    _in_head = _known = False
    _head = 0  # bytes of the head
    _loose = 0  # bytes since the last end of a head or piece of a body
    _fault = _rejection = ""
    _head_due = _read_due = math.inf

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in the base class
        """Wait for the first request."""
        super().connection_made(transport)
        self._head_due = self.loop.time() + self.slow_s
        self._timer = self.loop.call_later(self.slow_s / _CHECKS, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of the connection that its client has disconnected."""
        self._timer.cancel()
        if self._running is not None:  # uvicorn tells the last one only
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()
        self._running = self._direct_body = None
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # not done by uvicorn after an error

    def _check(self) -> None:
        now = self.loop.time()
        if now > self._head_due or (now > self._read_due and self.transport.get_write_buffer_size()):
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(self.slow_s / _CHECKS, self._check)

    # What arrives.

    def data_received(self, data: bytes) -> None:
        """Parse the next bytes; ignore those after an invalid request."""
        if self._rejection:
            return
        self._loose += len(data)
        super().data_received(data)
        if self._loose > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response(_LONG_HEAD)
        if self._running is None and self._head_due == math.inf:
            self._head_due = self.loop.time() + self.slow_s

    def on_message_begin(self) -> None:
        """Begin a request."""
        if self._known:
            return
        super().on_message_begin()
        cast("Scope", self.scope)[CONNECTION] = id(self)
        self._in_head, self._head = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a field of the head; trailers are ignored."""
        if self._in_head and not self._known:
            self._head += len(name) + len(value)
            if self._head + len(self.url) > MAX_HEAD:
                self._refuse(_LONG_HEAD)
            super().on_header(name, value.rstrip(b" \t"))  # httptools drops only the blanks before a value

    def _refuse(self, fault: str) -> NoReturn:
        self._fault = fault
        raise ValueError(fault)  # which stops the parser

    def on_headers_complete(self) -> None:
        """Start the request, or let it wait; a large body gets a `DirectReader`."""
        self._loose = 0
        if self._known:
            return
        self._in_head, self._head_due, self._direct_body = False, math.inf, None
        if len(self.url) > MAX_HEAD:  # without any field
            self._refuse(_LONG_HEAD)
        if self.parser.get_method() == b"CONNECT":  # httptools would wait for another protocol
            self._refuse("This server is not a proxy.")
        if len(self.pipeline) >= MAX_WAITING:
            self._refuse(f"At most {MAX_WAITING} requests of a connection may wait.")
        length = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if len(length) > _LONGEST_LENGTH:
            self._refuse(f"The Content-Length has {len(length)} digits.")
        super().on_headers_complete()
        if int(length) >= LARGE and self.scheme == "http":
            self._direct_body = DirectReader(self, int(length), self._body_received)
            cast("Scope", self.scope)[DIRECT_BODY] = self._direct_body

    def on_body(self, body: bytes) -> None:
        """Receive bytes of a body whose destination is not known yet."""
        self._loose = 0
        super().on_body(body)
        if self._direct_body is not None:
            self._direct_body.passed(len(body))

    def _body_received(self) -> None:
        """End a request whose `DirectReader` has the body: the parser still waits for it."""
        self.cycle.more_body = False
        self.parser = _Parser(self)
        self.transport.set_protocol(self)

    def continue_after_upgrade(self, rest: bytes) -> None:
        """Go on after a head with `Upgrade`, whose body the parser would mistake for another protocol."""
        self.parser = _Parser(self)
        if framing := [b"%s: %s\r\n" % field for field in self.headers if field[0] in _FRAMING]:
            self.cycle.more_body = True  # the parser has reported the end
            self._known = True
            self.parser.feed_data(b"".join((b"POST / HTTP/1.1\r\n", *framing, b"\r\n")))
            self._known = False
        if rest:
            self.parser.feed_data(rest)

    # What is sent.

    def send_400_response(self, msg: str) -> None:
        """Reject an invalid request once those before it are answered, and close the connection.

        uvicorn would write its reply at once: as that to an earlier request, or into the middle of one.
        """
        self._rejection, self._head_due = self._fault or msg, math.inf
        if self.pipeline and self.cycle.more_body:  # the invalid one waits itself, and its body never ends
            self.pipeline.popleft()
        elif self._running is None or (self.cycle is self._running and self.cycle.more_body):
            self._reject()

    def _reject(self) -> None:
        if self._running is None or not self._running.response_started:
            super().send_400_response(self._rejection)
        self.transport.close()
        self._allow_reading()

    def on_response_complete(self) -> None:
        """Start the request that waits next, and give the client time to read this reply."""
        self._running = None
        self._allow_reading()
        super().on_response_complete()
        if self._rejection and self._running is None and not self.transport.is_closing():
            self._reject()

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self._allow_reading()

    def resume_writing(self) -> None:
        """Continue writing."""
        super().resume_writing()
        self._read_due = math.inf

    def _allow_reading(self) -> None:
        self._read_due = self.loop.time() + self.slow_s

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if not self.flow.write_paused:
            self._read_due = math.inf
        if app is service_unavailable:  # beyond `limit_concurrency`
            cast("Scope", cycle.scope)[FULL], app = self.config.limit_concurrency, self.app
        super()._start_asgi_task(cycle, app)


class _Parser(httptools.HttpRequestParser):
    """Ignore `Upgrade`, such as `h2c` from Java: a server may (RFC 9110, section 7.8), and this one has HTTP/1.1 only.

    httptools stops after the head instead, and uvicorn loses the body (uvicorn issue 2722, httptools issue 124).
    """

    def __init__(self, http: HttpProtocol) -> None:
        super().__init__(http)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self._http = http

    def feed_data(self, data: Any) -> None:
        """Parse the next bytes; raises `HttpParserError`."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._http.continue_after_upgrade(data[upgrade.args[0] :])
