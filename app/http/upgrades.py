"""Requests that offer another protocol, which the service never takes: `Upgrade: h2c` from Java, `websocket`.

A server may ignore such an offer (RFC 9110, section 7.8), and the request is one like any other then. httptools ends it
at its head instead, and uvicorn loses the body (uvicorn issue 2722, httptools issue 124; httptools 0.6 to 0.9).
"""

from __future__ import annotations

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["UpgradeIgnoringProtocol", "make_parser"]

_FRAMING = (b"content-length", b"transfer-encoding")


class UpgradeIgnoringProtocol(HttpToolsProtocol):
    """Take a request that offers another protocol as if it did not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = make_parser(self)


def make_parser(http: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """Make a parser that waits for the head of a connection's next request."""
    return _Parser(http, http)


class _Parser(httptools.HttpRequestParser):
    """Parse the requests of a connection and tell `listener` of them."""

    def __init__(self, http: HttpToolsProtocol, listener: object) -> None:
        super().__init__(listener)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self._http = http

    def feed_data(self, data: Any) -> None:
        """Take the next bytes; raises `HttpParserError`, and `HttpParserUpgrade` for CONNECT alone."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.get_method() == b"CONNECT":
                raise
            rest = data[upgrade.args[0] :]
        else:
            return
        self._http.parser = self._successor()
        if rest:
            self._http.parser.feed_data(rest)

    def _successor(self) -> httptools.HttpRequestParser:
        """Make the parser of what follows the head; this one takes the body for another protocol."""
        framing = [b"%s: %s\r\n" % field for field in self._http.headers if field[0] in _FRAMING]
        if not framing:
            return make_parser(self._http)
        self._http.cycle.more_body = True  # the end that this parser told of was that of the head
        parser = _Parser(self._http, _AfterHead(self._http))
        parser.feed_data(b"".join((b"POST / HTTP/1.1\r\n", *framing, b"\r\n")))
        return parser


class _AfterHead:
    """Pass the calls of a parser on to its protocol, but for those about the first head, which it knows already."""

    def __init__(self, http: HttpToolsProtocol) -> None:
        self._http = http
        self._known = True
        self.on_body = http.on_body
        self.on_message_complete = http.on_message_complete

    def on_message_begin(self) -> None:
        if not self._known:
            self._http.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._known:
            self._http.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._known:
            self._http.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._known:
            self._http.on_headers_complete()
        self._known = False
