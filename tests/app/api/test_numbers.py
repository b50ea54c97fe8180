"""Tensors as JSON numbers, in and out, wherever base64 is allowed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from tests.app import graph
from tests.app.samples import (
    JSON,
    NPY,
    SMALL,
    SSE,
    document,
    doubled,
    npy,
    numbers,
    part,
    read,
    read_events,
    read_tensor,
    request_object,
    same_bits,
)
from tests.problems import Case

TINY = Case(src_spatial=(3,), dst_spatial=(2,), kernel=(2,))
OVER = doubled(256, 1, 5)  # 1,310,720 elements


def rpc(http: httpx.Client, method: str, params: Any) -> Any:
    """Return the answer to one request."""
    return http.post("/rpc", json={"jsonrpc": "2.0", "id": 7, "method": method, "params": params}).json()


def call(src: Any, **about: Any) -> dict[str, Any]:
    """Return a call whose `src` of shape (1, 1, 3) has this data."""
    body = document(TINY, TINY.inputs(), as_numbers=True)
    body["inputs"]["src"] = {"dtype": "f32", "shape": [1, 1, 3], **about, "data": src}
    return body


def test_event_streams(http: httpx.Client) -> None:
    """The tiles of an event stream are numbers too, in both APIs, also where they are many."""
    case = doubled(40, 2, 3)
    inputs = case.inputs()
    body = document(case, inputs, encoding="list")
    request = {"jsonrpc": "2.0", "id": 1, "method": case.op, "params": body}
    for path, sent in ((f"/v1/ops/{case.op}", body), ("/rpc", request)):
        reply = http.post(path, json=sent, headers={"accept": SSE})
        assert '"data":[[[[' in reply.text
        assert same_bits(read_events(reply), case.expected(inputs))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64"])
def test_the_checksum_of_listed_nans(http: httpx.Client, dtype: str) -> None:
    """It is that of the bits that a reader of the list has, whatever sign a NaN had."""
    case = replace(TINY, dtype=dtype)
    inputs = case.inputs()
    inputs["src"] = np.copysign(np.full_like(inputs["src"], np.nan), -1).astype(inputs["src"].dtype)
    body = document(case, inputs, encoding="list", reference=dtype == "f64")
    result = read_events(http.post(f"/v1/ops/{case.op}", json=body, headers={"accept": SSE}))
    assert np.isnan(result).all()


def test_values_that_json_has_no_numbers_for(http: httpx.Client) -> None:
    """NaN and infinities are strings, in and out, and minus zero is a number."""
    reply = http.post(
        f"/v1/ops/{TINY.op}", json=call([[["NaN", "-Infinity", -0.0]]]) | {"options": {"encoding": "list"}}
    )
    (output,) = reply.json()["outputs"].values()
    assert json.loads(json.dumps(output["data"]), parse_constant=pytest.fail)
    assert np.isnan(np.array(output["data"], np.float32)).any()
    src = {"dtype": "f32", "shape": [1, 1, 3], "data": [[["NaN", "-Infinity", "Infinity"]]]}
    inputs = {"src": src, "bias": {"dtype": "f32", "shape": [1], "data": [-0.0]}}
    body = {"attributes": {"data_format": "NCX"}, "inputs": inputs, "options": {"encoding": "list"}}
    (output,) = http.post("/v1/ops/BiasAdd", json=body).json()["outputs"].values()
    assert output["data"] == src["data"]


def test_one_wrong_tensor_fails_one_call_of_a_batch(http: httpx.Client) -> None:
    """The other calls of a batch are answered, and every wrong tensor of a call is reported."""
    wrong = call(["]", 1, {"data": [1]}])
    wrong["inputs"]["diff_dst"]["data"] = [1]
    sent = [
        {"jsonrpc": "2.0", "id": at, "method": TINY.op, "params": params}
        for at, params in enumerate([wrong, call([1, 2, 3])])
    ]
    first, second = http.post("/rpc", json=sent).json()
    assert [error["loc"][1] for error in first["error"]["data"]["errors"]] == ["src", "diff_dst"]
    assert second["result"]["op"] == TINY.op


def test_a_shape_is_a_tensor_of_integers(http: httpx.Client) -> None:
    """A shape input may be an s32 tensor of numbers."""
    body = document(SMALL, SMALL.inputs(), as_numbers=True)
    shape = body["attributes"].pop("weights_shape")
    body["inputs"]["weights_shape"] = {"dtype": "s32", "shape": [len(shape)], "data": shape}
    assert same_bits(read(http.post(f"/v1/ops/{SMALL.op}", json=body)), SMALL.expected(SMALL.inputs()))
    body["inputs"]["weights_shape"]["data"] = [shape[0] + 0.5, *shape[1:]]
    assert "must hold integers" in http.post(f"/v1/ops/{SMALL.op}", json=body).json()["errors"][0]["msg"]


@pytest.mark.parametrize("numbers_first", [True, False])
def test_in_the_request_of_a_form(http: httpx.Client, numbers_first: bool) -> None:
    """The request part of a form may have numbers for some tensors, also more than a read of the socket brings."""
    case = doubled(60, 2, 3)
    inputs = case.inputs()
    request = request_object(case)
    name, other = list(inputs) if numbers_first else reversed(list(inputs))
    request["inputs"][name] = {"dtype": "f32", "shape": list(inputs[name].shape), "data": numbers(inputs[name])}
    files = [part("request", json.dumps(request).encode(), JSON), part(other, npy(inputs[other]), NPY)]
    assert same_bits(read(http.post(f"/v1/ops/{case.op}", files=files)), case.expected(inputs))


def test_graphs(http: httpx.Client) -> None:
    """The tensors of a graph may be numbers, in and out."""
    given = graph.tensors()
    body = graph.body(given, outputs=[2, 6], options={"encoding": "list"})
    for name, array in given.items():
        body["inputs"][str(name)]["data"] = numbers(array)
    replies = [http.post("/v1/graphs", json=body).json(), rpc(http, "graph.run", body)["result"]]
    for reply in replies:
        for name, tensor in reply["outputs"].items():
            assert isinstance(tensor["data"], list)
            np.testing.assert_array_equal(read_tensor(tensor), graph.expected(given)[int(name)])


@pytest.mark.parametrize("path", ["", "/validate"])
def test_too_many_numbers_out(http: httpx.Client, path: str) -> None:
    """A result of more than a million numbers is refused before anything is computed."""
    body = request_object(OVER, encoding="list")
    for name, shape in OVER.input_shapes.items():
        body["inputs"][name]["shape"] = list(shape)
    if not path:
        body = document(OVER, OVER.inputs(), encoding="list")
    (error,) = http.post(f"/v1/ops/{OVER.op}{path}", json=body).json()["errors"]
    assert error["loc"] == ["options", "encoding"]
    assert "at most 1000000 numbers, but dst has 1310720" in error["msg"]


def test_too_many_numbers_from_a_graph(http: httpx.Client) -> None:
    """So is a graph's result."""
    shapes = [[1, 1, 1024, 1024], [1], [1, 1, 1024, 1024]]
    src, bias, dst = ({"id": at, "dtype": "f32", "shape": shape} for at, shape in enumerate(shapes))
    attributes = {"data_format": {"type": "string", "value": "NCX"}}
    node = {"id": 0, "name": "add", "kind": "BiasAdd", "attrs": attributes, "inputs": [src, bias], "outputs": [dst]}
    body = {"graph": {"graph": [node]}, "options": {"encoding": "list"}}
    (error,) = http.post("/v1/graphs/validate", json=body).json()["errors"]
    assert "at most 1000000 numbers, but 2 has 1048576" in error["msg"]
