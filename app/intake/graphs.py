"""The request for a graph: `{"graph", "inputs", "outputs", "layout", "options"}`, read like that of a call.

The inputs of the graph take the place of an operation's: each is named by the id of its logical tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.intake.options import parse_options, refuse_options
from app.intake.requests import RequestObject, check_members
from app.intake.tensors import Tensor
from schemas.broken_rules import BrokenRule, broken_rule, dims, invalid_params, safe_key, some
from schemas.graphs import Graph, LogicalTensor, ResolvedGraph, read_graph, resolve_graph
from schemas.rows import InputRows, TensorRow
from schemas.tensors import TensorMeta

__all__ = ["MEMBERS", "GraphRequest", "read_graph_request", "resolved_of"]

MEMBERS = ("graph", "inputs", "outputs", "options", "layout")
"""The members of a request, in the order of positional params."""

_LAYOUTS = ("logical", "memory")


@dataclass(frozen=True)
class GraphRequest(RequestObject):
    """A request for a graph, whose structure is valid; its `attributes` hold the request itself."""

    graph: Graph
    wanted: tuple[int, ...]
    layout: str


def read_graph_request(request: Any) -> GraphRequest:
    """Read a request object.

    Raises `InvalidParams` with every fault of the graph's structure; `resolved_of` checks attributes and shapes.
    """
    members = request if isinstance(request, Mapping) else {}
    broken: list[BrokenRule] = []
    if not isinstance(request, Mapping):
        broken.append(broken_rule([], "the request must be an object", "object_type"))
    check_members(members, MEMBERS, f"a request for a graph has only the members {', '.join(MEMBERS)}", broken)
    inputs = {} if members.get("inputs") is None else members["inputs"]
    if not isinstance(inputs, Mapping):
        broken.append(broken_rule(["inputs"], "inputs must be an object", "object_type"))
    layout = "logical" if members.get("layout") is None else members["layout"]
    if layout not in _LAYOUTS:
        broken.append(broken_rule(["layout"], f"layout must be {' or '.join(_LAYOUTS)}", "choice"))
    if broken:
        raise invalid_params("graph", broken)
    refuse_options(parse_options(members.get("options")), ("outputs",), "a graph")
    graph = read_graph(members.get("graph"))
    wanted = _wanted(graph, members.get("outputs"))
    shapes = _shape_inputs(graph)
    rows = tuple([TensorRow(str(tensor.id), "", required=tensor.id not in shapes) for tensor in graph.inputs])
    document, options = {"graph": members.get("graph")}, members.get("options")
    return GraphRequest("graph", InputRows(inputs=rows), document, inputs, options, graph, wanted, layout)


def _wanted(graph: Graph, outputs: Any) -> tuple[int, ...]:
    """Return the ids of the requested tensors: any that a node computes, by default those that no node reads."""
    if outputs is None:
        return tuple(graph.outputs)
    computed = {node.output for node in graph.nodes}
    named = {str(number): number for number in computed}
    choices = some(sorted(computed))
    if not isinstance(outputs, list) or not outputs:
        raise invalid_params("graph", [broken_rule(["outputs"], "outputs must be a list of tensor ids", "list_type")])
    if len(outputs) > len(computed):
        most = f"{len(computed)} ids, as the nodes compute no more tensors"
        msg = f"outputs must have at most {most}, but has {len(outputs)}"
        raise invalid_params("graph", [broken_rule(["outputs"], msg, "too_long")])
    wanted: list[int] = []
    broken: list[BrokenRule] = []
    for index, entry in enumerate(outputs):
        number = named.get(entry) if isinstance(entry, str) else entry
        if type(number) is not int or number not in computed:
            msg = f"outputs[{index}] must be the id of a tensor that a node computes: {choices}"
            broken.append(broken_rule(["outputs", index], msg, "unknown_output"))
        elif number in wanted:
            broken.append(broken_rule(["outputs", index], f"tensor {number} is requested twice", "conflict"))
        else:
            wanted.append(number)
    if broken:
        raise invalid_params("graph", broken)
    return tuple(wanted)


def resolved_of(request: GraphRequest, *, need_all: bool = True) -> ResolvedGraph:
    """Return the graph with its tensors checked: dtype, and shape or, for a tensor's memory, number of elements.

    Raises what `resolve_graph` raises, and `InvalidParams` with every wrong, missing or unknown tensor.
    """
    resolved = resolve_graph(request.graph) if request.graph.known else None
    needed = {str(tensor.id): tensor for tensor in request.graph.inputs}
    shapes = _shape_inputs(request.graph)
    names = some(needed)
    broken: list[BrokenRule] = []
    metas: dict[int, TensorMeta] = {}
    for name, value in request.inputs.items():
        if name not in needed:
            msg = f"{safe_key(name)} is not an input of the graph: its inputs are {names}"
            broken.append(broken_rule(["inputs", safe_key(name)], msg, "unknown_input"))
        elif isinstance(value, Tensor):
            metas[int(name)] = value.meta
            broken += _wrong(needed[name], value.meta)
    if need_all:
        broken += [
            broken_rule(["inputs", name], f"tensor {name} is required", "missing")
            for name in needed
            if name not in request.inputs and int(name) not in shapes
        ]
    if broken:
        raise invalid_params("graph", broken)
    return resolved or resolve_graph(request.graph, metas)


def _shape_inputs(graph: Graph) -> set[int]:
    """Return the tensors that are shapes: the attribute, or the output's shape, is read instead."""
    return {
        number
        for node in graph.nodes
        for row, number in node.inputs.items()
        if row == node.called.operation.shape_input
    }


def _wrong(tensor: LogicalTensor, meta: TensorMeta) -> list[BrokenRule]:
    loc, broken = ["inputs", str(tensor.id)], []
    if meta.dtype != tensor.dtype:
        msg = f"tensor {tensor.id} must be {tensor.dtype}, but is {meta.dtype}"
        broken.append(broken_rule([*loc, "dtype"], msg, "mixed_dtypes"))
    if tensor.shape is not None and meta.shape not in (tensor.shape, (tensor.span,)):
        memory = f", or ({tensor.span}) as it lies in memory" if tensor.strides is not None else ""
        msg = f"tensor {tensor.id} must have shape {dims(tensor.shape)}{memory}, but has {dims(meta.shape)}"
        broken.append(broken_rule([*loc, "shape"], msg, "shape"))
    return broken
