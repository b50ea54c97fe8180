"""Limits on heads: their length, the number of their fields, and what arrives in a body without being part of it.

uvicorn has none. It keeps each field as a tuple of some 150 bytes, adds the trailers of a chunked body to the fields of
the head, and the parser joins the pieces of a long field with every read.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["MAX_FIELDS", "MAX_HEAD", "HeadLimitProtocol"]

MAX_HEAD = 64 << 10
"""Bytes that the parser may take without an end of a head or a byte of a body."""
MAX_FIELDS = 128
"""Fields of a head."""


class HeadLimitProtocol(HttpToolsProtocol):
    """Reject heads that are too long with 400, and so trailers and chunk extensions; ignore trailers and cookies."""

    _in_head = False
    _progress = 0  # ends of heads and messages, and pieces of bodies
    _unfinished = 0  # bytes since then
    _fault = ""

    def data_received(self, data: bytes) -> None:
        """Feed the parser."""
        before = self._progress
        super().data_received(data)
        self._unfinished = self._unfinished + len(data) if self._progress == before else 0
        if self._unfinished > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response(f"The request head exceeds {MAX_HEAD} bytes.")

    def send_400_response(self, msg: str) -> None:
        """Reply, with the reason if it is one of ours, and close the connection."""
        super().send_400_response(self._fault or msg)

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a field to the head."""
        # No page uses cookies. FastAPI parses them for each, and `http.cookies` takes quadratic time for backslashes
        # in older releases of Python, such as 3.11.7.
        if not self._in_head or name.lower() == b"cookie":
            return
        if len(self.headers) == MAX_FIELDS:
            self._fault = f"The request head has more than {MAX_FIELDS} fields."
            raise ValueError(self._fault)  # which stops the parser
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End the head."""
        self._in_head = False
        self._progress += 1
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Receive bytes of the body."""
        self._progress += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request."""
        self._progress += 1
        super().on_message_complete()
