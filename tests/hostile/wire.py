"""HTTP by hand: raw bytes over a socket, for requests that no HTTP library would send."""

from __future__ import annotations

import socket
from contextlib import suppress

from tests.app.bare import connected

__all__ = ["CRLF", "chunked", "head", "read_all", "request", "status", "talk"]

CRLF = b"\r\n"


def head(path: str, *lines: bytes, method: str = "POST") -> bytes:
    """Return a request's head with these header lines."""
    return CRLF.join([f"{method} {path} HTTP/1.1".encode(), b"host: localhost", *lines, b"", b""])


def request(path: str, body: bytes, *lines: bytes) -> bytes:
    """Return a complete request with the right length."""
    return head(path, b"content-length: %d" % len(body), *lines) + body


def chunked(body: bytes) -> bytes:
    """Return a body as one chunk and the last chunk."""
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


def read_all(sock: socket.socket) -> bytes:
    """Read until the service closes the connection."""
    pieces = []
    with suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            pieces.append(piece)
    return b"".join(pieces)


def talk(url: str, data: bytes, *, end: bool = False) -> bytes:
    """Send bytes, then close the sending side if `end`; return what the service sends until it closes."""
    with connected(url) as sock:
        sock.sendall(data)
        if end:
            sock.shutdown(socket.SHUT_WR)
        return read_all(sock)


def status(reply: bytes) -> int:
    """Return the status of the first response; 0 if there is none."""
    return int(reply[9:12]) if reply.startswith(b"HTTP/1.1 ") else 0
