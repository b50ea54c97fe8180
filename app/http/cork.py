"""Send small replies in one system call: the head waits for the first piece of the body.

Uvicorn writes the two separately, and the first write wakes the client for nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["CorkProtocol"]


class CorkProtocol(HttpToolsProtocol):
    """Give every reply a transport that joins its first two writes."""

    def on_headers_complete(self) -> None:
        """Start handling the request, with our transport for its reply."""
        before = self.cycle
        super().on_headers_complete()
        cycle: Any = self.cycle  # it uses less of its transport than its annotation says
        if cycle is not before:
            cycle.transport = _Joining(self.transport, self.loop)


class _Joining:
    """The transport of one reply: the part of the interface that uvicorn uses."""

    __slots__ = ("_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = b""  # None once the body has begun

    def write(self, data: bytes) -> None:
        """Send data; the head is held back until the current callback returns to the event loop."""
        if self._head is None:
            self._transport.write(data)
        elif not self._head:
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            head, self._head = self._head, None
            self._transport.writelines((head, data))

    def close(self) -> None:
        """Close after sending what is held back."""
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether the connection is closed or closing."""
        return self._transport.is_closing()

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, None
            self._transport.write(head)
