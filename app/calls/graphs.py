"""Run a graph: every node is checked and planned first, then one call follows the other.

Results stay in shared memory: the next node reads the segment that the one before has written.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, aclosing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from app.calls.algorithms import check_algorithm
from app.calls.call import Call
from app.calls.outputs import HeldTensor
from app.calls.planning import Prepared, call_bytes, check_limits, plan_call, tensor_bytes
from app.calls.service import Service
from app.calls.work import Event, Progress, Result, Work
from app.intake.graphs import GraphRequest, resolved_of
from app.intake.options import Options, check_encoding, parse_options
from app.intake.tensors import Tensor
from app.settings import Settings
from app.telemetry.context import current_context
from app.threads import in_thread_if
from convgrad._dtypes import dtype
from convgrad._errors import TooLarge
from kernels import storage_dtype
from schemas.broken_rules import dims, too_large
from schemas.graphs import LogicalTensor, ResolvedGraph, read_graph, resolve_graph
from schemas.tensors import TensorSpec

if TYPE_CHECKING:
    from app.intake.lease import Lease
    from app.pool.buffers import Segment
    from schemas.graphs import Node

__all__ = ["GraphRun", "PreparedGraph", "check_begun_graph", "dense", "describe_graph", "prepare_graph"]

# Copying this much takes well under a millisecond.
_INLINE = 256 << 10


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


async def check_begun_graph(service: Service, dump: Any, options: Options) -> None:
    """Check a dumped graph before its tensors arrive; raises what `read_graph`, `resolve_graph` and planning raise."""

    def check() -> None:
        graph = read_graph(dump)
        if graph.known:
            _check_algorithm(resolve_graph(graph), options)

    await service.plan_in_thread(check, service.deadline(options.deadline_ms))


def _check_algorithm(graph: ResolvedGraph, options: Options) -> None:
    check_algorithm("graph", options.algorithm, [(f"{node.label}: ", op) for node, op in graph.nodes])


async def prepare_graph(service: Service, request: GraphRequest) -> PreparedGraph:
    """Check a graph and the limits of all its nodes together, and plan each; raises what preparing a call raises."""
    options = parse_options(request.options)
    deadline = service.deadline(options.deadline_ms)
    return await service.plan_in_thread(partial(_prepared, service.settings, request, options, deadline), deadline)


async def describe_graph(service: Service, request: GraphRequest) -> dict[str, Any]:
    """Describe a graph as JSON: its inputs, its outputs and each node. Its tensors may be missing.

    Raises what `prepare_graph` raises.
    """
    options = parse_options(request.options)
    deadline = service.deadline(options.deadline_ms)

    def describe() -> dict[str, Any]:
        prepared = _prepared(service.settings, request, options, deadline, need_all=False)
        return _describe(prepared, request.graph.inputs)

    return await service.plan_in_thread(describe, deadline)


def _prepared(
    settings: Settings, request: GraphRequest, options: Options, deadline: float, *, need_all: bool = True
) -> PreparedGraph:
    graph, wanted, layout = resolved_of(request, need_all=need_all), request.wanted, request.layout
    _check_algorithm(graph, options)
    check_encoding(options, ((str(number), _reply_shape(graph.tensors[number], layout)) for number in wanted))
    if graph.macs > settings.work_limit:
        node, op = max(graph.nodes, key=lambda each: each[1].macs)
        most = f"{node.label} needs {op.macs} of them"
        raise _too_large("work", graph.macs, settings.work_limit, "multiply-adds", most, ["graph", node.position])
    tensors = sum(_bytes(tensor) for tensor in graph.tensors.values() if tensor.shape is not None)
    if layout == "memory":
        tensors += sum(graph.tensors[number].span * dtype(graph.tensors[number].dtype).itemsize for number in wanted)
    largest = max(call_bytes(op) for _, op in graph.nodes)
    if tensors + largest > settings.memory_budget:
        tensor = max(graph.tensors.values(), key=_bytes)
        most = f"tensor {tensor.id} is {dims(tensor.shape or ())}"
        raise _too_large("memory", tensors + largest, settings.memory_budget, "bytes of tensors", most)
    planned = []
    for node, op in graph.nodes:
        try:
            check_limits(op, settings)
            computations = plan_call(op, settings, options.uses_reference, options.algorithm)
            planned.append((node, Prepared(op, computations, options, deadline)))
        except TooLarge as error:
            raise too_large(error, ["graph", node.position, *error.data.get("loc", [])], node.label) from None
    given = {int(name): tensor.shape for name, tensor in request.inputs.items() if isinstance(tensor, Tensor)}
    laid_out = {number for number in given if graph.tensors[number].strides is not None}
    in_memory = {number for number in laid_out if given[number] != graph.tensors[number].shape}
    return PreparedGraph(graph, tuple(planned), wanted, layout, options, in_memory)


def _describe(prepared: PreparedGraph, inputs: list[LogicalTensor]) -> dict[str, Any]:
    return {
        "valid": True,
        "inputs": [_described(prepared.graph.tensors[tensor.id]) for tensor in inputs],
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


class NodeCall(Call):
    """The call of a node: the graph has its place in the queue."""

    def _admitted(self) -> AbstractContextManager[None]:
        return nullcontext()


class GraphRun(Work):
    """The calls of a graph's nodes, one after the other; the `lease` owns all memory.

    `tensors` are the segments of the graph's inputs by id.
    """

    streams = "progress"

    def __init__(self, service: Service, prepared: PreparedGraph, tensors: Mapping[str, Segment], lease: Lease) -> None:
        self._service = service
        self._prepared = prepared
        self._values = {int(name): segment for name, segment in tensors.items()}
        self._lease = lease
        self._admitted = ExitStack()
        self._running: Call | None = None
        self._cancelled = False
        self._result: Result | None = None

    @property
    def output_bytes(self) -> int:
        """Size of the requested tensors."""
        tensors = self._prepared.graph.tensors
        return sum(_bytes(tensors[number], self._prepared.layout) for number in self._prepared.wanted)

    async def __aenter__(self) -> Self:
        """Queue the graph, as one call; raises what entering a `Call` raises."""
        self._admitted.enter_context(self._service.admission.call(current_context()))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave the queue; the lease owns the memory."""
        self._admitted.close()

    def result(self) -> Result:
        """Return the requested tensors, and the statistics of all nodes."""
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """Stop the call that runs, and those that follow."""
        self._cancelled = True
        if self._running is not None:
            self._running.cancel()

    async def events(self, *, each: bool = True) -> AsyncGenerator[Event, None]:
        """Compute all nodes; yield `Progress` only. Raises what running a call raises."""
        prepared, values, lease = self._prepared, self._values, self._lease
        total = sum(planned.units for _, planned in prepared.nodes)
        for number in prepared.in_memory:
            values[number] = await dense(prepared.graph.tensors[number], values[number], lease)
        uses = Counter(prepared.wanted)
        for node, _ in prepared.nodes:
            uses.update(node.inputs.values())
        started, described, done = time.perf_counter(), [], 0
        for node, planned in prepared.nodes:
            op = planned.op
            inputs = {
                row.name: lease.share(values[node.inputs[row.name]]) for row in op.inputs if row.name in node.inputs
            }
            async with (
                NodeCall(self._service, planned, inputs, lease) as call,
                aclosing(call.events(each=each)) as events,
            ):
                self._running = call
                if self._cancelled:
                    call.cancel()
                async for event in events:
                    if isinstance(event, Progress):
                        yield Progress(done + event.done, total)
                self._running = None
                (output,) = call.outputs
                values[node.output] = lease.share(output.job.output)
                described.append(
                    {"id": node.id, "name": node.name, "op": op.called_as, "stats": call.stats}
                    | {"resolved": planned.resolved}
                )
            done += planned.units
            uses.subtract(node.inputs.values())
            for number in {*node.inputs.values(), node.output} & values.keys():
                if not uses[number]:
                    lease.release(values.pop(number))
        outputs = [await _output(prepared, number, values[number], lease) for number in prepared.wanted]
        milliseconds = round((time.perf_counter() - started) * 1000, 3)
        stats = {"gmac": prepared.graph.macs / 1e9, "compute_ms": milliseconds}
        self._result = Result({"nodes": described, "stats": stats}, outputs, prepared.options.encoding)


def _reply_shape(tensor: LogicalTensor, layout: str) -> tuple[int, ...]:
    """Return the shape of a result in the reply: for layout `memory` that of its memory."""
    assert tensor.shape is not None
    return tensor.shape if layout == "logical" or tensor.strides is None else (tensor.span,)


async def _output(prepared: PreparedGraph, number: int, segment: Segment, lease: Lease) -> HeldTensor:
    """Return a result, in the memory layout of its logical tensor if that was requested."""
    tensor = prepared.graph.tensors[number]
    assert tensor.shape is not None
    if prepared.layout == "logical" or tensor.strides is None:
        return HeldTensor(str(number), TensorSpec(str(number), tensor.dtype, tensor.shape), segment)
    laid_out = await lease.acquire_async(tensor.span * dtype(tensor.dtype).itemsize)
    await _copy(tensor, segment, laid_out, scatter=True)
    return HeldTensor(str(number), TensorSpec(str(number), tensor.dtype, (tensor.span,)), laid_out, tensor.strides)


async def dense(tensor: LogicalTensor, segment: Segment, lease: Lease) -> Segment:
    """Return the elements of a tensor's memory in C order; the given segment is released."""
    assert tensor.shape is not None
    packed = await lease.acquire_async(_bytes(tensor))
    await _copy(tensor, packed, segment, scatter=False)
    lease.release(segment)
    return packed


async def _copy(tensor: LogicalTensor, packed: Segment, memory: Segment, *, scatter: bool) -> None:
    """Copy between C order (`packed`) and the tensor's own strides (`memory`), in a thread if it is large."""
    assert tensor.shape is not None
    assert tensor.strides is not None
    kind = storage_dtype(tensor.dtype)
    dense_view = np.frombuffer(packed.view, kind, int(np.prod(tensor.shape))).reshape(tensor.shape)
    flat = np.frombuffer(memory.view, kind, tensor.span)
    if scatter:
        flat[:] = 0  # also between the elements
    steps = [step * kind.itemsize for step in tensor.strides]
    strided = np.lib.stride_tricks.as_strided(flat, tensor.shape, steps)
    target, source = (strided, dense_view) if scatter else (dense_view, strided)
    await in_thread_if(dense_view.nbytes > _INLINE, np.copyto, target, source)


def _bytes(tensor: LogicalTensor, layout: str = "logical") -> int:
    shape = () if tensor.shape is None else _reply_shape(tensor, layout)
    return tensor_bytes(TensorSpec("", tensor.dtype, shape))


def _described(tensor: LogicalTensor) -> dict[str, Any]:
    described: dict[str, Any] = {"id": tensor.id, "dtype": tensor.dtype, "shape": list(tensor.shape or ())}
    return described | ({} if tensor.strides is None else {"strides": list(tensor.strides)})


def _too_large(
    reason: str, value: int, limit: int, what: str, most: str, loc: Sequence[str | int] = ("graph",)
) -> TooLarge:
    """Return the error for a graph that exceeds a limit; `most` says what needs the most, and `loc` where it is."""
    return TooLarge(
        f"the graph needs {value} {what}, but this service allows {limit}: {most}",
        data={"reason": reason, "limit": limit, "value": value, "loc": list(loc)},
    )
