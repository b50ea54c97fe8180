"""The `/v1` API: JSON or multipart in; JSON, multipart, `.npy`, events or tensor frames out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.api.openapi import COMPUTE_DOCS, DESCRIBE_DOCS, LIST_DOCS, VALIDATE_DOCS, VERIFY_DOCS
from app.calls.call import Call, OnProgress, Prepared
from app.calls.overlap import OverlappedCall
from app.calls.service import Service
from app.calls.verifying import report_of
from app.http.context import context_of, exchange_of, headers_of
from app.http.disconnect import cancel_on_disconnect
from app.intake.body import declared_length, media_type, read_body
from app.intake.json import JsonIntake
from app.intake.multipart import MultipartIntake, OnArrival
from app.intake.requests import RequestedCall, check_attributes, read_call
from app.intake.sinks import Lease
from app.intake.tensors import collect_tensors
from app.intake.values import TensorValues
from app.pool.buffers import Segment
from app.replies import frames, multipart, npy, sse
from app.replies.accept import choose
from app.replies.body import dump, send_bytes, send_json
from app.replies.result import send_result
from convgrad._errors import DeadlineExceeded, UnsupportedMediaType
from schemas.describe import describe, list_operations
from schemas.tables import find_operation, verified
from schemas.tensors import TensorMeta

__all__ = ["REPLY_TYPES", "REQUEST_TYPES", "router", "shortcuts"]

Check = Callable[[RequestedCall], Awaitable[object]]
Metas = dict[str, TensorMeta | list[int]]

router = APIRouter(prefix="/v1/ops", tags=["operations"])

REQUEST_TYPES = ("application/json", "multipart/form-data")

_SENDERS: dict[str, Callable[[Call, Send, str], Awaitable[None]]] = {
    "application/json": lambda call, send, _: send_result(call, send),
    npy.MEDIA_TYPE: lambda call, send, _: npy.send_npy(call, send),
    sse.MEDIA_TYPE: sse.send_sse,
    frames.MEDIA_TYPE: lambda call, send, _: frames.send_frames(call, send),
    multipart.MEDIA_TYPE: lambda call, send, _: multipart.send_multipart(call, send),
}
REPLY_TYPES = tuple(_SENDERS)


@router.get("", **LIST_DOCS)
async def list_all() -> Any:
    """List the operations with their aliases."""
    return list_operations()


@router.get("/{op}", **DESCRIBE_DOCS)
async def describe_one(op: str) -> Any:
    """Describe one operation: attributes, inputs, outputs and layouts, as data."""
    return describe(op)


@router.post("/{op}/validate", **VALIDATE_DOCS)
async def validate(op: str, request: Request) -> Response:
    """Check a call without computing it: returns resolved attributes, output shapes, plan and cost.

    A tensor may be just its dtype and shape.
    """
    return _Validation(op, request.app.state.service)


@router.post("/{op}/verify", **VERIFY_DOCS)
async def verify(op: str, request: Request) -> Response:
    """Compare a result with the float64 reference: the result is one more input, named like the output.

    The reply is a report, with status 200 also for a result that fails.
    """
    return _Verifying(op, request.app.state.service)


@router.post("/{op}", **COMPUTE_DOCS)
async def compute(op: str, request: Request) -> Response:
    """Compute an operation, under any of its names."""
    return _Computation(op, request.app.state.service)


def shortcuts() -> list[Route]:
    """Return the route of `compute` for matching before all other routes (see `oip.shortcuts`)."""
    return [Route("/v1/ops/{op}", _Compute(), methods=["POST"], include_in_schema=False)]


class _Compute:
    """`compute` as a bare ASGI application."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _Computation(scope["path_params"]["op"], scope["app"].state.service)(scope, receive, send)


class _Deferred(Response):
    """A response that uses the ASGI channels itself, to read the body and send the reply piece by piece."""

    def __init__(self, op: str, service: Service) -> None:
        self._called = find_operation(op)
        self._service = service
        self.background = None

    async def _read(
        self, scope: Scope, receive: Receive, lease: Lease, *, check: Check | None, on_arrival: OnArrival | None = None
    ) -> RequestedCall:
        """Read the call in the format of its content type; without `check` its tensors need no data.

        Attributes and options are checked as soon as they are read. For a multipart body, `check` gets the call once
        its tensors' headers are known, and `on_arrival` then gets how much of them has arrived.
        """
        headers = headers_of(scope)
        length, form = declared_length(headers), _request_type(headers)
        timings, limit = context_of(scope).timings, int(self._service.settings.head_limit)
        try:
            async with asyncio.timeout(self._service.settings.deadline_s):
                if form == "multipart/form-data":
                    parts = MultipartIntake(
                        headers["content-type"],
                        self._called,
                        lease,
                        length=length,
                        check=check,
                        on_arrival=on_arrival,
                        max_request=limit,
                    )
                    await read_body(receive, parts, timings, parts)
                    return parts.finish(need_data=check is not None)
                begun = None if check is None else partial(check_attributes, self._called)
                document = JsonIntake(TensorValues(lease), length=length, max_skeleton=limit, begun=begun)
                await read_body(receive, document, timings)
                request = await document.finish_async()
                return read_call(self._called, request, lease, need_data=check is not None)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the whole request arrived") from None


class _Validation(_Deferred):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        choose(headers_of(scope).get("accept"), ["application/json"])
        service, name = self._service, self._called.called_as
        with service.admit():
            with service.lease() as lease:
                call = await self._read(scope, receive, lease, check=None)
            async with cancel_on_disconnect(receive):
                reply = await service.validate(name, call.attributes, call.metas, call.options)
        await send_json(send, reply)


class _Verifying(_Deferred):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply_type = choose(headers_of(scope).get("accept"), ["application/json", sse.MEDIA_TYPE])
        service, context, name = self._service, context_of(scope), self._called.called_as
        self._called = verified(self._called)

        async def prepare(call: RequestedCall) -> Prepared:
            return await service.prepare_verification(
                name, call.attributes, call.metas, call.options, started=context.started
            )

        async def check(call: RequestedCall) -> None:
            if self._called.operation.output_spellings.keys() & call.metas.keys():
                await prepare(call)
            else:  # the result may still come; a verification computes the reference, whatever the options
                service.check(name, call.attributes, call.metas, {"reference": True}, started=context.started)

        with service.admit(), service.lease(exchange_of(scope).direct_body) as lease:
            call = await self._read(scope, receive, lease, check=check)
            prepared = await prepare(call)
            with context.timings.measure("decode"):
                tensors = await collect_tensors(call.inputs, lease)
            running = service.call(prepared, tensors, lease, timings=context.timings)

            async def work(on_progress: OnProgress | None = None) -> list[bytes]:
                await running.finish(on_progress)
                return [dump(report_of(running))]

            async with cancel_on_disconnect(receive), running:
                if reply_type == sse.MEDIA_TYPE:
                    await sse.send_work(work, send, context.request_id)
                else:
                    (report,) = await work()
                    await send_bytes(send, report, "application/json")


class _Computation(_Deferred):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, context = self._service, context_of(scope)
        reply_type = choose(headers_of(scope).get("accept"), REPLY_TYPES)

        checked: tuple[Metas, Prepared] | None = None

        async def prepare(call: RequestedCall) -> Prepared:
            nonlocal checked
            metas = call.metas
            if checked is None or checked[0] != metas:  # an optional input may arrive after the first check
                name, started = self._called.called_as, context.started
                prepared = await service.prepare(name, call.attributes, metas, call.options, started=started)
                if reply_type == npy.MEDIA_TYPE:
                    npy.check_outputs(prepared)
                checked = metas, prepared
            return checked[1]

        with service.admit(), service.lease(exchange_of(scope).direct_body) as lease:
            async with OverlappedCall(service, lease, context.timings) as early:

                async def on_arrival(tensors: Mapping[str, Segment], received: Mapping[str, int]) -> None:
                    assert checked is not None
                    await early.advance(checked[1], tensors, received)

                call = await self._read(scope, receive, lease, check=prepare, on_arrival=on_arrival)
                with context.timings.measure("decode"):
                    prepared = await prepare(call)
                    tensors = await collect_tensors(call.inputs, lease)
                running = await early.complete(prepared, tensors)
                async with cancel_on_disconnect(receive), running:
                    await _SENDERS[reply_type](running, send, context.request_id)


def _request_type(headers: Mapping[str, str]) -> str:
    name = media_type(headers)
    if name in REQUEST_TYPES:
        return name
    raise UnsupportedMediaType(
        f"the Content-Type must be {' or '.join(REQUEST_TYPES)}",
        data={"supported": list(REQUEST_TYPES)},
    )
