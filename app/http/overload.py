"""Load shedding: reject a request by its first bytes, with a reply made here, and discard its body.

A request that a full service would reject anyway takes a millisecond of the event loop on its way through parser,
middlewares and API. Here it takes a tenth of that: its head is read without removing it from the socket, and the kernel
discards its body without copying it.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import Callable
from functools import lru_cache
from http import HTTPStatus
from typing import Any

from app.http.exchange import LINGER_BYTES, LINGER_IDLE_S, LINGER_S
from app.replies.body import json_bytes
from app.replies.errors import error_reply, rpc_error
from app.telemetry.context import MONITORED, REQUEST_ID, api_of
from convgrad._errors import PROBLEM_JSON, Overloaded

__all__ = ["RejectedConnection", "RequestStart", "rejection"]

HEAD_BYTES = 4096
"""Bytes of a request that are inspected."""

# Discarded in one call; Linux drops the bytes without writing to this buffer, whose pages are never touched.
_DROPPED = bytearray(1 << 20)
_MORE = getattr(socket, "MSG_MORE", 0)

_LINE = re.compile(rb"([A-Z]++) ([^ ?\r\n]*+)[^ \r\n]*+ HTTP/1\.[01]\r?\n")
_GIVEN_ID = re.compile(rb"\nx-request-id: *+([^\r\n]*+)\r?\n", re.IGNORECASE)
_PROXIED = re.compile(rb"\n(?:x-forwarded-for|forwarded) *+:", re.IGNORECASE)
_CALL = re.compile(
    r"/v1/ops/[^/]+(?:/verify)?|/v1/graphs|/v1/checks/[^/]+/submit|/v2/models/[^/]+(?:/versions/[^/]+)?/infer"
)
_PLACE = "<request id>"


class RequestStart:
    """The first bytes of a request, parsed as far as its rejection needs."""

    def __init__(self, data: bytes) -> None:
        line = _LINE.match(data)
        self.method, self.path = ("", "") if line is None else (line[1].decode(), line[2].decode("latin-1"))
        self._data = data

    @property
    def is_probe(self) -> bool:
        """Whether it is a complete request for health or metrics, which are always answered."""
        return self.path in MONITORED and self.method in ("GET", "HEAD") and self._data.endswith(b"\r\n\r\n")

    @property
    def is_call(self) -> bool:
        """Whether it is a call that can be rejected by its head alone; JSON-RPC errors need the ids in the body."""
        return self.method == "POST" and _CALL.fullmatch(self.path) is not None

    @property
    def is_proxied(self) -> bool:
        """Whether a proxy sent it, so that the client's address is known only after the headers are parsed."""
        return _PROXIED.search(self._data) is not None

    @property
    def api(self) -> str:
        """The API that it is for."""
        return api_of(self.path)

    @property
    def request_id(self) -> str:
        """The id that it gives, or a new one."""
        match = _GIVEN_ID.search(self._data)
        text = "" if match is None else match[1].decode("latin-1").strip()
        return text if REQUEST_ID.fullmatch(text) else os.urandom(16).hex()

    @property
    def wants_problem(self) -> bool:
        """Whether it accepts problem objects instead of the errors of its protocol."""
        return PROBLEM_JSON.encode() in self._data


def rejection(head: RequestStart, error: Overloaded) -> bytes:
    """Build the whole reply that rejects a request, in the format of its API."""
    api = "pages" if head.api == "oip" and head.wants_problem else head.api
    fields, before, after = _words(api, error.message, *error.data.items(), retry_after=error.retry_after)
    request_id = head.request_id.encode()
    body = before + request_id + after if after else before
    start = b"%sx-request-id: %s\r\ncontent-length: %d\r\n\r\n" % (fields, request_id, len(body))
    return start if head.method == "HEAD" else start + body


@lru_cache(maxsize=256)
def _words(api: str, message: str, *data: tuple[str, Any], retry_after: float | None) -> tuple[bytes, bytes, bytes]:
    """Build status and headers, and the body before and after the request's id."""
    error = Overloaded(message, retry_after=retry_after, data=dict(data))
    reply = error_reply(error, api, _PLACE)
    body, media_type = reply.body, reply.media_type
    if api == "rpc":
        body, media_type = json_bytes({"jsonrpc": "2.0", "error": rpc_error(error), "id": None}), "application/json"
    status = HTTPStatus(reply.status)
    fields = {"content-type": media_type, **reply.headers, "connection": "close"}
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in fields.items()), ""]
    before, _, after = body.partition(_PLACE.encode())
    return "\r\n".join(lines).encode("latin-1"), before, after


class RejectedConnection:
    """A rejected connection, closed once the client has sent everything or stopped sending.

    If it were closed at once, a client that sends without reading would see a reset instead of the answer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, done: Callable[[], None]) -> None:
        self._loop, self._sock, self._done = loop, sock, done
        self.since = self._latest = time.monotonic()
        self._until = self.since + LINGER_S
        self._left = LINGER_BYTES

    def begin(self, reply: bytes) -> bool:
        """Send the answer and shut down the sending side; return False if the client is gone already."""
        try:
            # Answer and FIN in one packet: a few hundred bytes fit into the empty buffer.
            if self._sock.send(reply, _MORE) != len(reply):
                return False
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        self._loop.add_reader(self._sock.fileno(), self._drop)
        return True

    def is_over(self, now: float) -> bool:
        """Whether its time is up."""
        return now > self._until or now > self._latest + LINGER_IDLE_S

    def close(self) -> None:
        """Close it."""
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()

    def _drop(self) -> None:
        self._latest = time.monotonic()
        try:
            count = self._sock.recv_into(_DROPPED, 0, socket.MSG_TRUNC)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        self._left -= count
        if not count or self._left <= 0:
            self._done()
