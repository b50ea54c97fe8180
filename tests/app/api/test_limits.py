"""Limits, deadlines, clients that disconnect, and a full queue, on a service in this process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import httpx
import numpy as np
import pytest

from app.pool.buffers import size_class
from tests.app.bare import connected, multipart, replies, rest_connection, rpc_connection, written
from tests.app.everywhere import FORMS
from tests.app.resident import Resident
from tests.app.samples import (
    FRAMES,
    HEAVY,
    JSON,
    NPY,
    SLOW,
    SMALL,
    SSE,
    Array,
    document,
    doubled,
    frames,
    messages,
    parts,
    post,
    problem,
    read,
    read_tensor,
    request_object,
    rpc_request,
    same_bits,
)
from tests.hostile import wire

PATH = f"/v1/ops/{SMALL.op}"

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.parametrize("accept", FORMS)
def test_a_deadline_that_has_passed_is_504(tight: Resident, accept: str) -> None:
    """If a deadline of one millisecond passes before the last byte arrives, the call gets a 504."""
    head, body = multipart(SMALL, accept, deadline_ms=1)
    with connected(tight.url) as sock:
        sock.sendall(head + body[:-1])
        tight.until(lambda: tight.service.admission.requests == 1)
        passed = time.monotonic() + 0.002
        tight.until(lambda: time.monotonic() > passed)
        sock.sendall(body[-1:])
        ((status, reply),) = replies(sock, 1)
    assert status == 504
    assert json.loads(reply)["code"] == "deadline_exceeded"


def test_a_declared_length_over_the_limit_is_413_before_the_body(tight: Resident) -> None:
    """The answer comes before any byte of the body."""
    lines = [b"content-length: %d" % (1 << 40), b"content-type: application/json", b"expect: 100-continue"]
    with connected(tight.url) as sock:
        sock.sendall(wire.head(PATH, *lines))
        reply = wire.read_all(sock)
    assert wire.status(reply) == 413
    assert b"\r\nconnection: close\r\n" in reply
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["reason"] == "json"


@pytest.mark.parametrize("path", [PATH, "/rpc"])
@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit(tight_http: httpx.Client, path: str, declared: bool) -> None:
    """A body that is too long is cut off, and a client that sends all of it before it reads can read why."""

    def pieces() -> Iterator[bytes]:
        yield b'{"inputs": {"src": {"dtype": "f32", "data": "'
        yield from [b"A" * 65536] * 128

    content = b" " * (8 << 20) if declared else pieces()
    response = tight_http.post(path, content=content, headers={"content-type": JSON})
    if path == "/rpc":
        assert (response.status_code, response.json()["error"]["code"]) == (200, -32003)
    else:
        assert problem(response, 413, "too_large")["limit"] == 4 << 20


@pytest.mark.parametrize("wrong", [{"attributes": {"strides": [0, 1]}}, {"options": {"encoding": "x"}}])
def test_wrong_attributes_are_refused_while_tensors_come(tight: Resident, wrong: dict[str, Any]) -> None:
    """The error is sent once attributes and options are read, without waiting for the tensors."""
    request = request_object(SMALL) | {"options": {}}
    request = {name: value | wrong.get(name, {}) for name, value in request.items()}
    files: Any = [("request", ("r", json.dumps(request), JSON)), *parts(SMALL, SMALL.inputs())[1:]]
    head, text = written(httpx.Request("POST", f"http://localhost{PATH}", files=files))
    with connected(tight.url) as sock:
        sock.sendall(head + text[: text.index(b'name="src"') + 60])
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 422 ")


@pytest.mark.parametrize("accept", [JSON, SSE])
def test_a_client_that_leaves_stops_its_batch(tight: Resident, accept: str) -> None:
    """If the connection closes during the computation, the work stops and everything is released."""
    listed = {"jsonrpc": "2.0", "method": "ops.list", "id": 2}
    with rpc_connection(tight.url, [rpc_request(HEAVY, reference=True), listed], accept):
        tight.until(lambda: len(tight.service.calls) == 1)
    tight.run(tight.service.admission.idle(), 5.0)


@pytest.mark.parametrize("accept", [SSE, FRAMES, NPY])
def test_a_client_that_does_not_read_does_not_stop_the_others(tight: Resident, accept: str) -> None:
    """While one reader stalls, another call is answered."""
    with rest_connection(tight.url, SMALL, accept), httpx.Client(base_url=tight.url, timeout=60) as client:
        inputs = SMALL.inputs()
        assert same_bits(read(post(client, SMALL, inputs)), SMALL.expected(inputs))


def test_a_client_that_does_not_read_holds_no_text(tight: Resident) -> None:
    """While it stalls, its call counts with its tensors; the text of its body has been freed."""
    wide = doubled(400, 1, 4)
    request = httpx.Request("POST", f"{tight.url}/v1/ops/{wide.op}", json=document(wide, wide.inputs()))
    head, body = written(request)
    tight.service.segments.trim()  # a larger idle block would count as a whole
    with connected(tight.url, little_room=True) as sock:
        sock.sendall(head + body)
        assert sock.recv(1 << 10).startswith(b"HTTP/1.1 200 ")
        assert tight.service.segments.stats().used < size_class(4 * prod(wide.dst_shape)) + len(body)
        assert tight.service.calls


@pytest.mark.parametrize("accept", [JSON, SSE])
def test_a_full_queue(tight: Resident, tight_http: httpx.Client, accept: str) -> None:
    """Calls beyond the queue's length are rejected, told when to retry, and accepted again later."""
    heavy = rpc_request(replace(HEAVY, n=2, dtype="f64"), reference=True)  # outlasts the arrival of the second
    with rpc_connection(tight.url, heavy, SSE), rpc_connection(tight.url, heavy, SSE):
        tight.until(lambda: len(tight.service.calls) == 2)
        refused = post(tight_http, SMALL, SMALL.inputs(), accept)
        answer = tight_http.post("/rpc", json=rpc_request(SMALL, request_id="x"), headers={"accept": accept})
    assert problem(refused, 503, "overloaded")["reason"] == "queue"
    assert int(refused.headers["retry-after"]) >= 1
    found = answer.json() if accept == JSON else next(messages(answer.text))
    assert (found["id"], found["error"]["code"], found["error"]["data"]["reason"]) == ("x", -32000, "queue")
    assert found["error"]["data"]["retry_after"] > 0
    tight.run(tight.service.admission.idle(), 5.0)
    assert post(tight_http, SMALL, SMALL.inputs()).status_code == 200


@pytest.mark.parametrize("accept", [JSON, SSE])
def test_a_deadline_during_the_work_of_json_rpc(tight_http: httpx.Client, accept: str) -> None:
    """A call that misses its deadline is -32001; in a stream that comes after what was already sent."""
    body = rpc_request(HEAVY, request_id=None, deadline_ms=5, reference=True)
    response = tight_http.post("/rpc", json=body, headers={"accept": accept})
    answer = response.json() if accept == JSON else list(messages(response.text))[-1]
    assert (answer["id"], answer["error"]["code"]) == (None, -32001)


def test_a_deadline_during_the_work(tight_http: httpx.Client) -> None:
    """Before the reply has begun it is a 504, then the JSON-RPC response that ends the events, or the last frame."""

    def late(accept: str) -> httpx.Response:
        return post(tight_http, SLOW, SLOW.floats(), accept, deadline_ms=100, reference=True)

    problem(late(JSON), 504, "deadline_exceeded")
    events = late(SSE)
    *_, last = messages(events.text)
    assert (events.status_code, last["id"]) == (200, events.headers["x-request-id"])
    assert (last["error"]["code"], last["error"]["data"]["code"]) == (-32001, "deadline_exceeded")
    *_, (end, _) = frames(late(FRAMES).content)
    assert (end["type"], end["code"]) == ("error", "deadline_exceeded")


def test_a_deadline_during_an_npy_reply_breaks_it(tight_http: httpx.Client) -> None:
    """A .npy reply that can't be completed is shorter than its Content-Length, and never wrong."""
    inputs = HEAVY.inputs()
    expected = HEAVY.expected(inputs)
    outcomes: list[str] = []
    for deadline_ms in (100, 200, 400, 800, 1600, 3200, 20_000):
        outcomes.append(_outcome(tight_http, deadline_ms, inputs, expected))
        if outcomes[-1] == "right":
            break
    assert outcomes[-1] == "right"
    assert set(outcomes) <= {"right", "broken", "deadline_exceeded"}


def _outcome(client: httpx.Client, deadline_ms: int, inputs: dict[str, Array], expected: Array) -> str:
    try:
        response = post(client, HEAVY, inputs, NPY, deadline_ms=deadline_ms)
    except httpx.RemoteProtocolError:
        return "broken"
    if response.status_code != 200:
        return str(response.json()["code"])
    return "right" if same_bits(read(response), expected) else "wrong"


def test_results_outlive_their_call(tight_http: httpx.Client) -> None:
    """A slow reader gets its own bytes, although its call's memory could have been reused."""
    wide = doubled(180, 4, 2)
    inputs = wide.inputs()
    expected = wide.expected(inputs)
    url = f"/v1/ops/{wide.op}"
    with tight_http.stream("POST", url, files=parts(wide, inputs), headers={"accept": NPY}) as slow:
        for _ in range(3):
            other = replace(wide, seed=9)
            values = other.inputs()
            assert same_bits(read(post(tight_http, other, values, NPY)), other.expected(values))
        body = b"".join(slow.iter_raw())
    assert np.frombuffer(body[-expected.nbytes :], "<f4").tobytes() == expected.tobytes()


def test_a_tensor_over_the_memory_limit_costs_only_its_call(tight_http: httpx.Client) -> None:
    """In a batch a tensor that claims too much memory is rejected; the batch may be longer than the queue."""
    inputs = SMALL.inputs()
    greedy = rpc_request(SMALL, inputs, 0)
    greedy["params"]["inputs"]["src"]["shape"] = [1 << 28]
    batch = [greedy, *(rpc_request(SMALL, inputs, number) for number in range(1, 7))]
    refused, *answers = tight_http.post("/rpc", json=batch).json()
    assert (refused["id"], refused["error"]["code"]) == (0, -32602)
    assert [answer["id"] for answer in answers] == list(range(1, 7))
    for answer in answers:
        (tensor,) = answer["result"]["outputs"].values()
        assert same_bits(read_tensor(tensor), SMALL.expected(inputs))
