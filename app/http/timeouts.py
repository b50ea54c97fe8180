"""Timeouts of a connection between its requests: for the head of the next one, and for reading the last reply.

`Exchange` has those of a request. A slow client occupies no worker, but a connection and memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from starlette.types import Scope

from app.http.direct_body import DirectBodyProtocol
from app.http.exchange import connection_of

__all__ = ["TimeoutProtocol", "timeout_protocol"]

# Checks per `slow_s` that the unsent bytes have become fewer.
_CHECKS = 8


class TimeoutProtocol(DirectBodyProtocol):
    """Close connections that do not send a complete request head, or do not read a complete reply, in time.

    uvicorn would wait forever.
    """

    slow_s = 30.0
    slow_rate = 16 << 10
    once = False
    """Whether the connection closes after one request."""
    entered: Callable[[], object] | None = None
    """Called when the connection is registered with the server."""
    release_reservation: Callable[[], object] | None = None
    """See `RequestContext.release_reservation`."""

    _head_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None
    _due = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in the base class
        """Start the timeout of the first request."""
        super().connection_made(transport)
        if self.entered is not None:
            self.entered()
        self._arm_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._cancel_head_timer()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
        if self.release_reservation is not None:
            self.release_reservation()
        super().connection_lost(exc)
        # uvicorn does not after an error, and its timer would keep the connection's memory for a minute
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """Feed the parser; bytes between two requests do not extend the timeout."""
        super().data_received(data)
        if self.timeout_keep_alive_task is None and (self.cycle is None or self.cycle.response_complete):
            self._arm_head_timer()

    def on_message_begin(self) -> None:
        """Begin a request and tell it of its connection."""
        super().on_message_begin()
        connection = connection_of(cast("Scope", self.scope))
        connection.transport, connection.release_reservation = self.transport, self.release_reservation
        self._arm_head_timer()

    def on_headers_complete(self) -> None:
        """Start handling the request."""
        self._cancel_head_timer()
        super().on_headers_complete()
        if self.once and self.cycle is not None:
            self.cycle.default_headers = [*self.cycle.default_headers, (b"connection", b"close")]

    def send_400_response(self, msg: str) -> None:
        """Wait no longer for the rest of an invalid head: the requests before it may take longer."""
        self._cancel_head_timer()
        super().send_400_response(msg)

    def on_response_complete(self) -> None:
        """Check from now on that the client reads the bytes that are still unsent."""
        super().on_response_complete()
        if unsent := self.transport.get_write_buffer_size():
            self._due = self.loop.time() + self.slow_s + unsent / self.slow_rate
            if self._reader_timer is None:
                self._check_reader_later(unsent, 0)

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


def timeout_protocol(slow_s: float, slow_rate: int) -> type[asyncio.Protocol]:
    """Create the protocol class for uvicorn with these limits, those of `app.http.exchange.Limits`."""
    return type("TimeoutProtocol", (TimeoutProtocol,), {"slow_s": slow_s, "slow_rate": slow_rate})
