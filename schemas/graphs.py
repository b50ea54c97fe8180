"""Graphs dumped by oneDNN Graph: nodes, logical tensors, and every rule that they break, all reported at once.

A dump is an object with a list `graph` of ops as in `schemas.dumps`. Inputs and outputs are logical tensors, which
refer to each other by `id`; `stride` and `layout_type` say how the elements lie in memory. A tensor that no op of the
graph computes is an input of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from convgrad._errors import InvalidParams, Unsupported
from schemas.broken_rules import MAX_BROKEN_RULES, BrokenRule, broken_rule, dims, invalid_params, safe_key
from schemas.ops import ResolvedOp, resolve
from schemas.rows import DTYPE_NAMES, MAX_DIMS, REFERENCE_DTYPES
from schemas.shapes import INT64_MAX
from schemas.tables import OPERATIONS, CalledOperation, find_operation, operation_hint, operation_names
from schemas.tensors import TensorMeta

__all__ = ["Graph", "LogicalTensor", "Node", "ResolvedGraph", "read_graph", "resolve_graph"]

_MOST_NODES = 1000
_MOST_TENSORS = 8
"""Most inputs or outputs of one op; none of the family has as many."""

_MOST_NAMES = 8
"""Most nodes that an error about a cycle names."""

_LAYOUTS = ("strided", "any", "undef", "opaque")
_SHOWN = 64


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A tensor of a graph; `shape` is None while it is unknown, `strides` None for C order. Strides count elements."""

    id: int
    dtype: str
    shape: tuple[int, ...] | None
    strides: tuple[int, ...] | None = None

    @property
    def span(self) -> int:
        """Number of elements from the first to the last one in memory, gaps included."""
        shape = self.shape or ()
        if 0 in shape:
            return 0
        strides = self.strides or c_strides(shape)
        return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


@dataclass(frozen=True, slots=True)
class Node:
    """One op of a graph: its place in the dump, its attributes, its input ids by row, and the id of its output."""

    position: int
    id: int
    name: str
    called: CalledOperation
    attributes: Mapping[str, Any]
    inputs: Mapping[str, int]
    output: int

    @property
    def label(self) -> str:
        """Id and name, for messages."""
        return f"node {self.id} ({self.name})" if self.name else f"node {self.id}"


@dataclass(slots=True)
class Graph:
    """A dump whose structure is valid; `nodes` are in an order in which they can be computed."""

    nodes: list[Node] = field(default_factory=list)
    tensors: dict[int, LogicalTensor] = field(default_factory=dict)

    @property
    def inputs(self) -> list[LogicalTensor]:
        """The tensors that the graph needs and does not compute, in the order of their first use."""
        made = {node.output for node in self.nodes}
        used = dict.fromkeys(number for node in self.nodes for number in node.inputs.values())
        return [self.tensors[number] for number in used if number not in made]

    @property
    def outputs(self) -> list[int]:
        """The tensors that no node reads."""
        used = {number for node in self.nodes for number in node.inputs.values()}
        return [node.output for node in self.nodes if node.output not in used]

    @property
    def known(self) -> bool:
        """Whether the shapes of all inputs are in the dump."""
        return all(tensor.shape is not None for tensor in self.inputs)


@dataclass(frozen=True, slots=True)
class ResolvedGraph:
    """A valid graph: its nodes, each with its resolved operation, and its tensors with all shapes."""

    nodes: tuple[tuple[Node, ResolvedOp], ...]
    tensors: Mapping[int, LogicalTensor]

    @property
    def macs(self) -> int:
        """Multiply-adds of all nodes."""
        return sum(op.macs for _, op in self.nodes)


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor in C order, in elements."""
    strides, step = [0] * len(shape), 1
    for axis in range(len(shape) - 1, -1, -1):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def read_graph(dump: object) -> Graph:
    """Return a dumped graph; raises `InvalidParams` with everything that is wrong with its structure."""
    broken: list[BrokenRule] = []
    entries = dump.get("graph") if isinstance(dump, Mapping) else None
    if not isinstance(entries, list) or not entries:
        msg = "a dumped graph must be an object with a list `graph` of at least 1 op"
        raise _invalid([broken_rule(["graph"], msg, "list_type")])
    if len(entries) > _MOST_NODES:
        msg = f"a graph must have at most {_MOST_NODES} ops, but has {len(entries)}"
        raise _invalid([broken_rule(["graph"], msg, "too_long")])
    reader = _Reader(broken)
    nodes: list[Node] = []
    for position, entry in enumerate(entries):
        if (node := reader.node(position, entry)) is not None:
            nodes.append(node)
        _stop_at_many(broken)
    broken += _doubled(reader.made)
    graph = Graph(nodes, reader.tensors)
    if not broken:
        graph.nodes = _in_order(nodes, broken)
    if broken:
        raise _invalid(broken)
    return graph


def resolve_graph(graph: Graph, given: Mapping[int, TensorMeta] | None = None) -> ResolvedGraph:
    """Resolve every node in order, shapes of results included.

    Shapes that the dump lacks are taken from `given`, the tensors of the request. Raises `InvalidParams` with the
    broken rules of all nodes, and `Unsupported` if only dtypes are wrong.
    """
    tensors, broken = dict(graph.tensors), list[BrokenRule]()
    for tensor in graph.inputs:
        if tensor.shape is None:
            meta = (given or {}).get(tensor.id)
            if meta is None:
                msg = f"the shape of tensor {tensor.id} is not in the dump, and nothing computes it"
                broken.append(broken_rule(["inputs", str(tensor.id)], msg, "missing"))
            else:
                tensors[tensor.id] = LogicalTensor(tensor.id, tensor.dtype, meta.shape)
    found: list[tuple[Node, ResolvedOp]] = []
    for node in graph.nodes:
        op = _resolve_node(node, tensors, broken)
        if op is not None:
            found.append((node, op))
            known = tensors[node.output]
            tensors[node.output] = LogicalTensor(known.id, known.dtype, op.output.shape, known.strides)
        _stop_at_many(broken)
    if broken:
        raise _invalid(broken)
    return ResolvedGraph(tuple(found), tensors)


def _resolve_node(node: Node, tensors: Mapping[int, LogicalTensor], broken: list[BrokenRule]) -> ResolvedOp | None:
    """Return the resolved operation of a node; None if it is invalid, or its inputs are."""
    shape_input = node.called.operation.shape_input
    inputs: dict[str, Any] = {}
    for row, number in node.inputs.items():
        shape = tensors[number].shape
        if row == shape_input:
            continue  # a logical tensor has no values: the shape is an attribute, or that of the output
        if shape is None:
            return None  # the producer is invalid, and says so
        inputs[row] = TensorMeta(tensors[number].dtype, shape)
    output = tensors[node.output]
    expected = None if output.shape is None else TensorMeta(output.dtype, output.shape)
    try:
        return resolve(node.called.called_as, dict(node.attributes), inputs, output=expected)
    except InvalidParams as error:
        found = error.errors
    except Unsupported as error:
        found = error.data.get("errors", [broken_rule([], error.message, "unsupported_dtype")])
    broken += [
        broken_rule(["graph", node.position, *each["loc"]], f"{node.label}: {each['msg']}", each["type"])
        for each in found
    ]
    return None


class _Reader:
    """Reads the ops of a dump; each logical tensor must be described in the same way wherever it appears."""

    def __init__(self, broken: list[BrokenRule]) -> None:
        self.tensors: dict[int, LogicalTensor] = {}
        self.made: list[tuple[int, int, str, list[int]]] = []
        """Position, id, label and outputs of each op, also of those that are invalid."""
        self._broken = broken
        self._where: dict[int, str] = {}

    def node(self, position: int, entry: object) -> Node | None:
        """Return an op; None if its structure is invalid."""
        loc: list[str | int] = ["graph", position]
        if not isinstance(entry, Mapping):
            self._wrong(loc, "an op must be an object with id, name, kind, attrs, inputs and outputs", "type")
            return None
        number, name = entry.get("id"), entry.get("name", "")
        name = safe_key(name)[:_SHOWN] if isinstance(name, str) and name else ""
        if type(number) is not int or not 0 <= number <= INT64_MAX:
            self._wrong([*loc, "id"], f"op {position} must have an id, an integer of at least 0", "missing")
            return None
        label = f"node {number} ({name})" if name else f"node {number}"
        called = self._called(entry.get("kind"), loc, label)
        attributes = entry.get("attrs", {})
        if not isinstance(attributes, Mapping):
            self._wrong([*loc, "attrs"], f"{label}: attrs must be an object", "object_type")
        inputs = self._tensors(entry.get("inputs"), [*loc, "inputs"], label)
        outputs = self._tensors(entry.get("outputs"), [*loc, "outputs"], label)
        self.made.append((position, number, label, outputs or []))
        if called is None or inputs is None or outputs is None or not isinstance(attributes, Mapping):
            return None
        rows = [row.name for row in called.operation.inputs if row.only_for is None]
        if len(inputs) > len(rows):
            msg = f"{label}: {called.called_as} has at most {len(rows)} inputs, but {len(inputs)} are given"
            self._wrong([*loc, "inputs"], msg, "too_long")
            return None
        if len(outputs) != 1:
            msg = f"{label}: {called.called_as} has 1 output, but {len(outputs)} are given"
            self._wrong([*loc, "outputs"], msg, "too_long")
            return None
        return Node(position, number, name, called, attributes, dict(zip(rows, inputs, strict=False)), outputs[0])

    def _called(self, kind: object, loc: list[str | int], label: str) -> CalledOperation | None:
        if isinstance(kind, str) and kind in operation_names():
            return find_operation(kind)
        known = ", ".join(operation.name for operation in OPERATIONS)
        end = operation_hint(kind, self._broken)[1]
        rule = f"{label}: {safe_key(kind)[:_SHOWN]} is not supported; the kinds are {known}{end}"
        self._wrong([*loc, "kind"], rule, "kind")
        return None

    def _tensors(self, given: object, loc: list[str | int], label: str) -> list[int] | None:
        if not isinstance(given, list) or len(given) > _MOST_TENSORS:
            rule = f"{label}: {loc[-1]} must be a list of at most {_MOST_TENSORS} logical tensors"
            self._wrong(loc, rule, "list_type")
            return None
        found = [self._tensor(entry, [*loc, index], label) for index, entry in enumerate(given)]
        return None if None in found else [number for number in found if number is not None]

    def _tensor(self, entry: object, loc: list[str | int], label: str) -> int | None:
        number = entry.get("id") if isinstance(entry, Mapping) else None
        if not isinstance(entry, Mapping) or type(number) is not int or not 0 <= number <= INT64_MAX:
            self._wrong(loc, f"{label}: a logical tensor must have an id, an integer of at least 0", "missing")
            return None
        dtype = entry.get("dtype")
        if dtype not in (*DTYPE_NAMES, "s32"):
            rule = f"{label}: the dtype of tensor {number} must be {', '.join(DTYPE_NAMES)}, or s32 for a shape"
            if dtype in REFERENCE_DTYPES:
                rule += f", but is {dtype}: make single calls with options.reference"
            self._wrong([*loc, "dtype"], rule, "unsupported_dtype")
            return None
        shape = self._sizes(entry.get("shape"), [*loc, "shape"], label, number)
        tensor = LogicalTensor(number, str(dtype), shape, self._strides(entry, shape, loc, label))
        known = self.tensors.setdefault(number, tensor)
        where = self._where.setdefault(number, label)
        for what, one, other in (
            ("dtype", known.dtype, tensor.dtype),
            ("shape", known.shape, tensor.shape),
            ("strides", known.strides, tensor.strides),
        ):
            if one != other and None not in (known.shape, tensor.shape):
                one, other = (dims(each) if isinstance(each, tuple) else each or "C order" for each in (one, other))
                msg = f"{label}: tensor {number} has {what} {other} here, but {one} in {where}"
                self._wrong([*loc, "stride" if what == "strides" else what], msg, "conflict")
        if known.shape is None and tensor.shape is not None:
            self.tensors[number] = tensor
        return number

    def _sizes(self, given: object, loc: list[str | int], label: str, number: int) -> tuple[int, ...] | None:
        """Return a shape; None if it is unknown, which is an empty list or has negative sizes."""
        if given is None or given == []:
            return None
        if not isinstance(given, list) or not all(type(size) is int and size <= INT64_MAX for size in given):
            self._wrong(loc, f"{label}: the shape of tensor {number} must be a list of integers", "list_type")
            return None
        if len(given) > MAX_DIMS:
            rule = f"{label}: tensor {number} must have at most {MAX_DIMS} dimensions, but has {len(given)}"
            self._wrong(loc, rule, "too_long")
            return None
        return None if any(size < 0 for size in given) else tuple(given)

    def _strides(
        self, entry: Mapping[Any, Any], shape: tuple[int, ...] | None, loc: list[str | int], label: str
    ) -> tuple[int, ...] | None:
        layout, given = entry.get("layout_type", "undef"), entry.get("stride", entry.get("strides"))
        number = entry["id"]
        if layout not in _LAYOUTS or layout == "opaque":
            rule = f"{label}: the layout_type of tensor {number} must be strided, any or undef"
            self._wrong([*loc, "layout_type"], rule, "layout")
            return None
        if layout != "strided" or not given or shape is None:
            return None
        place = [*loc, "stride"]
        if not isinstance(given, list) or not all(type(step) is int and 0 <= step <= INT64_MAX for step in given):
            rule = f"{label}: the strides of tensor {number} must be a list of integers of at least 0"
            self._wrong(place, rule, "list_type")
            return None
        if len(given) != len(shape):
            rule = f"{label}: tensor {number} must have {len(shape)} strides, as its shape is {dims(shape)}"
            self._wrong(place, f"{rule}, but has {len(given)}", "length")
            return None
        packed = c_strides(shape)
        # The stride of an axis of one has no effect, whatever it is.
        strides = tuple([step if size > 1 else own for step, size, own in zip(given, shape, packed, strict=True)])
        if 0 in shape or strides == packed:
            return None
        reach = 0
        for step, size in sorted((step, size) for step, size in zip(given, shape, strict=True) if size > 1):
            if step <= reach:
                rule = f"{label}: elements of tensor {number} share memory: strides {dims(given)} with shape"
                self._wrong(place, f"{rule} {dims(shape)}", "overlap")
                return None
            reach += (size - 1) * step
        return strides

    def _wrong(self, loc: list[str | int], message: str, kind: str) -> None:
        self._broken.append(broken_rule(loc, message, kind))


def _doubled(made: list[tuple[int, int, str, list[int]]]) -> Iterator[BrokenRule]:
    """Check that ids are given once, and each tensor is computed once."""
    ids: dict[int, int] = {}
    makers: dict[int, str] = {}
    for position, number, label, outputs in made:
        if number in ids:
            yield broken_rule(["graph", position, "id"], f"{label} has the same id as op {ids[number]}", "conflict")
        ids.setdefault(number, position)
        for index, output in enumerate(outputs):
            if output in makers:
                msg = f"{label} computes tensor {output}, which {makers[output]} computes too"
                yield broken_rule(["graph", position, "outputs", index, "id"], msg, "conflict")
            makers.setdefault(output, label)


def _in_order(nodes: list[Node], broken: list[BrokenRule]) -> list[Node]:
    """Return the nodes so that each follows those it needs; those of a cycle break a rule."""
    makers, by_id = {node.output: node.id for node in nodes}, {node.id: node for node in nodes}
    needs = {node.id: [makers[number] for number in node.inputs.values() if number in makers] for node in nodes}
    sorter, ordered = TopologicalSorter(needs), list[Node]()
    try:
        sorter.prepare()
    except CycleError as error:
        broken.append(_cycle([by_id[number] for number in error.args[1][1:]]))
    while ready := sorter.get_ready():
        ordered += sorted((by_id[number] for number in ready), key=lambda node: node.position)
        sorter.done(*ready)
    return ordered


def _cycle(nodes: list[Node]) -> BrokenRule:
    """Return the error for a cycle of nodes, each of which reads the result of the one before it."""
    names = ", ".join(node.label for node in nodes[:_MOST_NAMES])
    needed = "needs its own result" if len(nodes) == 1 else "need each other's results"
    return broken_rule(["graph", nodes[0].position], f"{names} {needed}: a graph must have no cycle", "cycle")


def _stop_at_many(broken: list[BrokenRule]) -> None:
    """Raise `InvalidParams` when there are more broken rules than an error lists: the other nodes are not checked."""
    if len(broken) > MAX_BROKEN_RULES:
        raise invalid_params("graph", broken, stopped=True)


def _invalid(broken: list[BrokenRule]) -> InvalidParams:
    return invalid_params("graph", broken)
