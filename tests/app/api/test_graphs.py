"""Graphs dumped by oneDNN Graph, run by REST, JSON-RPC, the client and the command, against the oracle."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest

import convgrad
from app.telemetry.context import RequestContext
from convgrad._cli import main
from tests.app import graph
from tests.app.resident import Resident
from tests.app.samples import SSE, messages, read_tensor
from tests.live import LiveService


def test_the_client(client: convgrad.Client) -> None:
    """All tensors of the graph, intermediate ones too, have the oracle's bits; by default those that nobody reads."""
    given = graph.tensors()
    right = graph.expected(given)
    found = client.run_graph(graph.EXAMPLE, given, [6, 2, 4])
    assert list(found) == [6, 2, 4]
    for number, array in found.items():
        np.testing.assert_array_equal(array, right[number])
    assert list(client.run_graph(graph.dump(), given)) == [4, 6]


def test_json_and_rpc(http: httpx.Client) -> None:
    """REST and JSON-RPC compute the same, and describe every node."""
    given = graph.tensors(1)
    right = graph.expected(given)
    rest = http.post("/v1/graphs", json=graph.body(given, outputs=[2, 6])).json()
    params = graph.body(given, outputs=["2", "6"], options={"encoding": "npy"})
    answer = http.post("/rpc", json={"jsonrpc": "2.0", "id": 1, "method": "graph.run", "params": params}).json()
    for reply in (rest, answer["result"]):
        assert list(reply["outputs"]) == ["2", "6"]
        for name, tensor in reply["outputs"].items():
            np.testing.assert_array_equal(read_tensor(tensor), right[int(name)])
        assert [(node["id"], node["op"]) for node in reply["nodes"]] == [
            (0, "Convolution"), (1, "ConvTranspose"), (2, "ConvTransposeBackwardWeights"),
        ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_other_dtypes(client: convgrad.Client, dtype: str) -> None:
    """Every tensor between nodes is rounded to the dtype of the graph, as separate calls round it."""
    kind = np.float16 if dtype == "f16" else ml_dtypes.bfloat16
    given = {number: array.astype(kind) for number, array in graph.tensors(2).items()}
    dumped = graph.dump()
    for node in dumped["graph"]:
        for tensor in (*node["inputs"], *node["outputs"]):
            tensor["dtype"] = dtype
    found = client.run_graph(dumped, given, [2, 4])
    attributes = {"strides": [1, 1], "dilations": [1, 1], "pads_begin": [1, 1], "pads_end": [1, 1]}
    layout = {"data_format": "NCX", "weights_format": "OIX"}
    inner = client.run("Convolution", {"src": given[0], "weights": given[1]}, {**attributes, **layout})
    assert found[2].tobytes() == inner.tobytes()
    layout["weights_format"] = "IOX"
    dst = client.run("ConvTranspose", {"src": inner, "weights": given[3]}, {**attributes, **layout, "strides": [2, 2]})
    assert found[4].tobytes() == dst.tobytes()


def test_progress(http: httpx.Client) -> None:
    """As events, the work of all nodes is one total, and the result comes last."""
    given = graph.tensors()
    rpc = {"jsonrpc": "2.0", "id": "a", "method": "graph.run", "params": graph.body(given)}
    for path, request in (("/v1/graphs", graph.body(given)), ("/rpc", rpc)):
        *progress, last = messages(http.post(path, json=request, headers={"accept": SSE}).text)
        done = [message["params"]["progress"] for message in progress]
        (total,) = {message["params"]["total"] for message in progress}
        assert done[0] == 0
        assert done == sorted(done)
        assert done[-1] == total >= 3
        assert np.array_equal(read_tensor(last["result"]["outputs"]["6"]), graph.expected(given)[6])


def test_a_long_chain(client: convgrad.Client) -> None:
    """A hundred nodes, whose dump is larger than the request of a call may be, hand their results on."""
    tensor = {"dtype": "f32", "shape": [1, 2, 4, 4], "layout_type": "strided", "stride": [32, 16, 4, 1]}
    bias = {"id": 1000, "dtype": "f32", "shape": [2]}
    nodes = [
        {
            "id": number, "name": f"BIAS_{number}" * 20, "kind": "BiasAdd",
            "attrs": {"data_format": {"type": "string", "value": "NCX"}},
            "inputs": [{"id": number, **tensor}, bias], "outputs": [{"id": number + 1, **tensor}],
        }
        for number in range(150)
    ]  # fmt: skip
    given = {0: np.zeros((1, 2, 4, 4), np.float32), 1000: np.array([1, 2], np.float32)}
    assert len(json.dumps({"graph": nodes})) > 64 * 1024
    found = client.run_graph({"graph": nodes}, given)
    assert (found[150] == np.array([150, 300], np.float32).reshape(1, 2, 1, 1)).all()


def test_strides(http: httpx.Client) -> None:
    """A tensor is taken by index or as it lies in memory, and returned as its strides say if the request asks so."""
    given = graph.tensors(3)
    right = graph.expected(given)
    request = graph.body(given, outputs=[4, 6], layout="memory")
    request["graph"]["graph"][0]["inputs"][0]["stride"] = [192 + 7, 1, 24, 3]  # channels last, a gap between images
    request["graph"]["graph"][2]["outputs"][0]["stride"] = [1, 4, 100, 20]
    memory = np.full(192 + 7 + 192, 99, np.float32)
    for image in range(2):
        memory[image * 199 : image * 199 + 192] = given[0][image].transpose(1, 2, 0).reshape(-1)
    for first in (given[0], memory):
        request["inputs"]["0"] = graph.sent(first)
        reply = http.post("/v1/graphs", json=request).json()
        np.testing.assert_array_equal(read_tensor(reply["outputs"]["4"]), right[4])
        flat, strides = read_tensor(reply["outputs"]["6"]), reply["outputs"]["6"]["strides"]
        assert (strides, flat.shape) == ([1, 4, 100, 20], (380,))
        view = np.lib.stride_tricks.as_strided(flat, right[6].shape, [4 * step for step in strides])
        np.testing.assert_array_equal(view, right[6])


def test_validate(client: convgrad.Client) -> None:
    """A valid graph is described without its tensors: inputs, outputs, attributes and cost of each node."""
    told = client.validate_graph(graph.EXAMPLE)
    assert told["valid"] is True
    assert [tensor["id"] for tensor in told["inputs"]] == [0, 1, 3, 5]
    assert told["nodes"][2]["inputs"] == {"src": 2, "diff_dst": 5}
    assert told["gmac"] == pytest.approx(sum(node["gmac"] for node in told["nodes"]))


@pytest.mark.parametrize(
    ("members", "loc"),
    [
        ({"outputs": [3]}, ["outputs", 0]),
        ({"outputs": [4, 4]}, ["outputs", 1]),
        ({"outputs": []}, ["outputs"]),
        ({"outputs": ["1" * 5000]}, ["outputs", 0]),
        ({"layout": "nhwc"}, ["layout"]),
        ({"layout": False}, ["layout"]),
        ({"options": {"outputs": ["dst"]}}, ["options", "outputs"]),
        ({"graph": {"graph": [{"id": 0, "kind": "ReLU"}]}}, ["graph", 0, "kind"]),
    ],
)
def test_wrong_requests(http: httpx.Client, members: dict[str, Any], loc: list[Any]) -> None:
    """Wrong members are refused with their place."""
    reply = http.post("/v1/graphs", json={**graph.body(graph.tensors()), **members})
    assert (reply.status_code, reply.json()["errors"][0]["loc"]) == (422, loc)


def test_wrong_tensors(http: httpx.Client) -> None:
    """Missing and unknown tensors, and those of another shape or dtype, are all reported."""
    given = graph.tensors()
    request = graph.body({0: given[0], 1: given[3], 9: given[0]})
    request["inputs"]["3"] = {"dtype": "f16", "shape": [4, 5, 4, 4], "data": graph.sent(given[3][:2])["data"]}
    places = [error["loc"][1:] for error in http.post("/v1/graphs", json=request).json()["errors"]]
    assert {tuple(place) for place in places} >= {("1", "shape"), ("3", "dtype"), ("5",), ("9",)}


def test_limits_and_memory(tight: Resident) -> None:
    """The work of all nodes together is limited; a graph that ends, and one that is refused, frees its memory."""
    with convgrad.Client(tight.url) as client:
        client.run_graph(graph.EXAMPLE, graph.tensors())
        large = graph.dump()
        for node in large["graph"]:
            for tensor in (*node["inputs"], *node["outputs"]):
                if tensor["id"] not in (1, 3, 6):
                    tensor["shape"][0], tensor["layout_type"] = 30_000, "any"
        with pytest.raises(convgrad.TooLarge, match=r"allows \d+: tensor \d is \(30000, ") as caught:
            client.validate_graph(large)
        assert caught.value.data["loc"] == ["graph"]
        with pytest.raises(convgrad.DeadlineExceeded):
            client.run_graph(graph.EXAMPLE, graph.tensors(), deadline=1e-9)
    tight.until(lambda: not tight.service.calls and tight.service.segments.stats().used == 0)


def test_admitted_once(tight: Resident, tight_http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph takes one place in the queue for all of its nodes, so no other call can take it in between."""
    admit, entered = tight.service.admission.call, list[RequestContext]()

    def call(context: RequestContext) -> AbstractContextManager[None]:
        entered.append(context)
        return admit(context)

    monkeypatch.setattr(tight.service.admission, "call", call)
    reply = tight_http.post("/v1/graphs", json=graph.body(graph.tensors()))
    assert (reply.status_code, len(reply.json()["nodes"]), len(entered)) == (200, 3, 1)


def test_the_command(service: LiveService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """`convgrad run --graph`, `validate --graph` and `verify --graph` read and write files by tensor id."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONVGRAD_URL", service.url)
    given = graph.tensors(4)
    right = graph.expected(given)
    call = ["--graph", str(graph.EXAMPLE)]
    assert main(["validate", *call]) == 0
    for number, array in given.items():
        np.save(f"{number}.npy", array)
        call += ["--input", f"{number}={number}.npy"]
    assert main(["run", *call, "--output", "6=dw.npy"]) == 0
    assert "tensor 6 f32 [4, 5, 4, 4] -> dw.npy" in capsys.readouterr().err
    np.testing.assert_array_equal(np.load("dw.npy"), right[6])
    np.save("dst.npy", right[4])
    assert main(["verify", *call, "--result", "6=dw.npy", "--result", "4=dst.npy"]) == 0
    np.save("dw.npy", right[6] + 1)
    assert main(["verify", *call, "--result", "6=dw.npy", "--result", "4=dst.npy", "--junit", "out.xml"]) == 1
    assert 'tests="2" failures="1"' in Path("out.xml").read_text(encoding="utf-8")
    assert main(["verify", *call, "--result", "3=dw.npy"]) == 2
    assert "no node of the graph computes tensor 3" in capsys.readouterr().err
