"""Calls that are no longer wanted: cancelled by a notification, or left while they wait."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread
from typing import Any

import httpx
import numpy as np
import pytest

from app.calls.cancel import Cancellations
from tests.app import graph
from tests.app.resident import Resident, resident_service
from tests.app.samples import JSON, SLOW, SMALL, SSE, document, read_tensor, rpc_request, same_bits

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def cancel(http: httpx.Client, request_id: Any, **headers: str) -> None:
    """Send the notification."""
    params = {"requestId": request_id, "reason": "not wanted"}
    body = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
    assert http.post("/rpc", json=body, headers=headers).status_code == 204


@contextmanager
def streaming(tight: Resident, body: Any, accept: str = SSE, **headers: str) -> Iterator[httpx.Response]:
    """Start slow calls, and wait until a worker computes."""
    with (
        httpx.Client(base_url=tight.url, timeout=60) as client,
        client.stream("POST", "/rpc", json=body, headers={"accept": accept, **headers}) as response,
    ):
        tight.until(lambda: not tight.is_idle())
        yield response


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the messages of a complete stream."""
    response.read()
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("request_id", ["mine", 7, 7.5])
@pytest.mark.parametrize("session", ["", "X-Session-ID"])
def test_a_cancelled_stream_ends_with_its_error(
    tight: Resident, tight_http: httpx.Client, request_id: Any, session: str
) -> None:
    """The work stops, and the stream's last message is -32002 with the id of the call."""
    headers = {session: "s-1"} if session else {}
    with streaming(tight, rpc_request(SLOW, SLOW.floats(), request_id, reference=True), **headers) as response:
        cancel(tight_http, request_id, **headers)
        *_, last = events(response)
    assert last["id"] == request_id
    assert (last["error"]["code"], last["error"]["data"]["code"]) == (-32002, "cancelled")


@pytest.mark.parametrize(
    ("other", "session"),
    [(1, "b"), (1, ""), *((other, "a") for other in ("other", True, "1", 1.5, 1 << 64, [1], None))],
)
def test_only_the_call_of_the_same_session_and_id_is_cancelled(
    tight: Resident, tight_http: httpx.Client, other: Any, session: str
) -> None:
    """With another id, session or none, the call goes on; JSON's `true` is no id, although Python's equals 1."""
    body = rpc_request(SLOW, SLOW.floats(), 1, reference=True)
    with streaming(tight, body, **{"X-Session-ID": "a"}) as response:
        (call,) = tight.service.calls
        cancel(tight_http, other, **({"x-session-id": session} if session else {}))
        assert not call.cancelled
        cancel(tight_http, 1, **{"x-session-id": "a"})
        *_, last = events(response)
    assert call.cancelled
    assert (last["id"], last["error"]["code"]) == (1, -32002)


def test_an_id_of_two_requests_cancels_neither() -> None:
    """Callers choose ids themselves: while two requests have the same one, it names neither of them."""
    running = Cancellations()
    with running.register("tenant", "a", 1) as first:
        with running.register("tenant", "a", 1) as second:
            running.cancel("tenant", "a", 1)
        assert (first.cancelled, second.cancelled) == (False, False)
        running.cancel("tenant", "a", 1)
    assert (first.cancelled, second.cancelled) == (True, False)


@pytest.mark.heavy
def test_a_call_of_another_address_is_not_cancelled() -> None:
    """Without keys, a call can be cancelled only from its own address."""
    elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
    # Its own service: once a service has seen a second caller, it reserves places for it.
    with (
        resident_service(workers=1) as resident,
        streaming(resident, rpc_request(SLOW, SLOW.floats(), 1, reference=True)) as response,
        httpx.Client(base_url=resident.url, transport=elsewhere, timeout=60) as other,
        httpx.Client(base_url=resident.url, timeout=60) as same,
    ):
        (call,) = resident.service.calls
        cancel(other, 1)
        assert not call.cancelled
        cancel(same, 1)
        assert events(response)[-1]["error"]["code"] == -32002


def call() -> dict[str, Any]:
    """Return the request of a slow call."""
    return rpc_request(SLOW, SLOW.floats(), "mine", reference=True)


def verification() -> dict[str, Any]:
    """Return the request to verify the result of a call that is slow, but small enough for the limits."""
    case = replace(SLOW, dtype="f16", src_channels=24, dst_channels=64)
    params = document(case, case.floats() | {"diff_weights": np.zeros(case.output_shape, np.float16)})
    return {"jsonrpc": "2.0", "method": "ops.verify", "params": {"op": case.op, **params}, "id": "mine"}


def graph_of_one() -> dict[str, Any]:
    """Return the request for a graph of one slow node."""
    sent = document(SLOW, SLOW.floats(), reference=True)
    tensors = {str(number): tensor for number, tensor in enumerate(sent["inputs"].values())}
    params = {"graph": graph.of_case(SLOW), "inputs": tensors, "options": sent["options"]}
    return {"jsonrpc": "2.0", "method": "graph.run", "params": params, "id": "mine"}


@pytest.mark.parametrize("accept", [JSON, SSE])
@pytest.mark.parametrize("slow", [call, verification, graph_of_one], ids=["call", "verification", "graph"])
def test_one_of_a_batch_can_be_cancelled(
    tight: Resident, tight_http: httpx.Client, slow: Callable[[], dict[str, Any]], accept: str
) -> None:
    """It ends with the error of its id, beside another call of its batch that is answered, in JSON and as events."""
    inputs, answers = SMALL.inputs(), []
    batch = [rpc_request(SMALL, inputs, "small"), slow()]
    thread = Thread(
        target=lambda: answers.append(httpx.post(f"{tight.url}/rpc", json=batch, headers={"accept": accept}))
    )
    thread.start()
    tight.until(lambda: len(tight.service.calls) == 1 and not tight.is_idle())
    cancel(tight_http, "mine")
    thread.join(60)
    (response,) = answers
    found = events(response) if accept == SSE else response.json()
    last = {message["id"]: message for message in found if "id" in message}
    assert (last["mine"]["error"]["code"], last["mine"]["error"]["data"]["code"]) == (-32002, "cancelled")
    output = last["small"]["result"]["outputs"]["diff_weights"]
    assert "sha256" in output if accept == SSE else same_bits(read_tensor(output), SMALL.expected(inputs))


def test_cancelled_is_not_a_method(tight_http: httpx.Client) -> None:
    """`notifications/cancelled` with an id is a method that does not exist."""
    body = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {}, "id": 1}
    assert tight_http.post("/rpc", json=body).json()["error"]["code"] == -32601
