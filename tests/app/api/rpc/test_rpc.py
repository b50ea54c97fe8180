"""The `/rpc` API of the real service: operations by every name and form, streams, batches, errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonrpclib
import pytest
from jsonrpclib.jsonrpc import MultiCall, ProtocolError, TransportError

from schemas.tables import OPERATIONS, find_operation
from tests.app import graph
from tests.app.samples import CASES, JSON, SMALL, SSE, Array, document, messages, read_events, read_tensor, same_bits
from tests.live import LiveService
from tests.problems import Case

MEGABYTES = Case(
    n=4, src_channels=64, dst_channels=256, src_spatial=(40, 40), dst_spatial=(40, 40), kernel=(3, 3),
    pads_begin=(1, 1), pads_end=(1, 1),
)  # fmt: skip


def rpc(http: httpx.Client, body: Any, accept: str = JSON) -> httpx.Response:
    """Post a JSON-RPC body."""
    return http.post("/rpc", json=body, headers={"accept": accept})


def request(method: str, params: Any, request_id: Any = 1) -> dict[str, Any]:
    """Return a request."""
    return {"jsonrpc": "2.0", "method": method, "params": params, "id": request_id}


def output_of(answer: dict[str, Any]) -> Array:
    """Return the one output of an answer."""
    (tensor,) = answer["result"]["outputs"].values()
    return read_tensor(tensor)


@pytest.mark.parametrize("name", [name for operation in OPERATIONS for name in operation.names])
@pytest.mark.parametrize("by_position", [False, True])
def test_every_name_is_a_method(http: httpx.Client, name: str, by_position: bool) -> None:
    """Every operation under every alias returns the oracle's bits, with params by name or by position."""
    case = CASES[find_operation(name).operation.name]
    inputs = case.inputs()
    params: Any = document(case, inputs, encoding="base64")
    if by_position:
        params = [params["attributes"], params["inputs"], params["options"]]
    answer = rpc(http, request(name, params, "an id")).json()
    assert (answer["jsonrpc"], answer["id"], answer["result"]["op"]) == ("2.0", "an id", name)
    assert same_bits(output_of(answer), case.expected(inputs))


@pytest.mark.parametrize("as_input", [False, True])
def test_a_dumped_op_is_a_call(http: httpx.Client, as_input: bool) -> None:
    """An op as dumped by oneDNN Graph, with data in its inputs, is accepted as params; a shape's input has no data."""
    inputs = SMALL.inputs()
    tensors = list(document(SMALL, inputs)["inputs"].values())
    if as_input:
        tensors.append({"id": 3, "dtype": "s32", "shape": [4]})
    dump = {"kind": SMALL.op, "attrs": graph.wrapped(SMALL.attributes()), "inputs": tensors, "outputs": []}
    for params in (dump, [dump], {"attributes": dump}):
        assert same_bits(output_of(rpc(http, request(SMALL.op, params)).json()), SMALL.expected(inputs))
    for checked in (dump, {"op": SMALL.op, "attributes": dump}):
        result = rpc(http, request("ops.validate", checked)).json()["result"]
        assert result["outputs"]["diff_weights"]["shape"] == list(SMALL.weights_shape)


def test_megabytes_of_base64_arrive(http: httpx.Client) -> None:
    """Tensors of several megabytes work in one JSON-RPC call, with escaped slashes too."""
    inputs = MEGABYTES.inputs()
    body = json.dumps(request(MEGABYTES.op, document(MEGABYTES, inputs))).replace("/", "\\/")
    answer = http.post("/rpc", content=body.encode()).json()
    assert same_bits(output_of(answer), MEGABYTES.expected(inputs))


def test_a_stream_is_progress_tiles_and_the_response(http: httpx.Client) -> None:
    """All messages of an event stream refer to the request's id, and the last is its response, with a checksum."""
    inputs = SMALL.inputs()
    response = rpc(http, request(SMALL.op, document(SMALL, inputs), 2.5), SSE)
    assert response.headers["content-type"] == SSE
    *notifications, last = messages(response.text)
    assert notifications[0]["method"] == "notifications/progress"
    assert {entry["params"].get("progressToken", 2.5) for entry in notifications} == {2.5}
    assert {entry["params"].get("requestId", 2.5) for entry in notifications} == {2.5}
    assert last["id"] == 2.5
    assert set(last["result"]["outputs"]["diff_weights"]) == {"dtype", "shape", "sha256"}
    assert same_bits(read_events(response), SMALL.expected(inputs))


@pytest.mark.parametrize("accept", [JSON, SSE])
def test_a_mixed_batch_is_answered_item_by_item(http: httpx.Client, accept: str) -> None:
    """Valid calls, invalid calls, notifications and rubbish in one batch don't affect one another."""
    inputs = SMALL.inputs()
    good = document(SMALL, inputs)
    bad = json.loads(json.dumps(good))
    bad["inputs"]["src"]["data"] = "!" * 4000
    short = json.loads(json.dumps(good))
    short["inputs"]["src"]["data"] = "AAAA" * 1000
    notification = {"jsonrpc": "2.0", "method": SMALL.op, "params": good}
    batch = [
        *(request(SMALL.op, good, "a"), request(SMALL.op, bad, "b"), notification, request("ops.list", [], "c"), 5),
        *(request(SMALL.op, short, "d"), request("nothing", {}, "e"), request(SMALL.op, good, "f")),
    ]
    response = rpc(http, batch, accept)
    found = response.json() if accept == JSON else list(messages(response.text))
    answers = {entry["id"]: entry for entry in found if "id" in entry}
    assert len([entry for entry in found if "id" in entry]) == 7
    codes = {key: answers[key]["error"]["code"] for key in ("b", None, "d", "e")}
    assert codes == {"b": -32602, None: -32600, "d": -32602, "e": -32601}
    assert answers["b"]["error"]["data"]["errors"][0]["loc"] == ["inputs", "src", "data"]
    for key in ("a", "f"):
        if accept == JSON:
            assert same_bits(output_of(answers[key]), SMALL.expected(inputs))
        else:
            assert answers[key]["result"]["outputs"]["diff_weights"]["sha256"]
    if accept == JSON:
        assert [entry["id"] for entry in found] == ["a", "b", "c", None, "d", "e", "f"]


@pytest.mark.parametrize("accept", [JSON, SSE])
def test_notifications_have_no_answer(http: httpx.Client, accept: str) -> None:
    """A single notification, and a batch of only notifications, get 204 and no body."""
    notification = {"jsonrpc": "2.0", "method": SMALL.op, "params": document(SMALL, SMALL.inputs())}
    for body in (notification, [notification, {"jsonrpc": "2.0", "method": "nothing"}]):
        response = rpc(http, body, accept)
        assert (response.status_code, response.content) == (204, b"")


def test_every_method_is_in_the_document(http: httpx.Client) -> None:
    """Every method that rpc.discover lists can be called."""
    methods = rpc(http, request("rpc.discover", [])).json()["result"]["methods"]
    for method in methods:
        error = rpc(http, request(method["name"], {"no such parameter": 1})).json()["error"]
        assert error["code"] == -32602, method["name"]


@pytest.mark.parametrize("by_position", [False, True])
def test_validate_computes_nothing(http: httpx.Client, by_position: bool) -> None:
    """ops.validate needs only shapes, and describes the call."""
    inputs = {name: {"dtype": "f32", "shape": list(shape)} for name, shape in SMALL.input_shapes.items()}
    params: Any = {"op": SMALL.op, "attributes": SMALL.attributes(), "inputs": inputs}
    if by_position:
        params = list(params.values())
    result = rpc(http, request("ops.validate", params)).json()["result"]
    assert result["outputs"] == {"diff_weights": {"dtype": "f32", "shape": list(SMALL.weights_shape)}}
    assert result["resolved"]["strides"] == [2, 2]
    assert result["plan"]["gmac"] == pytest.approx(SMALL.macs / 1e9)


@pytest.mark.parametrize(
    ("method", "params", "loc"),
    [
        ("ops.describe", {}, ["op"]),
        ("ops.describe", {"op": 5}, ["op"]),
        ("ops.describe", {"op": "Deconvolution"}, ["op"]),
        ("ops.validate", {"op": "x"}, ["op"]),
        ("ops.validate", {"op": SMALL.op, "attributes": {"strides": [0, 1]}}, ["attributes", "strides", 0]),
        ("ops.validate", {"op": SMALL.op, "inputs": {"src": {"dtype": "f32"}}}, ["inputs", "src", "shape"]),
        (SMALL.op, {"kind": "MatMul", "attrs": {}, "inputs": [], "outputs": []}, ["attributes", "kind"]),
        (SMALL.op, [{}, {}, {}, {}], ["params"]),
        (SMALL.op, {}, ["attributes", "strides"]),
    ],
)
def test_bad_params_are_listed_by_place(http: httpx.Client, method: str, params: Any, loc: list[Any]) -> None:
    """Invalid params are -32602, and data.errors has the place of each error."""
    error = rpc(http, request(method, params)).json()["error"]
    assert error["code"] == -32602
    assert loc in [entry["loc"] for entry in error["data"]["errors"]]


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ('Application/JSON; charset="UTF-8"', 200),
        ("application/json-rpc", 200),
        (None, 200),
        ("application/x-www-form-urlencoded", 415),
    ],
)
def test_content_types(http: httpx.Client, content_type: str | None, status: int) -> None:
    """JSON is read under both of its media types, or without one; everything else is a 415 problem."""
    headers = {} if content_type is None else {"content-type": content_type}
    response = http.post("/rpc", content=json.dumps(request("ops.list", [])).encode(), headers=headers)
    assert response.status_code == status
    if status == 415:
        assert response.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("accept", "kind"),
    [("application/json-rpc", "application/json-rpc"), ("application/json, text/event-stream", JSON), ("text/*", SSE)],
)
def test_the_reply_is_in_the_form_asked_for(http: httpx.Client, accept: str, kind: str) -> None:
    """Accept selects JSON or a stream; a client that accepts both gets JSON."""
    assert rpc(http, request("ops.list", []), accept).headers["content-type"] == kind


def test_other_accept_types_and_methods_are_refused(http: httpx.Client) -> None:
    """No acceptable form is 406, and GET is 405."""
    assert rpc(http, request("ops.list", []), "image/png").status_code == 406
    got = http.get("/rpc")
    assert (got.status_code, got.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"\xef\xbb\xbf" + b'{"jsonrpc": "2.0", "method": "x", "id": 1}', -32601),
        (b'{"jsonrpc": "2.0", "method": "x", "id": 1, "id": 2}', -32601),
        (b'{"jsonrpc": "2.0", "method": "x", "params": {"data": "' + b"A" * 10**6, -32700),
        (b'{"jsonrpc": "2.0", "method": "x", "params": {"data": "' + b"\\" * (10**6 + 1) + b'"}}', -32700),
        (b'{"jsonrpc": "2.0", "method": "' + b"x" * 2 * 10**6 + b'", "id": 1}', -32601),
        (b'{"jsonrpc": "2.0", "method": "x", "id": 1, "npy": "' + b"!" * 10**6 + b'"}', -32601),
    ],
)
def test_hostile_bodies_are_answered(http: httpx.Client, body: bytes, code: int) -> None:
    """Malicious bodies get a JSON-RPC error, and the next call works."""
    response = http.post("/rpc", content=body, headers={"content-type": JSON})
    assert response.status_code == 200
    assert response.json()["error"]["code"] == code
    assert "result" in rpc(http, request("ops.list", [])).json()


@pytest.fixture
def client(service: LiveService) -> Iterator[Any]:
    """An independent JSON-RPC client that knows nothing about this service."""
    client = jsonrpclib.ServerProxy(service.url + "/rpc")
    yield client
    client("close")()


def test_an_independent_client_calls(client: Any) -> None:
    """jsonrpclib-pelix calls methods by name and by position, and parses the results."""
    inputs = SMALL.inputs()
    params = document(SMALL, inputs)
    for result in (
        client.ConvTransposeBackwardWeights(**params),
        client.ConvTransposeBackwardWeights(params["attributes"], params["inputs"]),
    ):
        (tensor,) = result["outputs"].values()
        assert same_bits(read_tensor(tensor), SMALL.expected(inputs))
    assert [entry["op"] for entry in client.ops.list()]


def test_an_independent_client_batches(client: Any) -> None:
    """jsonrpclib-pelix gets all answers of a batch, and none for a notification in it."""
    batch = MultiCall(client)
    batch.ops.describe(op="ConvTranspose")
    batch._notify.ops.list()
    batch.ops.list()
    described, listed = list(batch())
    assert described["op"] == "ConvTranspose"
    assert len(listed) == len(OPERATIONS)
    with pytest.raises(TransportError, match="204"):  # it accepts no status but 200, not even for a notification
        client._notify.ops.list()


def test_an_independent_client_reads_errors(client: Any) -> None:
    """jsonrpclib-pelix raises our errors with their codes."""
    calls: list[tuple[Callable[..., Any], dict[str, Any], int]] = [
        (client.nothing, {}, -32601),
        (client.ops.describe, {"op": "nothing"}, -32602),
        (client.ConvTranspose, {"attributes": {}, "inputs": {}}, -32602),
    ]
    for method, params, code in calls:
        with pytest.raises(ProtocolError) as caught:
            method(**params)
        assert caught.value.args[0][0] == code
