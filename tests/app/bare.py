"""Requests over raw sockets, to do what no HTTP client does: stop in the middle, wait, not read the reply."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.app.samples import NPY, Files, parts
from tests.problems import Case

__all__ = ["connected", "form", "multipart", "replies", "rest_connection", "rpc_connection", "written"]


def written(request: httpx.Request) -> tuple[bytes, bytes]:
    """Return a request as sent on the wire: head and body."""
    lines = [f"{request.method} {request.url.path} HTTP/1.1", *map(": ".join, request.headers.items())]
    return "\r\n".join([*lines, "", ""]).encode(), request.read()


def multipart(case: Case, accept: str, headers: dict[str, str] | None = None, **options: Any) -> tuple[bytes, bytes]:
    """Return a call whose result is not checked: head and body."""
    files = parts(case, case.floats(), **options)
    given = {"accept": accept, **(headers or {})}
    return written(httpx.Request("POST", f"http://localhost/v1/ops/{case.op}", files=files, headers=given))


@contextmanager
def connected(url: str, *, here: str = "", little_room: bool = False) -> Iterator[socket.socket]:
    """Connect to a service: from the address `here` if given, and with a small receive buffer if `little_room`."""
    address = urlsplit(url)
    with closing(socket.socket()) as sock:
        if little_room:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        if here:
            sock.bind((here, 0))
        sock.settimeout(30)
        sock.connect((address.hostname, address.port))
        yield sock


def form(op: str, files: Files) -> tuple[bytes, bytes]:
    """Return a multipart request whose reply is a `.npy` file: head and body."""
    return written(httpx.Request("POST", f"http://localhost/v1/ops/{op}", files=files, headers={"accept": NPY}))


def replies(sock: socket.socket, count: int) -> list[tuple[int, bytes]]:
    """Read `count` replies; return the status and body of each."""
    found, file = [], sock.makefile("rb")
    for _ in range(count):
        status = int(file.readline().split()[1])
        length = 0
        while (line := file.readline()) != b"\r\n":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        found.append((status, file.read(length)))
    return found


@contextmanager
def rest_connection(url: str, case: Case, accept: str, *, reference: bool = False) -> Iterator[socket.socket]:
    """Send a complete call over a raw socket."""
    with connected(url) as sock:
        sock.sendall(b"".join(multipart(case, accept, reference=reference)))
        yield sock


@contextmanager
def rpc_connection(url: str, body: Any, accept: str, *, share: float = 1.0) -> Iterator[socket.socket]:
    """Send the first `share` of a request over a raw socket."""
    head, text = written(httpx.Request("POST", "http://localhost/rpc", json=body, headers={"accept": accept}))
    with connected(url) as sock:
        sock.sendall(head + text[: int(len(text) * share)])
        yield sock
