"""Graphs dumped by oneDNN Graph: a request `{"graph", "inputs", "outputs", "layout", "options"}`, checked and planned.

The inputs of the graph take the place of an operation's: each is named by the id of its logical tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from convgrad._dtypes import dtype
from convgrad._errors import TooLarge
from engine.options import Options, check_encoding, parse_options, refuse_options
from engine.planning import Cause, Limits, Prepared, call_bytes, check_limit, check_limits, plan_call, tensor_bytes
from engine.prepare import check_algorithm
from schemas.broken_rules import BrokenRule, broken_rule, dims, invalid_params, safe_key, some, too_large
from schemas.graphs import Graph, LogicalTensor, Node, ResolvedGraph, read_graph, resolve_graph
from schemas.rows import InputRows, TensorRow
from schemas.spelling import check_members
from schemas.tensors import TensorMeta, TensorSpec

__all__ = [
    "MEMBERS",
    "GraphCall",
    "PreparedGraph",
    "describe_graph",
    "prepare_graph",
    "read_graph_call",
    "result_bytes",
    "strided",
]

MEMBERS = ("graph", "inputs", "outputs", "options", "layout")
"""The members of a request, in the order of positional params."""

_LAYOUTS = ("logical", "memory")


@dataclass(frozen=True)
class GraphCall:
    """A graph whose structure is valid, the ids of the `wanted` tensors, and the `layout` of the results."""

    graph: Graph
    wanted: tuple[int, ...]
    layout: str
    options: Options

    @property
    def rows(self) -> InputRows:
        """The inputs, named by their ids."""
        shapes = _shape_inputs(self.graph)
        rows = [TensorRow(str(tensor.id), "", required=tensor.id not in shapes) for tensor in self.graph.inputs]
        return InputRows(inputs=tuple(rows))


@dataclass(frozen=True, slots=True)
class PreparedGraph:
    """A graph whose nodes are all planned.

    Inputs in `in_memory` were sent in the memory layout of their logical tensor, gaps included; all others in C order.
    """

    graph: ResolvedGraph
    nodes: tuple[tuple[Node, Prepared], ...]
    wanted: tuple[int, ...]
    layout: str
    options: Options
    in_memory: Set[int]
    units: int
    """The number of units of all nodes."""

    def steps(self) -> Iterator[tuple[Node, Prepared, dict[str, int], set[int]]]:
        """Yield the nodes in order: each with its plan, the tensors that it reads by input, and those then unused."""
        uses = Counter(chain(self.wanted, *(node.inputs.values() for node, _ in self.nodes)))
        for node, planned in self.nodes:
            reads = {row.name: node.inputs[row.name] for row in planned.op.inputs if row.name in node.inputs}
            uses.subtract(node.inputs.values())
            yield node, planned, reads, {number for number in (*node.inputs.values(), node.output) if not uses[number]}


def read_graph_call(request: Any) -> GraphCall:
    """Read a request object.

    Raises `InvalidParams` with every fault of the graph's structure; `prepare_graph` checks attributes and shapes.
    """
    members = request if isinstance(request, Mapping) else {}
    broken: list[BrokenRule] = []
    if not isinstance(request, Mapping):
        broken.append(broken_rule([], "the request must be an object", "object_type"))
    check_members(members, MEMBERS, f"a request for a graph has only the members {', '.join(MEMBERS)}", broken)
    if not isinstance(members.get("inputs", {}), Mapping | None):
        broken.append(broken_rule(["inputs"], "inputs must be an object", "object_type"))
    layout = "logical" if members.get("layout") is None else members["layout"]
    if layout not in _LAYOUTS:
        broken.append(broken_rule(["layout"], f"layout must be {' or '.join(_LAYOUTS)}", "choice"))
    if broken:
        raise invalid_params("graph", broken)
    options = parse_options(members.get("options"))
    refuse_options(options, ("outputs",), "a graph")
    graph = read_graph(members.get("graph"))
    return GraphCall(graph, _wanted(graph, members.get("outputs")), layout, options)


def prepare_graph(
    call: GraphCall, metas: Mapping[str, TensorMeta | list[int]], limits: Limits, *, need_all: bool = True
) -> PreparedGraph:
    """Check a graph and the limits of all its nodes together, and plan each; raises what preparing a call raises.

    Without `need_all` tensors may be missing.
    """
    graph, wanted, layout, options = _resolved(call, metas, need_all), call.wanted, call.layout, call.options
    check_algorithm("graph", options.algorithm, [(f"{node.label}: ", op) for node, op in graph.nodes])
    check_encoding(options, ((str(number), _reply_shape(graph.tensors[number], layout)) for number in wanted))
    has, (node, op) = "the graph needs", max(graph.nodes, key=lambda each: each[1].macs)
    cause: Cause = ["graph", node.position], f"{node.label} needs {op.macs} of them"
    check_limit("work", graph.macs, limits.work_limit, "multiply-adds", cause, has)
    tensors = sum(result_bytes(tensor) for tensor in graph.tensors.values() if tensor.shape is not None)
    if layout == "memory":
        tensors += sum(graph.tensors[number].span * dtype(graph.tensors[number].dtype).itemsize for number in wanted)
    tensors += max(call_bytes(op) for _, op in graph.nodes)
    tensor = max(graph.tensors.values(), key=result_bytes)
    cause = ["graph"], f"tensor {tensor.id} is {dims(tensor.shape or ())}"
    check_limit("memory", tensors, limits.memory_budget, "bytes of tensors", cause, has)
    planned = []
    for node, op in graph.nodes:
        try:
            check_limits(op, limits)
            computations = plan_call(op, limits, options.uses_reference, options.algorithm)
            planned.append((node, Prepared(op, computations, options, {spec.name: spec.name for spec in op.inputs})))
        except TooLarge as error:
            raise too_large(error, ["graph", node.position, *error.data.get("loc", [])], node.label) from None
    given = {int(name): meta.shape for name, meta in metas.items() if isinstance(meta, TensorMeta)}
    laid_out = {number for number in given if graph.tensors[number].strides is not None}
    in_memory = {number for number in laid_out if given[number] != graph.tensors[number].shape}
    units = sum(each.units for _, each in planned)
    return PreparedGraph(graph, tuple(planned), wanted, layout, options, in_memory, units)


def _resolved(call: GraphCall, metas: Mapping[str, TensorMeta | list[int]], need_all: bool) -> ResolvedGraph:
    """Return the graph with its tensors checked: dtype, and shape or, for a tensor's memory, number of elements.

    Raises what `resolve_graph` raises, and `InvalidParams` with every wrong, missing or unknown tensor.
    """
    resolved = resolve_graph(call.graph) if call.graph.known else None
    needed = {str(tensor.id): tensor for tensor in call.graph.inputs}
    shapes = _shape_inputs(call.graph)
    names = some(needed)
    broken: list[BrokenRule] = []
    found: dict[int, TensorMeta] = {}
    for name, meta in metas.items():
        if name not in needed:
            msg = f"{safe_key(name)} is not an input of the graph: its inputs are {names}"
            broken.append(broken_rule(["inputs", safe_key(name)], msg, "unknown_input"))
        elif isinstance(meta, TensorMeta):
            found[int(name)] = meta
            broken += _wrong(needed[name], meta)
    if need_all:
        broken += [
            broken_rule(["inputs", name], f"tensor {name} is required", "missing")
            for name in needed
            if name not in metas and int(name) not in shapes
        ]
    if broken:
        raise invalid_params("graph", broken)
    return resolved or resolve_graph(call.graph, found)


def describe_graph(call: GraphCall, metas: Mapping[str, TensorMeta | list[int]], limits: Limits) -> dict[str, Any]:
    """Describe a graph as JSON: its inputs, its outputs and each node. Its tensors may be missing.

    Raises what `prepare_graph` raises.
    """
    prepared = prepare_graph(call, metas, limits, need_all=False)
    return {
        "valid": True,
        "inputs": [_described(prepared.graph.tensors[tensor.id]) for tensor in call.graph.inputs],
        "outputs": [_described(prepared.graph.tensors[number]) for number in prepared.wanted],
        "nodes": [
            {
                "id": node.id,
                "name": node.name,
                "op": each.op.called_as,
                "inputs": {each.op.wire_name(row): number for row, number in node.inputs.items()},
                "output": node.output,
                "resolved": each.resolved,
                "kernel": each.plan.kernel,
                "algorithm": each.algorithm,
                "gmac": each.plan.macs / 1e9,
                **each.op.reply_warnings,
            }
            for node, each in prepared.nodes
        ],
        "gmac": prepared.graph.macs / 1e9,
    }


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


def _reply_shape(tensor: LogicalTensor, layout: str) -> tuple[int, ...]:
    """Return the shape of a result in the reply: for layout `memory` that of its memory."""
    assert tensor.shape is not None
    return tensor.shape if layout == "logical" or tensor.strides is None else (tensor.span,)


def result_bytes(tensor: LogicalTensor, layout: str = "logical") -> int:
    """Return the size of a tensor in C order, or in layout `memory` as its strides say, in bytes."""
    shape = () if tensor.shape is None else _reply_shape(tensor, layout)
    return tensor_bytes(TensorSpec("", tensor.dtype, shape))


def strided(tensor: LogicalTensor, memory: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """View the elements of a tensor in its memory, of `tensor.span` elements."""
    assert tensor.shape is not None
    steps = [step * memory.dtype.itemsize for step in tensor.strides or ()]
    view: npt.NDArray[Any] = np.lib.stride_tricks.as_strided(memory, tensor.shape, steps)
    return view


def _described(tensor: LogicalTensor) -> dict[str, Any]:
    described: dict[str, Any] = {"id": tensor.id, "dtype": tensor.dtype, "shape": list(tensor.shape or ())}
    return described | ({} if tensor.strides is None else {"strides": list(tensor.strides)})
