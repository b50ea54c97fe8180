"""Read ops dumped by oneDNN Graph as calls.

A dump (`ONEDNN_GRAPH_DUMP=graph`, and benchdnn's graph files) holds op objects such as

    {"id": 0, "name": "DECONV_0", "kind": "ConvTransposeBackwardWeights",
     "attrs": {"strides": {"type": "s64[]", "value": [2, 2]}, ..},
     "inputs": [{"id": 0, "dtype": "bf16", "shape": [1, 32, 28, 28], "stride": [..], ..}, ..],
     "outputs": [{"id": 2, "dtype": "bf16", "shape": [32, 128, 3, 3], ..}]}

Inputs and outputs are identified by their index. An attribute that was never set is written as twelve zeros, and an
unknown shape has negative sizes or is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from convgrad._errors import UnknownOperation
from schemas.broken_rules import BrokenRule, broken_rule, invalid_params
from schemas.rows import Operation
from schemas.tables import CalledOperation, find_operation

__all__ = ["Dump", "call_of_dump", "is_dump", "read_dump"]

# In a call a dump takes the place of the attributes.
_LOC = ("attributes",)


@dataclass(frozen=True, slots=True)
class Dump:
    """A dumped op as a call: its kind, attributes, inputs by name, and the output, if its shape is known."""

    name: str
    attributes: Mapping[Any, Any]
    inputs: dict[str, Any]
    output: Any


def is_dump(value: object) -> bool:
    """Whether an object is a dumped op or graph rather than plain attributes."""
    return isinstance(value, Mapping) and ("attrs" in value or "kind" in value or "graph" in value)


def call_of_dump(called: CalledOperation, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `attributes`, `inputs` and `options` of a request that is itself a dumped op.

    Its tensors may be the dump's logical tensors with `data` or `npy` added, by index or by name; `options` are as in
    any request. Raises what `read_dump` raises.
    """
    dump = read_dump(body, called)
    spec = {
        "kind": dump.name,
        "attrs": dump.attributes,
        "outputs": [] if dump.output is None else [dump.output],
    }
    inputs = {name: _as_sent(tensor) for name, tensor in dump.inputs.items()}
    spellings, shape = called.operation.input_spellings, called.operation.shape_input
    # A logical tensor has no values: then a shape comes from the attribute or the output.
    call: dict[str, Any] = {
        "attributes": spec,
        "inputs": {
            name: tensor
            for name, tensor in inputs.items()
            if spellings.get(name) != shape or not isinstance(tensor, Mapping) or _has_data(tensor)
        },
    }
    return call | ({"options": body["options"]} if "options" in body else {})


def read_dump(value: object, called: CalledOperation) -> Dump:
    """Return a dumped op as a call; a dumped graph must have exactly one op.

    The dump's kind may be absent, but must not be another operation than the one called. Raises `InvalidParams`.
    """
    op = _only_op(value)
    kind = called.called_as if op.get("kind") is None else op["kind"]
    if not isinstance(kind, str):
        raise invalid_params(
            "not a dumped op", [broken_rule([*_LOC, "kind"], "kind must name an operation", "missing")]
        )
    try:
        operation = find_operation(kind).operation
    except UnknownOperation as error:  # the operation called exists: the error is in the dump
        wrong = broken_rule([*_LOC, "kind"], f"kind: {error.message}", "kind")
        raise invalid_params(called.called_as, [wrong]) from None
    if operation.name != called.operation.name:
        msg = f"kind must be {called.operation.name}, the operation called, but is {kind}"
        raise invalid_params(called.called_as, [broken_rule([*_LOC, "kind"], msg, "kind")])
    attributes = op.get("attrs", {})
    broken: list[BrokenRule] = []
    if not isinstance(attributes, Mapping):
        broken.append(broken_rule([*_LOC, "attrs"], "attrs must be an object", "object_type"))
    inputs = _inputs(operation, op.get("inputs", []), broken)
    output = _output(op.get("outputs", []), broken)
    if broken:
        raise invalid_params(kind, broken)
    return Dump(kind, attributes, inputs, output)


def _only_op(value: object) -> Mapping[str, Any]:
    graph = value.get("graph") if isinstance(value, Mapping) else None
    if isinstance(graph, list | tuple):
        if len(graph) != 1:
            msg = f"a dumped graph must have 1 op, but has {len(graph)}: give one of them"
            raise invalid_params("not a dumped op", [broken_rule([*_LOC, "graph"], msg, "graph")])
        value = graph[0]
    if not isinstance(value, Mapping):
        msg = "a dumped op must be an object with kind, attrs, inputs and outputs"
        raise invalid_params("not a dumped op", [broken_rule(_LOC, msg, "object_type")])
    return value


def _inputs(operation: Operation, tensors: object, broken: list[BrokenRule]) -> dict[str, Any]:
    """Return the inputs by name; a list is in the operation's index order."""
    if isinstance(tensors, Mapping):
        return dict(tensors)
    if not isinstance(tensors, list | tuple):
        broken.append(broken_rule([*_LOC, "inputs"], "inputs must be a list", "list_type"))
        return {}
    rows = [row for row in operation.inputs if row.only_for is None]  # oneDNN's own
    if len(tensors) > len(rows):
        msg = f"{operation.name} has at most {len(rows)} inputs, but the dump has {len(tensors)}"
        broken.append(broken_rule([*_LOC, "inputs"], msg, "too_long"))
    return {row.name: tensor for row, tensor in zip(rows, tensors, strict=False)}


def _as_sent(tensor: Any) -> Any:
    """Return a dumped tensor without its shape if that is unknown: the data may have it."""
    if not isinstance(tensor, Mapping) or _has_data(tensor) or not _is_unknown(tensor.get("shape")):
        return tensor
    return {name: value for name, value in tensor.items() if name != "shape"}


def _has_data(tensor: Mapping[Any, Any]) -> bool:
    return "data" in tensor or "npy" in tensor


def _is_unknown(shape: object) -> bool:
    return isinstance(shape, list | tuple) and (not shape or any(type(size) is int and size < 0 for size in shape))


def _output(tensors: object, broken: list[BrokenRule]) -> Any:
    """Return the output's logical tensor, or None when its shape is unknown."""
    if not isinstance(tensors, list | tuple) or len(tensors) > 1:
        broken.append(broken_rule([*_LOC, "outputs"], "outputs must be a list of 1 tensor", "list_type"))
        return None
    tensor = tensors[0] if tensors else None
    shape = tensor.get("shape") if isinstance(tensor, Mapping) else None
    if not isinstance(shape, list | tuple) or not shape:
        return None
    return None if any(isinstance(size, int) and size < 0 for size in shape) else tensor
