"""Requests that are sent before the reply to the one before: few of them wait, and all are answered in order."""

from __future__ import annotations

import logging
import socket
import struct
from unittest.mock import ANY

import httpx
import numpy as np
import pytest

from app.http.protocol import MAX_WAITING
from tests.app.bare import connected, form, multipart, replies
from tests.app.resident import Resident
from tests.app.samples import NPY, SLOW, doubled, parts, read_npy, same_bits

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
NOWHERE = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_a_client_that_leaves_cancels_the_request_before_the_waiting_ones(tight: Resident) -> None:
    """While one request is computed others wait; if the client leaves, the call is cancelled."""
    before = tight.cancelled()
    with connected(tight.url) as sock:
        sock.sendall(b"".join(multipart(SLOW, NPY, reference=True)))
        tight.until(lambda: not tight.is_idle())
        sock.sendall(HEALTH * MAX_WAITING)
        tight.until(lambda: any(len(each.pipeline) == MAX_WAITING for each in tight.connections))
    tight.run(tight.service.admission.idle(), 30.0)
    assert tight.cancelled() == before + 1
    tight.until(lambda: tight.service.segments.stats().used == 0)


@pytest.mark.parametrize("fields", [b"", b"Upgrade: h2c\r\nConnection: upgrade\r\n"])
def test_requests_are_answered_in_order_up_to_a_limit(tight: Resident, fields: bytes) -> None:
    """As many requests as may wait get their replies in order; the next one is rejected, and no more read."""
    requests = [HEALTH, NOWHERE] * (MAX_WAITING // 2) + [HEALTH] + [NOWHERE] * 5000
    with connected(tight.url) as sock:
        sock.sendall(b"".join(requests).replace(b"\r\n\r\n", b"\r\n" + fields + b"\r\n"))
        found = [status for status, _ in replies(sock, MAX_WAITING + 2)]
    assert found == [200, 404] * (MAX_WAITING // 2) + [200, 400]


FAULTS = {
    "line": b"\0\r\n\r\n",
    "header": b"GET / HTTP/1.1\r\nHost: localhost\r\n\0: x\r\n\r\n",
    "body": b"POST /rpc HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_invalid_request_does_not_replace_earlier_replies(tight: Resident, fault: str) -> None:
    """Requests before an invalid one get their replies, whole and in order; then it is rejected, and no other read."""
    before = b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nHost: localhost\r\n\r\n" + NOWHERE
    whole = httpx.get(f"{tight.url}/docs/swagger-ui-bundle.js").content
    with connected(tight.url) as sock:
        sock.sendall(before + FAULTS[fault] + HEALTH)
        assert replies(sock, 3) == [(200, whole), (404, ANY), (400, ANY)]
        assert not sock.recv(1)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_invalid_request_does_not_disturb_a_reply(tight: Resident, fault: str) -> None:
    """A reply that is being sent is completed before an invalid request behind it is rejected."""
    with connected(tight.url, little_room=True) as sock:
        sock.sendall(b"".join(multipart(doubled(512, 1, 1), NPY)))
        tight.until(lambda: any(each.transport.get_write_buffer_size() for each in tight.connections))
        sock.sendall(FAULTS[fault])
        tight.until(lambda: any(each._rejection for each in tight.connections))
        (first, body), (second, _) = replies(sock, 2)
    assert (first, second) == (200, 400)
    assert len(body) == 128 + 1024 * 1024 * 4


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
