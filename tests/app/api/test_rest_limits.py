"""Limits, deadlines, clients that disconnect, and a full queue, on a service in this process."""

from __future__ import annotations

import base64
import http.client
import json
import time
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from tests.app.bare import connected, multipart, replies, rest_connection, written
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
    request_object,
    same_bits,
)
from tests.problems import Case

FORMS = [JSON, NPY, SSE, FRAMES]


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
    address = urlsplit(tight.url)
    with closing(http.client.HTTPConnection(address.netloc, timeout=10)) as client:
        client.putrequest("POST", f"/v1/ops/{SMALL.op}")
        client.putheader("Content-Length", str(1 << 40))
        client.putheader("Content-Type", JSON)
        client.putheader("Expect", "100-continue")
        client.endheaders()
        with client.getresponse() as response:
            assert response.status == 413
            assert json.load(response)["reason"] == "json"
            assert response.headers["connection"] == "close"


def test_a_chunked_body_over_the_limit_is_413(tight_http: httpx.Client) -> None:
    """A body without a declared length is cut off at the limit, and the client can read why."""
    head = b'{"inputs": {"src": {"dtype": "f32", "data": "'
    pieces = (b"A" * 65536 if index else head for index in range(100))
    response = tight_http.post(f"/v1/ops/{SMALL.op}", content=pieces, headers={"content-type": JSON})
    assert problem(response, 413, "too_large")["limit"] == 4 << 20


def test_a_refused_body_is_drained_so_that_the_answer_can_be_read(tight_http: httpx.Client) -> None:
    """A client that sends megabytes before it reads gets the rejection, not a reset."""
    response = tight_http.post(f"/v1/ops/{SMALL.op}", content=b" " * (8 << 20), headers={"content-type": JSON})
    problem(response, 413, "too_large")


@pytest.mark.parametrize(
    ("reason", "spatial", "channels", "loc"),
    [
        ("work", (4000, 4000), 64, ["inputs", "src"]),
        ("memory", (1200, 1200), 4, ["inputs", "src"]),
        ("memory", (8, 8), 4096, ["outputs", "diff_weights"]),
    ],
)
def test_work_and_memory_have_limits(
    tight_http: httpx.Client, reason: str, spatial: tuple[int, int], channels: int, loc: list[str]
) -> None:
    """A call that is too expensive is rejected based on its shapes, with the reason, both numbers and the tensor."""
    attributes = {
        "strides": [1, 1], "dilations": [1, 1], "pads_begin": [1, 1], "pads_end": [1, 1], "data_format": "NCX",
        "weights_format": "OIX", "weights_shape": [channels, channels, 3, 3],
    }  # fmt: skip
    tensor = {"dtype": "f32", "shape": [1, channels, *spatial]}
    body = {"attributes": attributes, "inputs": {"src": tensor, "diff_dst": tensor}}
    found = problem(tight_http.post("/v1/ops/ConvolutionBackwardWeights/validate", json=body), 413, "too_large")
    assert found["reason"] == reason
    assert found["value"] > found["limit"]
    assert found["loc"] == loc
    assert f": {loc[1]} is (" in found["detail"]


def test_a_tensor_of_unknown_size_that_is_too_large_is_named(tight_http: httpx.Client) -> None:
    """A .npy header over the limit is reported for its tensor, in each form."""
    long = b"\x93NUMPY\x02\x00" + (1 << 24).to_bytes(4, "little") + bytes(800)
    body = document(SMALL, SMALL.inputs())
    body["inputs"]["diff_dst"] = {"npy": base64.b64encode(long).decode()}
    files = [
        part if part[0] != "diff_dst" else ("diff_dst", ("x.npy", long, NPY)) for part in parts(SMALL, SMALL.inputs())
    ]
    for sent in ({"json": body}, {"files": files}):
        found = problem(tight_http.post(f"/v1/ops/{SMALL.op}", **sent), 413, "too_large")
        assert found["loc"] == ["inputs", "diff_dst"]
        assert found["detail"].startswith("diff_dst: a .npy header must have at most ")


@pytest.mark.parametrize("wrong", [{"attributes": {"strides": [0, 1]}}, {"options": {"encoding": "x"}}])
def test_wrong_attributes_are_refused_while_tensors_come(tight: Resident, wrong: dict[str, Any]) -> None:
    """The error is sent once attributes and options are read, without waiting for the tensors."""
    request = request_object(SMALL) | {"options": {}}
    request = {name: value | wrong.get(name, {}) for name, value in request.items()}
    files: Any = [("request", ("r", json.dumps(request), JSON)), *parts(SMALL, SMALL.inputs())[1:]]
    head, text = written(httpx.Request("POST", f"http://localhost/v1/ops/{SMALL.op}", files=files))
    with connected(tight.url) as sock:
        sock.sendall(head + text[: text.index(b'name="src"') + 60])
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 422 ")


@pytest.mark.parametrize("accept", FORMS)
def test_a_client_that_leaves_stops_its_call(tight: Resident, accept: str) -> None:
    """If the connection closes during the computation, the work stops and everything is released."""
    with rest_connection(tight.url, SLOW, accept, reference=True):
        tight.until(lambda: bool(tight.service.calls) and tight.service.engine.snapshot()["jobs"] == 1)
    tight.run(tight.service.admission.idle(), 5.0)


def test_a_client_that_leaves_while_sending_holds_nothing(tight: Resident) -> None:
    """If the connection closes in the middle of the body, the memory for its tensors is released."""
    head, body = multipart(HEAVY, JSON)
    with connected(tight.url) as sock:
        sock.sendall(head + body[: len(body) // 2])
        tight.until(lambda: tight.service.segments.stats().used > 0)


@pytest.mark.parametrize("accept", [SSE, FRAMES, NPY])
def test_a_client_that_does_not_read_does_not_stop_the_others(tight: Resident, accept: str) -> None:
    """While one reader stalls, another call is answered."""
    with rest_connection(tight.url, SMALL, accept), httpx.Client(base_url=tight.url) as client:
        inputs = SMALL.inputs()
        assert same_bits(read(post(client, SMALL, inputs)), SMALL.expected(inputs))


def test_a_full_queue_is_503_with_retry_after(tight: Resident, tight_http: httpx.Client) -> None:
    """Calls beyond the queue's length are rejected before their body, and accepted again later."""
    with rest_connection(tight.url, SLOW, SSE, reference=True), rest_connection(tight.url, SLOW, SSE, reference=True):
        tight.until(lambda: len(tight.service.calls) == 2)
        response = post(tight_http, SMALL, SMALL.inputs())
        assert problem(response, 503, "overloaded")["reason"] == "queue"
        assert int(response.headers["retry-after"]) >= 1
    tight.run(tight.service.admission.idle(), 5.0)
    assert post(tight_http, SMALL, SMALL.inputs()).status_code == 200


def test_a_deadline_during_the_work_is_504(tight_http: httpx.Client) -> None:
    """A call that misses its deadline before any of its reply was sent gets a 504."""
    response = post(tight_http, SLOW, SLOW.floats(), JSON, deadline_ms=100, reference=True)
    problem(response, 504, "deadline_exceeded")


def test_a_deadline_during_an_event_stream_is_its_response(tight_http: httpx.Client) -> None:
    """After the first event an error is the JSON-RPC response at the end of the stream."""
    response = post(tight_http, SLOW, SLOW.floats(), SSE, deadline_ms=100, reference=True)
    assert response.status_code == 200
    *_, last = messages(response.text)
    assert last["error"]["code"] == -32001
    assert last["error"]["data"]["code"] == "deadline_exceeded"
    assert last["id"] == response.headers["x-request-id"]


def test_a_deadline_during_a_tensor_stream_is_an_error_frame(tight_http: httpx.Client) -> None:
    """After the first frame an error is the last frame."""
    response = post(tight_http, SLOW, SLOW.floats(), FRAMES, deadline_ms=100, reference=True)
    *_, (last, _) = frames(response.content)
    assert (last["type"], last["code"]) == ("error", "deadline_exceeded")


def test_a_deadline_during_an_npy_reply_breaks_it(tight: Resident) -> None:
    """A .npy reply that can't be completed is shorter than its Content-Length, and never wrong."""
    inputs = HEAVY.inputs()
    expected = HEAVY.expected(inputs)
    outcomes: list[str] = []
    with httpx.Client(base_url=tight.url, timeout=60) as client:
        for deadline_ms in (100, 200, 400, 800, 1600, 3200, 20_000):
            outcomes.append(_outcome(client, deadline_ms, inputs, expected))
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


WIDE = doubled(180, 4, 2)


def test_results_outlive_their_call(tight: Resident) -> None:
    """A slow reader gets its own bytes, although its call's memory could have been reused."""
    inputs = WIDE.inputs()
    expected = WIDE.expected(inputs)
    with httpx.Client(base_url=tight.url, timeout=60) as client:
        url = f"/v1/ops/{WIDE.op}"
        with client.stream("POST", url, files=parts(WIDE, inputs), headers={"accept": NPY}) as slow:
            for _ in range(3):
                other = Case(**{**WIDE.__dict__, "seed": 9})
                values = other.inputs()
                assert same_bits(read(post(client, other, values, NPY)), other.expected(values))
            body = b"".join(slow.iter_raw())
    assert np.frombuffer(body[-expected.nbytes :], "<f4").tobytes() == expected.tobytes()
