"""Requests that are sent before the reply to the one before: few of them wait, and all are answered in order."""

from __future__ import annotations

import logging
import re
import socket
import struct

import httpx
import numpy as np
import pytest

from app.http.pipelining import MAX_WAITING
from tests.app.bare import connected, form, multipart, replies
from tests.app.resident import Resident
from tests.app.samples import NPY, SLOW, doubled, parts, read_npy, same_bits
from tests.hostile.wire import read_all

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
NOWHERE = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n"


def cancelled(tight: Resident) -> float:
    """Return how many calls ended because nobody waited for them any more."""
    page = httpx.get(f"{tight.url}/metrics").text
    return sum(float(each) for each in re.findall(r'convgrad_calls_total{.*outcome="cancelled"} (.*)', page))


def test_few_requests_wait_on_a_connection(tight: Resident) -> None:
    """While one request is computed, 32 more are parsed and no others; if the client leaves, the call is cancelled."""
    before = cancelled(tight)
    with connected(tight.url) as sock:
        sock.sendall(b"".join(multipart(SLOW, NPY, reference=True)))
        tight.until(lambda: not tight.is_idle())
        (connection,) = (each for each in tight.connections if each.cycle and not each.cycle.response_complete)
        sock.sendall(HEALTH * 5000)
        tight.until(lambda: len(connection.pipeline) >= MAX_WAITING)
        assert len(connection.pipeline) <= MAX_WAITING + 1
        assert connection.flow.read_paused
    tight.run(tight.service.idle(), 30.0)
    assert cancelled(tight) == before + 1
    tight.until(lambda: tight.service.segments.stats().used == 0)


def test_all_requests_are_answered_in_order(tight: Resident) -> None:
    """Two thousand requests in one piece, of two kinds, get their two thousand replies."""
    with connected(tight.url) as sock:
        sock.sendall((HEALTH * 2 + NOWHERE) * 700)
        assert [status for status, _ in replies(sock, 2100)] == [200, 200, 404] * 700


def test_thousands_of_upgrades_are_ignored(tight: Resident) -> None:
    """Requests that ask for another protocol are answered like others, however many there are."""
    upgrade = HEALTH.replace(b"\r\n\r\n", b"\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n")
    with connected(tight.url) as sock:
        sock.sendall(upgrade * 1500)
        assert {status for status, _ in replies(sock, 1500)} == {200}


def test_empty_lines_in_a_body_are_data(tight: Resident) -> None:
    """A tensor whose bytes are all line breaks is received as it is, before and after other requests."""
    case = doubled(96, 1, 1)
    inputs = {name: np.full_like(values, struct.unpack("<f", b"\n" * 4)[0]) for name, values in case.inputs().items()}
    call = b"".join(form(case.op, parts(case, inputs)))
    with connected(tight.url) as sock:
        sock.sendall(HEALTH + call + HEALTH + call)
        found = replies(sock, 4)
    assert [status for status, _ in found] == [200] * 4
    for _, body in found[1::2]:
        assert same_bits(read_npy(body, "f32"), case.expected(inputs))


def test_an_invalid_request_does_not_disturb_a_reply(tight: Resident) -> None:
    """A reply is cut rather than continued with the answer to a request behind it that can't be parsed."""
    with connected(tight.url, little_room=True) as sock:
        sock.sendall(b"".join(multipart(doubled(512, 1, 1), NPY)))
        start = sock.recv(1000)
        assert start.startswith(b"HTTP/1.1 200")
        sock.sendall(b"?\r\n\r\n")
        assert b"HTTP/1.1" not in read_all(sock)


def test_a_reset_connection_is_no_error(tight: Resident, caplog: pytest.LogCaptureFixture) -> None:
    """If a browser aborts a page and its files, nothing is logged as a warning or an error."""
    caplog.set_level(logging.WARNING)
    for _ in range(5):
        with connected(tight.url, little_room=True) as sock:
            sock.sendall(b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 6)
            sock.recv(10)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        tight.until(lambda: not tight.connections)
    assert not caplog.records
