"""Calls that compute while their body arrives: same bits, and nothing left of those that are not completed."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.app import oip
from tests.app.bare import connected, form, replies, written
from tests.app.resident import Resident, resident_service
from tests.app.samples import NPY, SMALL, npy, parts, post, read, same_bits
from tests.problems import Case

# 4.7 MB of tensors, in four units of two images each.
CASE = Case(
    name="early", n=8, src_channels=64, dst_channels=64, src_spatial=(48, 48), dst_spatial=(48, 48), kernel=(3, 3),
    pads_begin=(1, 1), pads_end=(1, 1),
)  # fmt: skip
INPUTS = CASE.inputs()
EXPECTED = CASE.expected(INPUTS)
HALF = 0.8  # of the body: units of the first images have their inputs, those of the last do not

Request = tuple[bytes, bytes]


@pytest.fixture(scope="module")
def resident() -> Iterator[Resident]:
    """A service in this process with one worker."""
    with resident_service(workers=1) as resident:
        yield resident


def binary(shape: list[int] | None = None, **parameters: Any) -> Request:
    """Return a `/v2` request, with the weights' shape after the tensors if it is given: head and body."""
    inputs, attributes = dict(INPUTS), CASE.attributes() | parameters
    wanted = [{"name": "diff_weights", "parameters": {"binary_data": True}}]
    document = oip.head(CASE, inputs, outputs=wanted) | {"parameters": attributes}
    if shape is not None:
        del attributes["weights_shape"]
        inputs["weights_shape"] = np.array(shape, np.int64)
        entry = {"name": "weights_shape", "shape": [4], "datatype": "INT64", "parameters": {"binary_data_size": 32}}
        document["inputs"].append(entry)
    body, headers = oip.body(document, inputs)
    return written(httpx.Request("POST", f"http://localhost/v2/models/{CASE.op}/infer", content=body, headers=headers))


def multipart() -> Request:
    """Return the multipart request."""
    return form(CASE.op, parts(CASE, INPUTS))


APIS: dict[str, Callable[[], Request]] = {"binary": binary, "multipart": multipart}


def units_done(resident: Resident) -> int:
    """Return how many units the workers have completed."""
    count: int = resident.service.engine.snapshot()["counters"]["units"]
    return count


def send_some(resident: Resident, sock: socket.socket, request: Request) -> bytes:
    """Send a part of a request, wait until two of its units are done, and return the rest."""
    head, body = request
    before, size = units_done(resident), int(HALF * len(body))
    sock.sendall(head + body[:size])
    resident.until(lambda: units_done(resident) >= before + 2)
    return body[size:]


def cancelled_calls(resident: Resident) -> float:
    """Return how many calls were counted as cancelled."""
    metrics, _ = resident.run(resident.service.telemetry.page("text/plain"))
    calls = [line for line in metrics.decode().splitlines() if line.startswith("convgrad_calls_total{")]
    return sum(float(line.split()[-1]) for line in calls if 'outcome="cancelled"' in line)


def at_rest(resident: Resident) -> bool:
    """Return whether nothing is left of any call."""
    snapshot = resident.service.engine.snapshot()
    idle = not any(worker["unit"] for worker in snapshot["workers"])
    return idle and not snapshot["jobs"] and resident.service.segments.stats().used == 0


@pytest.mark.parametrize("api", APIS)
def test_units_are_done_before_the_last_byte(resident: Resident, api: str) -> None:
    """A call whose body is still arriving is computed as far as possible, and its result has the same bits."""
    with connected(resident.url) as sock:
        for _ in range(2):
            sock.sendall(send_some(resident, sock, APIS[api]()))
            ((status, body),) = replies(sock, 1)
            assert status == 200, body
            assert body.endswith(EXPECTED.tobytes())
    resident.until(lambda: at_rest(resident))


def test_a_slow_sender_blocks_no_worker(resident: Resident) -> None:
    """While one call waits for its last images, the only worker computes others."""
    with connected(resident.url) as sock, httpx.Client(base_url=resident.url) as http:
        rest = send_some(resident, sock, binary())
        assert not resident.service.calls, "a call that is not complete takes no place"
        assert same_bits(read(post(http, SMALL, SMALL.inputs())), SMALL.expected(SMALL.inputs()))
        sock.sendall(rest)
        ((_, body),) = replies(sock, 1)
        assert body.endswith(EXPECTED.tobytes())


@pytest.mark.parametrize("api", APIS)
def test_a_client_that_leaves(resident: Resident, api: str) -> None:
    """If a client disconnects, its call is stopped and counted as cancelled, and its memory is released."""
    before = cancelled_calls(resident)
    with connected(resident.url) as sock:
        send_some(resident, sock, APIS[api]())
    resident.until(lambda: at_rest(resident))
    assert cancelled_calls(resident) == before + 1


def test_a_body_that_turns_out_invalid(resident: Resident) -> None:
    """A call that has started and is then rejected leaves nothing behind."""
    head, body = form(CASE.op, [*parts(CASE, INPUTS), ("else", ("else.npy", npy(EXPECTED), NPY))])
    with connected(resident.url) as sock:
        rest = send_some(resident, sock, (head, body))
        sock.sendall(rest)
        ((status, found),) = replies(sock, 1)
    assert status == 422, found
    resident.until(lambda: at_rest(resident))


def test_a_deadline_inside_the_body(resident: Resident) -> None:
    """The deadline applies to a call that has started before its body is complete."""
    with connected(resident.url) as sock:
        rest = send_some(resident, sock, binary(timeout=400_000))
        run = resident.service.engine
        resident.until(lambda: not run.snapshot()["jobs"])
        sock.sendall(rest)
        ((status, found),) = replies(sock, 1)
    assert status == 504, found
    resident.until(lambda: at_rest(resident))


def test_a_worker_that_dies_early(resident: Resident) -> None:
    """A unit that is lost while the body arrives runs again; the bits are the same."""
    with connected(resident.url) as sock:
        rest = send_some(resident, sock, binary())
        for worker in resident.service.engine.snapshot()["workers"]:
            os.kill(worker["pid"], signal.SIGKILL)
        sock.sendall(rest)
        ((status, body),) = replies(sock, 1)
        assert status == 200, body
        assert body.endswith(EXPECTED.tobytes())


def test_a_shape_that_arrives_last(resident: Resident) -> None:
    """A call with a known head starts with the shape of the last time, and completes with the one in its own body."""
    shape = list(EXPECTED.shape)
    with connected(resident.url) as sock:
        head, body = binary(shape=shape)
        sock.sendall(head + body)
        ((status, found),) = replies(sock, 1)
        assert status == 200, found
        sock.sendall(send_some(resident, sock, (head, body)))
        assert replies(sock, 1)[0][1].endswith(EXPECTED.tobytes())
        wrong = binary(shape=[32, 32, 5, 5])
        assert wrong[0] == head
        sock.sendall(send_some(resident, sock, wrong))
        ((status, found),) = replies(sock, 1)
        assert status in {400, 422}, found
    resident.until(lambda: at_rest(resident))
