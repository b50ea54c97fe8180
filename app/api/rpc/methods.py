"""The JSON-RPC methods: every operation under every name, `ops.*` and `rpc.discover`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from app.api.graphs import run_request, validate_request
from app.calls.call import Call
from app.calls.cancel import Running
from app.calls.planning import tensor_bytes
from app.calls.service import Service
from app.calls.verifying import report_of
from app.intake.graphs import GRAPH, MEMBERS, GraphRequest, read_graph_request
from app.intake.requests import read_call
from app.intake.sinks import Lease
from app.intake.tensors import collect_tensors
from app.replies.body import dump
from app.replies.result import JsonResult
from app.telemetry.context import RequestContext
from convgrad._errors import ConvgradError, TooLarge, UnknownOperation
from schemas.describe import describe, list_operations
from schemas.dumps import is_dump
from schemas.openrpc import openrpc_document
from schemas.problems import invalid_params, problem
from schemas.rpc import CALL_PARAMS, bind_params
from schemas.tables import CalledOperation, find_operation, operation_names, verified

__all__ = ["METHODS", "Method", "MethodContext", "Params"]

Params = Mapping[str, Any] | Sequence[Any] | None


# A batch could request a document of tens of kilobytes a thousand times: the answer's documents are limited in total.
_DOCUMENTS = 4 << 20


class Documents:
    """Count the bytes of one answer: of its documents, errors among them, and of the tensors of its results."""

    def __init__(self) -> None:
        self._left = _DOCUMENTS
        self._tensors = 0

    def add(self, count: int) -> None:
        """Add the size of a document; raises `TooLarge` when the total exceeds the limit."""
        if count > self._left:
            raise TooLarge(
                f"the documents in the answer to a batch may have {_DOCUMENTS} bytes: request the rest separately",
                data={"reason": "batch", "limit": _DOCUMENTS},
            )
        self._left -= count

    def add_tensors(self, count: int, limit: int) -> None:
        """Add the size of a result's tensors; raises `TooLarge` when those of a batch exceed the limit of one call."""
        if self._tensors and self._tensors + count > limit:
            raise TooLarge(
                f"the output tensors in the answer to a batch may have {limit} bytes: request the rest separately",
                data={"reason": "batch", "limit": limit},
            )
        self._tensors += count


@dataclass(frozen=True, slots=True)
class MethodContext:
    """What the methods called by one HTTP request share.

    `refusal` is why calls are not accepted now: their tensors were skipped while the body was read, so that each call
    can be answered under its own id.
    """

    service: Service
    lease: Lease
    context: RequestContext
    refusal: ConvgradError | None = None
    documents: Documents = field(default_factory=Documents)


Method = Callable[[Params, MethodContext, Running], AbstractAsyncContextManager[Any]]
"""Enter to get a method's result: a JSON value, JSON text in bytes or pieces, or a `Call` to run inside the block.

A method that runs calls itself runs them as calls of the `Running`, which the request's id cancels.
"""


def _plain(answer: Callable[..., Any], *names: str) -> Method:
    """Make a method of a function whose parameters are all required, given by name or by position."""

    @asynccontextmanager
    async def method(params: Params, ctx: MethodContext, running: Running) -> AsyncIterator[Any]:  # noqa: ARG001
        yield answer(**bind_params(params, names, required=names))

    return method


@cache
def _discover() -> bytes:
    return dump(openrpc_document())


def _describe(op: object) -> dict[str, Any]:
    return describe(_called(op).called_as)


@asynccontextmanager
async def _validate(params: Params, ctx: MethodContext, running: Running) -> AsyncIterator[dict[str, Any]]:  # noqa: ARG001
    if ctx.refusal is not None:
        raise ctx.refusal.with_traceback(None)
    if is_dump(params):
        assert isinstance(params, Mapping)
        given: Any = {name: value for name, value in params.items() if name != "op"}
        called = _called(params.get("op", _kind(params)))
    else:
        given = bind_params(params, ("op", *CALL_PARAMS), required=("op",))
        called = _called(given.pop("op"))
    request = read_call(called, given, ctx.lease, need_data=False)
    yield await ctx.service.validate(called.called_as, request.attributes, request.metas, request.options)


@asynccontextmanager
async def _verify(params: Params, ctx: MethodContext, running: Running) -> AsyncIterator[Any]:
    if ctx.refusal is not None:
        raise ctx.refusal.with_traceback(None)
    given = bind_params(params, ("op", *CALL_PARAMS), required=("op",))
    called = _called(given.pop("op"))
    request = read_call(verified(called), given, ctx.lease)
    name, started = called.called_as, ctx.context.started
    prepared = await ctx.service.prepare_verification(
        name, request.attributes, request.metas, request.options, started=started
    )
    with ctx.context.timings.measure("decode"):
        tensors = await collect_tensors(request.inputs, ctx.lease)
    async with ctx.service.call(prepared, tensors, ctx.lease, timings=ctx.context.timings) as call:
        await running.finish(call)
        yield report_of(call)


def _graph_request(params: Params, ctx: MethodContext) -> GraphRequest:
    if ctx.refusal is not None:
        raise ctx.refusal.with_traceback(None)
    return read_graph_request(GRAPH, bind_params(params, MEMBERS, required=("graph",)))


@asynccontextmanager
async def _run_graph(params: Params, ctx: MethodContext, running: Running) -> AsyncIterator[JsonResult]:
    request = _graph_request(params, ctx)
    call = request.read(ctx.lease)
    outputs, document, encoding = await run_request(ctx.service, request, call, ctx.lease, ctx.context, running)
    ctx.documents.add_tensors(sum(len(output.data) for output in outputs), ctx.service.settings.output_limit)
    yield JsonResult(document, outputs, encoding)


@asynccontextmanager
async def _validate_graph(params: Params, ctx: MethodContext, running: Running) -> AsyncIterator[dict[str, Any]]:  # noqa: ARG001
    request = _graph_request(params, ctx)
    yield await validate_request(ctx.service, request, ctx.lease, started=ctx.context.started)


def _operation(called: CalledOperation) -> Method:
    @asynccontextmanager
    async def method(params: Params, ctx: MethodContext, running: Running) -> AsyncIterator[Call]:  # noqa: ARG001
        if ctx.refusal is not None:
            raise ctx.refusal.with_traceback(None)
        given = params if is_dump(params) else bind_params(params, CALL_PARAMS)
        request = read_call(called, given, ctx.lease)
        prepared = await ctx.service.prepare(
            called.called_as, request.attributes, request.metas, request.options, started=ctx.context.started
        )
        ctx.documents.add_tensors(sum(map(tensor_bytes, prepared.op.outputs)), ctx.service.settings.output_limit)
        with ctx.context.timings.measure("decode"):
            tensors = await collect_tensors(request.inputs, ctx.lease)
        async with ctx.service.call(prepared, tensors, ctx.lease, timings=ctx.context.timings) as call:
            yield call

    return method


def _called(op: object) -> CalledOperation:
    try:
        return find_operation(op)
    except UnknownOperation as error:
        raise invalid_params("params", [problem(["op"], error.message, "unknown_operation")]) from None


def _kind(dump: Mapping[str, Any]) -> object:
    graph = dump.get("graph")
    only = graph[0] if isinstance(graph, list) and len(graph) == 1 else dump
    return only.get("kind") if isinstance(only, Mapping) else None


METHODS: dict[str, Method] = {
    **{name: _operation(find_operation(name)) for name in operation_names()},
    "ops.list": _plain(list_operations),
    "ops.describe": _plain(_describe, "op"),
    "ops.validate": _validate,
    "ops.verify": _verify,
    "graph.run": _run_graph,
    "graph.validate": _validate_graph,
    "rpc.discover": _plain(_discover),
}
"""Every method by its name."""
