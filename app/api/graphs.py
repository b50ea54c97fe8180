"""Graphs dumped by oneDNN Graph: `POST /v1/graphs`, `POST /v1/graphs/validate`, and the same in JSON-RPC."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.openapi import GRAPH_DOCS, GRAPH_VALIDATE_DOCS
from app.calls.call import OnProgress
from app.calls.cancel import Running
from app.calls.graphs import PreparedGraph, dense, describe_graph, prepare_graph, run_graph
from app.calls.service import Service
from app.http.context import context_of, exchange_of, headers_of
from app.http.disconnect import cancel_on_disconnect
from app.intake.body import declared_length, media_type, read_body
from app.intake.graphs import GRAPH, GraphRequest, check_graph, read_graph_request, resolved_of
from app.intake.json import JsonIntake
from app.intake.multipart import MultipartIntake
from app.intake.options import Encoding, parse_options
from app.intake.requests import RequestedCall
from app.intake.sinks import Lease
from app.intake.tensors import Tensor, collect_tensors
from app.intake.values import TensorValues
from app.pool.buffers import Segment
from app.replies import multipart, sse
from app.replies.accept import choose
from app.replies.body import send_json
from app.replies.result import JsonResult, send_json_result
from app.telemetry.context import RequestContext, current_context
from convgrad._errors import DeadlineExceeded, UnsupportedMediaType

__all__ = ["router", "run_request", "validate_request"]

router = APIRouter(prefix="/v1/graphs", tags=["graphs"])

_FORMS = ("application/json", "multipart/form-data")
_JSON = "application/json"


@router.post("/validate", **GRAPH_VALIDATE_DOCS)
async def validate(request: Request) -> Response:
    """Check a graph without computing it: returns its inputs and outputs, and each node's attributes and cost.

    An invalid graph gets everything that is wrong with it at once.
    """
    return _Validation(request.app.state.service)


@router.post("", **GRAPH_DOCS)
async def run(request: Request) -> Response:
    """Compute the nodes of a graph in order; results stay in shared memory until they are sent."""
    return _Run(request.app.state.service)


async def prepare(service: Service, request: GraphRequest, call: RequestedCall, *, started: float) -> PreparedGraph:
    """Check and plan a graph, of whose tensors at least dtype and shape have arrived."""
    options, deadline = parse_options(call.options), _deadline(service, call, started)
    return await prepare_graph(service, resolved_of(request, call), request.wanted, request.layout, options, deadline)


async def validate_request(service: Service, request: GraphRequest, lease: Lease, *, started: float) -> dict[str, Any]:
    """Describe a valid graph; its tensors may be missing, or just dtype and shape."""
    call = request.read(lease, need_data=False)
    options = parse_options(call.options)
    graph = resolved_of(request, call, need_all=False)
    deadline = _deadline(service, call, started)
    with service.admission.call(current_context()):
        prepared = await prepare_graph(service, graph, request.wanted, request.layout, options, deadline)
    return describe_graph(prepared, request.graph.inputs)


async def run_request(
    service: Service,
    request: GraphRequest,
    call: RequestedCall,
    lease: Lease,
    context: RequestContext,
    running: Running,
) -> tuple[list[Any], dict[str, Any], Encoding]:
    """Compute a graph whose tensors have arrived; return its outputs, the rest of the reply, and their encoding."""
    prepared = await prepare(service, request, call, started=context.started)
    with context.timings.measure("decode"):
        tensors = await collect_tensors(call.inputs, lease)
        tensors = {name: await _ordered(prepared, call, name, found, lease) for name, found in tensors.items()}
    outputs, document = await run_graph(service, prepared, tensors, lease, context.timings, running)
    return outputs, document, prepared.options.encoding


async def _ordered(prepared: PreparedGraph, call: RequestedCall, name: str, segment: Segment, lease: Lease) -> Segment:
    """Return a tensor in C order, if it was given as it lies in memory."""
    tensor, given = prepared.graph.tensors[int(name)], call.inputs[name]
    assert isinstance(given, Tensor)
    in_memory = tensor.strides is not None and given.shape != tensor.shape
    return await dense(tensor, segment, lease) if in_memory else segment


def _deadline(service: Service, call: RequestedCall, started: float) -> float:
    options = parse_options(call.options)
    allowed = service.settings.deadline_s
    if options.deadline_ms is not None:
        allowed = min(allowed, options.deadline_ms / 1000)
    return started + allowed


Check = Callable[[GraphRequest, RequestedCall], Awaitable[object]]


class _Deferred(Response):
    """A response that uses the ASGI channels itself, to read the body piece by piece."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.background = None

    async def _read(
        self, scope: Scope, receive: Receive, lease: Lease, check: Check | None
    ) -> tuple[GraphRequest, RequestedCall | None]:
        """Read the request; without `check` its tensors are not read. A multipart body is checked while it arrives."""
        headers, timings = headers_of(scope), context_of(scope).timings
        length, form = declared_length(headers), _form(headers)
        requests: list[GraphRequest] = []

        def take_apart(called: Any, document: Any) -> GraphRequest:
            requests.append(read_graph_request(called, document))
            return requests[0]

        async def early(call: RequestedCall) -> None:
            if check is not None:
                await check(requests[0], call)

        try:
            async with asyncio.timeout(self._service.settings.deadline_s):
                limit = int(self._service.settings.head_limit)
                if form == "multipart/form-data":
                    parts = MultipartIntake(
                        headers["content-type"],
                        GRAPH,
                        lease,
                        length=length,
                        check=None if check is None else early,
                        take_apart=take_apart,
                        max_request=limit,
                    )
                    await read_body(receive, parts, timings, parts)
                    call = parts.finish(need_data=check is not None)
                    return requests[0], call
                intake = JsonIntake(TensorValues(lease), length=length, max_skeleton=limit, begun=check_graph)
                await read_body(receive, intake, timings)
                request = take_apart(GRAPH, await intake.finish_async())
                return request, None if check is None else request.read(lease)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the whole request arrived") from None


class _Validation(_Deferred):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        choose(headers_of(scope).get("accept"), [_JSON])
        service = self._service
        with service.admit(), service.lease() as lease:
            request, _ = await self._read(scope, receive, lease, None)
            async with cancel_on_disconnect(receive):
                reply = await validate_request(service, request, lease, started=context_of(scope).started)
        await send_json(send, reply)


class _Run(_Deferred):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, context = self._service, context_of(scope)
        form = choose(headers_of(scope).get("accept"), (*_FORMS, sse.MEDIA_TYPE))

        async def check(request: GraphRequest, call: RequestedCall) -> None:
            await prepare(service, request, call, started=context.started)

        with service.admit(), service.lease(exchange_of(scope).direct_body) as lease:
            request, call = await self._read(scope, receive, lease, check)
            assert call is not None
            run = partial(run_request, service, request, call, lease, context)

            async def work(on_progress: OnProgress) -> Iterable[bytes]:
                outputs, document, encoding = await run(Running(on_progress))
                return JsonResult(document, outputs, encoding).pieces()

            async with cancel_on_disconnect(receive):
                if form == sse.MEDIA_TYPE:
                    await sse.send_work(work, send, context.request_id)
                    return
                outputs, document, encoding = await run(Running())
                if form == multipart.MEDIA_TYPE:
                    await multipart.send_parts(document, outputs, send, context.timings)
                else:
                    await send_json_result(JsonResult(document, outputs, encoding), send, context.timings)


def _form(headers: Mapping[str, str]) -> str:
    name = media_type(headers)
    if name in _FORMS:
        return name
    raise UnsupportedMediaType(f"the Content-Type must be {' or '.join(_FORMS)}", data={"supported": list(_FORMS)})
