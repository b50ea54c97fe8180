"""The `/rpc` API at its limits: clients that disconnect, a full queue, deadlines, bodies and calls too large."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from tests.app.bare import rpc_connection
from tests.app.resident import Resident
from tests.app.samples import HEAVY, JSON, SMALL, SSE, messages, read_tensor, rpc_request, same_bits

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.parametrize("accept", [JSON, SSE])
@pytest.mark.parametrize("batch", [False, True])
def test_a_client_that_leaves_stops_its_calls(tight: Resident, accept: str, batch: bool) -> None:
    """If the connection closes during the computation, the work stops and everything is released."""
    body = rpc_request(HEAVY, reference=True)
    listed = {"jsonrpc": "2.0", "method": "ops.list", "id": 2}
    with rpc_connection(tight.url, [body, listed] if batch else body, accept):
        tight.until(lambda: len(tight.service.calls) == 1)
    tight.run(tight.service.admission.idle(), 5.0)


def test_a_client_that_leaves_while_sending_holds_nothing(tight: Resident) -> None:
    """If the connection closes in the middle of the body, the memory for its tensors is released."""
    with rpc_connection(tight.url, rpc_request(HEAVY), JSON, share=0.5):
        tight.until(lambda: tight.service.segments.stats().used > 0)


@pytest.mark.parametrize("accept", [JSON, SSE])
def test_a_full_queue_is_answered_under_the_calls_id(tight: Resident, tight_http: httpx.Client, accept: str) -> None:
    """Calls beyond the queue's length are -32000 with retry_after, and are accepted again later."""
    heavy = rpc_request(replace(HEAVY, n=2, dtype="f64"), reference=True)  # outlasts the arrival of the second
    with rpc_connection(tight.url, heavy, SSE), rpc_connection(tight.url, heavy, SSE):
        tight.until(lambda: len(tight.service.calls) == 2)
        response = tight_http.post("/rpc", json=rpc_request(SMALL, request_id="x"), headers={"accept": accept})
        answer = response.json() if accept == JSON else next(messages(response.text))
        assert (answer["id"], answer["error"]["code"]) == ("x", -32000)
        assert answer["error"]["data"]["retry_after"] > 0
        assert answer["error"]["data"]["reason"] == "queue"
    tight.run(tight.service.admission.idle(), 5.0)
    inputs = SMALL.inputs()
    answer = tight_http.post("/rpc", json=rpc_request(SMALL, inputs)).json()
    (tensor,) = answer["result"]["outputs"].values()
    assert same_bits(read_tensor(tensor), SMALL.expected(inputs))


@pytest.mark.parametrize("accept", [JSON, SSE])
def test_a_deadline_during_the_work_is_the_response(tight_http: httpx.Client, accept: str) -> None:
    """A call that misses its deadline is -32001; in a stream that comes after what was already sent."""
    body = rpc_request(HEAVY, request_id=None, deadline_ms=5, reference=True)
    response = tight_http.post("/rpc", json=body, headers={"accept": accept})
    answer = response.json() if accept == JSON else list(messages(response.text))[-1]
    assert (answer["id"], answer["error"]["code"]) == (None, -32001)


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_a_json_rpc_error(tight_http: httpx.Client, declared: bool) -> None:
    """Too many bytes are -32003 with status 200, and the client can read that even if it sends all of them."""
    body = b" " * (6 << 20)
    pieces = (body[start : start + 65536] for start in range(0, len(body), 65536))
    response = tight_http.post("/rpc", content=body if declared else pieces, headers={"content-type": JSON})
    assert response.status_code == 200
    assert response.json()["error"]["code"] == -32003


def test_a_tensor_over_the_memory_limit_costs_only_its_call(tight_http: httpx.Client) -> None:
    """In a batch a tensor that claims too much memory is rejected, and the other call is computed."""
    inputs = SMALL.inputs()
    greedy = rpc_request(SMALL, inputs, "greedy")
    greedy["params"]["inputs"]["src"]["shape"] = [1 << 28]
    answers = tight_http.post("/rpc", json=[greedy, rpc_request(SMALL, inputs, "good")]).json()
    assert answers[0]["error"]["code"] == -32602
    (tensor,) = answers[1]["result"]["outputs"].values()
    assert same_bits(read_tensor(tensor), SMALL.expected(inputs))


def test_a_batch_may_be_longer_than_the_queue(tight_http: httpx.Client) -> None:
    """A batch never uses more places at a time than the queue has."""
    inputs = SMALL.inputs()
    answers = tight_http.post("/rpc", json=[rpc_request(SMALL, inputs, number) for number in range(6)]).json()
    assert [answer["id"] for answer in answers] == list(range(6))
    for answer in answers:
        (tensor,) = answer["result"]["outputs"].values()
        assert same_bits(read_tensor(tensor), SMALL.expected(inputs))
