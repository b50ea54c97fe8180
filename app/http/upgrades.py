"""Ignore `Upgrade` headers, such as `h2c` from Java and `websocket`: the service never changes the protocol.

A server may ignore the header and handle the request as usual (RFC 9110, section 7.8). httptools stops after the head
instead, and uvicorn loses the body (uvicorn issue 2722, httptools issue 124; httptools 0.6 to 0.9).
"""

from __future__ import annotations

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["make_parser"]

_FRAMING = (b"content-length", b"transfer-encoding")


def make_parser(http: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """Create a parser that expects the head of a connection's next request."""
    return _Parser(http, http)


class _Parser(httptools.HttpRequestParser):
    """Parse the requests of a connection for `listener`."""

    def __init__(self, http: HttpToolsProtocol, listener: object) -> None:
        super().__init__(listener)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self._http = http

    def feed_data(self, data: Any) -> None:
        """Parse the next bytes; raises `HttpParserError`.

        Calls itself for what follows a head with `Upgrade`: `HttpProtocol` bounds how many of them `data` has.
        """
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
        else:
            return
        self._http.parser = self._successor()
        if rest:
            self._http.parser.feed_data(rest)

    def _successor(self) -> httptools.HttpRequestParser:
        """Create the parser for what follows the head; the current one mistakes the body for another protocol."""
        framing = [b"%s: %s\r\n" % field for field in self._http.headers if field[0] in _FRAMING]
        if not framing:
            return make_parser(self._http)
        self._http.cycle.more_body = True  # this parser reported the end after the head
        parser = _Parser(self._http, _AfterHead(self._http))
        parser.feed_data(b"".join((b"POST / HTTP/1.1\r\n", *framing, b"\r\n")))
        return parser


class _AfterHead:
    """Forward a parser's callbacks to the protocol, except those for the first head, which it has already seen."""

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
