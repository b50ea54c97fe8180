"""Reading graphs dumped by oneDNN Graph: order, inference, strides, and every fault at once."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from convgrad._errors import InvalidParams
from schemas.graphs import read_graph, resolve_graph
from schemas.tensors import TensorMeta

EXAMPLE = Path(__file__).parents[2] / "examples" / "graph.json"


def dump() -> Any:
    """Return the example: Convolution 0, 1 -> 2; ConvTranspose 2, 3 -> 4; its weight gradient 2, 5 -> 6."""
    return json.loads(EXAMPLE.read_text(encoding="utf-8"))


def faults(graph: Any) -> dict[tuple[Any, ...], str]:
    """Return what is wrong with a dump: message by place."""
    with pytest.raises(InvalidParams) as caught:
        resolve_graph(read_graph(graph))
    return {tuple(error["loc"]): error["msg"] for error in caught.value.errors}


def test_the_example() -> None:
    """The example's inputs, outputs, shapes and work are those of its three ops, which may come in any order."""
    graph = read_graph(dump())
    assert [tensor.id for tensor in graph.inputs] == [0, 1, 3, 5]
    assert graph.outputs == [4, 6]
    resolved = resolve_graph(graph)
    assert [op.called_as for _, op in resolved.nodes] == [
        "Convolution", "ConvTranspose", "ConvTransposeBackwardWeights",
    ]  # fmt: skip
    assert resolved.macs == sum(op.macs for _, op in resolved.nodes)
    assert [node.id for node in read_graph({"graph": dump()["graph"][::-1]}).nodes] == [0, 2, 1]


@pytest.mark.parametrize("unknown", [[], [-1, -1, -1, -1], None])
def test_unknown_shapes_are_inferred(unknown: Any) -> None:
    """Shapes of results may be unknown in the dump; those of inputs come with the tensors."""
    graph = dump()
    for node in graph["graph"]:
        for tensor in (*node["inputs"], *node["outputs"]):
            if tensor["id"] in (2, 4, 6):
                tensor["shape"] = unknown
    assert {number: tensor.shape for number, tensor in resolve_graph(read_graph(graph)).tensors.items()} == {
        0: (2, 3, 8, 8), 1: (4, 3, 3, 3), 2: (2, 4, 8, 8), 3: (4, 5, 4, 4), 4: (2, 5, 16, 16), 5: (2, 5, 16, 16),
        6: (4, 5, 4, 4),
    }  # fmt: skip
    graph["graph"][0]["inputs"][0]["shape"] = unknown
    read = read_graph(graph)
    assert not read.known
    assert faults(graph)["inputs", "0"] == "the shape of tensor 0 is not in the dump, and nothing computes it"
    found = resolve_graph(read, {0: TensorMeta("f32", (2, 3, 8, 8))})
    assert found.tensors[2].shape == (2, 4, 8, 8)


def change(path: str, value: Any) -> Any:
    """Return the example with one member changed; `path` is dotted, below `graph`."""
    graph = dump()
    target: Any = graph["graph"]
    *steps, last = [int(step) if step.isdecimal() else step for step in path.split(".")]
    for step in steps:
        target = target[step]
    target[last] = value
    return graph


@pytest.mark.parametrize(
    ("path", "value", "loc", "message"),
    [
        ("0.kind", "ReLU", (0, "kind"), "node 0 (CONV_0): ReLU is not supported; the kinds are ConvTransposeBackward"),
        ("0.kind", None, (0, "kind"), "is not supported"),
        ("1.id", 0, (1, "id"), "node 0 (DECONV_0) has the same id as op 0"),
        ("1.id", "x", (1, "id"), "op 1 must have an id"),
        ("1", 7, (1,), "an op must be an object"),
        ("0.inputs", None, (0, "inputs"), "node 0 (CONV_0): inputs must be a list"),
        ("0.inputs.0.id", -1, (0, "inputs", 0), "a logical tensor must have an id"),
        ("0.inputs.0.dtype", "f64", (0, "inputs", 0, "dtype"), "but is f64: make single calls with options.reference"),
        ("0.inputs.0.shape", ["x"], (0, "inputs", 0, "shape"), "must be a list of integers"),
        ("0.inputs.0.layout_type", "opaque", (0, "inputs", 0, "layout_type"), "must be strided, any or undef"),
        ("0.inputs.0.stride", [1, 1, 1], (0, "inputs", 0, "stride"), "must have 4 strides, as its shape"),
        ("0.inputs.0.stride", [1, 1, 8, 1], (0, "inputs", 0, "stride"), "share memory"),
        ("0.inputs.0.stride", [-1, 1, 8, 1], (0, "inputs", 0, "stride"), "integers of at least 0"),
        ("0.outputs", [], (0, "outputs"), "Convolution has 1 output, but 0 are given"),
        ("0.attrs", [], (0, "attrs"), "attrs must be an object"),
        ("0.attrs.strides.value", [0, 1], (0, "attributes", "strides", 0), "strides[0] must be at least 1, but is 0"),
        ("1.inputs.0.shape", [2, 4, 8, 7], (1, "inputs", 0, "shape"), "has shape (2, 4, 8, 7) here, but (2, 4, 8, 8)"),
        ("1.outputs.0.shape", [2, 5, 16, 15], (1, "outputs", "dst", "shape"), "must have shape (2, 5, 16, 16)"),
        ("2.outputs.0.id", 4, (2, "outputs", 0, "id"), "computes tensor 4, which node 1 (DECONV_0)"),
    ],
)
def test_one_fault(path: str, value: Any, loc: tuple[Any, ...], message: str) -> None:
    """Each fault is named with the node's id and name, the rule, and both sides."""
    found = faults(change(path, value))
    assert ("graph", *loc) in found, found
    assert message in found["graph", *loc]


def test_all_faults_at_once() -> None:
    """Faults of several nodes are reported together."""
    graph = change("0.attrs.strides.value", [0, 1])
    graph["graph"][2]["attrs"]["groups"]["value"] = 3
    assert {loc[1] for loc in faults(graph)} == {0, 2}


def test_a_cycle() -> None:
    """Nodes that need each other's results are named, and not those that only follow them."""
    graph = dump()
    last = copy.deepcopy(graph["graph"][2]["outputs"][0])
    graph["graph"][0]["inputs"][1] = last
    assert "a graph must have no cycle" in next(iter(faults(graph).values()))
    graph = dump()
    graph["graph"][0]["inputs"][0] = copy.deepcopy(graph["graph"][0]["outputs"][0])
    (fault,) = faults(graph).values()
    assert fault == "node 0 (CONV_0) needs its own result: a graph must have no cycle"


@pytest.mark.parametrize("graph", [None, [], {}, {"graph": []}, {"graph": {}}, {"graph": [{}] * 1001}])
def test_no_graph(graph: Any) -> None:
    """What is no list of ops, or a list of too many, is refused."""
    assert ("graph",) in faults(graph)
