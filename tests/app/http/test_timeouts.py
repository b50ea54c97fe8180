"""Clients that send or read too slowly, on a service with a short timeout."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.app.bare import connected, multipart, replies
from tests.app.resident import Resident, resident_service
from tests.app.samples import CALL_PAGES, FRAMES, JSON, LARGE, NPY, SLOW, SMALL, SSE
from tests.hostile import wire

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def hasty() -> Iterator[Resident]:
    """A service that waits a fifth of a second."""
    with resident_service(slow_s=0.2, workers=1) as resident:
        yield resident


@pytest.mark.parametrize("start", [b"", b"POST /v1/ops HTTP/1.1\r\nHost:", b"\r\n\r\n"])
def test_a_missing_head_times_out(hasty: Resident, start: bytes) -> None:
    """A connection without a complete head is closed."""
    with connected(hasty.url) as sock:
        sock.sendall(start)
        assert wire.read_all(sock) == b""


def test_a_missing_second_head_times_out(hasty: Resident) -> None:
    """An incomplete head after an answered request also closes the connection."""
    with connected(hasty.url) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /heal")
        assert wire.read_all(sock).count(b"HTTP/1.1 200") == 1


@pytest.mark.parametrize("path", CALL_PAGES)
def test_a_missing_body_times_out(hasty: Resident, path: str) -> None:
    """A body that stops is answered with the deadline error of its API, and nothing of it is kept."""
    with connected(hasty.url) as sock:
        lines = [b"content-type: application/json", b"content-length: 5000"]
        sock.sendall(wire.head(path, *lines) + b'{"jsonrpc": "2.0"')
        reply = wire.read_all(sock)
    assert b"too slowly" in reply
    assert (b"-32001" if path == "/rpc" else b"HTTP/1.1 504") in reply
    hasty.run(hasty.service.admission.idle())
    hasty.until(lambda: hasty.service.segments.stats().used == 0)


@pytest.mark.parametrize("accept", [JSON, NPY, SSE, FRAMES])
def test_an_unread_reply_times_out(hasty: Resident, accept: str) -> None:
    """A client that does not read loses its connection; its call's queue place and memory are released."""
    with connected(hasty.url, little_room=True) as sock:
        # The body in one piece; this client is slow only in reading.
        sock.sendall(b"".join(multipart(LARGE, accept)))
        hasty.until(lambda: hasty.service.admission.requests == 1, 20)
        hasty.run(hasty.service.admission.idle(), 30)
        assert not hasty.service.calls
        assert len(wire.read_all(sock)) < 2048 * 2048 * 4
    hasty.until(lambda: hasty.service.segments.stats().used == 0)


def test_an_invalid_head_has_no_timeout(hasty: Resident) -> None:
    """A call that takes longer than the timeout is answered, whatever invalid request the client has sent behind it."""
    call = b"".join(multipart(SLOW, NPY, reference=True))
    with connected(hasty.url) as sock:
        sock.sendall(call + b"GET / HTTP/1.1\r\n\0: x\r\n\r\n")
        assert [status for status, _ in replies(sock, 2)] == [200, 400]


PAGES = 4 * b"GET /web/drawing.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
"""Replies that do not fit into small buffers, but end as far as the server is concerned: less than 64 KiB is unsent."""


def small_buffers(hasty: Resident, sock: socket.socket) -> None:
    """Make the service's side of a connection hold little that is not read."""
    hasty.until(lambda: len(hasty.connections) == 1)
    (connection,) = hasty.connections
    connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def test_unread_small_replies_time_out(hasty: Resident) -> None:
    """A client that sends calls with small replies and reads none loses its connection; nothing of it is kept."""
    call = b"".join(multipart(SMALL, JSON))
    with connected(hasty.url, little_room=True) as sock:
        small_buffers(hasty, sock)
        sock.sendall(call * 30)
        hasty.until(lambda: not hasty.connections, 20)
    hasty.run(hasty.service.admission.idle())
    assert hasty.service.admission.requests == 0
    hasty.until(lambda: hasty.service.segments.stats().used == 0)


def test_an_unread_end_of_a_reply_times_out(hasty: Resident) -> None:
    """A reply that the server has sent as far as it is concerned, and whose end is not read, does not stay for ever."""
    with connected(hasty.url, little_room=True) as sock:
        small_buffers(hasty, sock)
        sock.sendall(PAGES)
        hasty.until(lambda: not hasty.connections, 20)


def test_an_end_of_a_reply_that_is_read_too_slowly_times_out(hasty: Resident) -> None:
    """A client that reads a little between any two looks at what is unsent loses its connection all the same."""
    with connected(hasty.url, little_room=True) as sock:
        small_buffers(hasty, sock)
        (connection,) = hasty.connections
        sock.sendall(PAGES)
        hasty.until(lambda: connection.transport.get_write_buffer_size() > 0)
        while hasty.connections and connection.transport.get_write_buffer_size():
            sock.recv(1000)
            hasty.until(lambda look=connection._timer: connection._timer is not look or not hasty.connections)  # type: ignore[misc]
    assert not hasty.connections


def test_a_head_that_is_not_read_does_not_time_out(hasty: Resident) -> None:
    """While requests wait nothing is read: the head after them is late because of the service, not of the client."""
    health = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(hasty.url) as sock:
        sock.sendall(b"".join(multipart(SLOW, NPY, reference=True)))
        hasty.until(lambda: not hasty.is_idle())
        (connection,) = hasty.connections
        sock.sendall(health + health[:20])
        hasty.until(lambda: connection.flow.read_paused)
        sock.sendall(health[20:])
        assert [status for status, _ in replies(sock, 3)] == [200] * 3
