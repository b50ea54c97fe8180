"""The `/v1` door: JSON or multipart in; JSON, `.npy`, events or tensor frames out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.call import Call
from app.connection import cancel_on_disconnect
from app.doors.calls import read_request
from app.intake.landing import Holding
from app.intake.tensors import metas, settle
from app.middleware import context_of
from app.replies import frames, npy, sse
from app.replies.accept import choose
from app.replies.result import send_result
from app.service import Service
from convgrad._errors import DeadlineExceeded
from schemas.describe import describe, list_operations
from schemas.tables import find_operation

__all__ = ["router"]

router = APIRouter(prefix="/v1/ops", tags=["operations"])


async def _send_events(call: Call, send: Send, request_id: str) -> None:
    await sse.send_sse(call, send, request_id)


_SENDERS: dict[str, Callable[[Call, Send, str], Awaitable[None]]] = {
    "application/json": lambda call, send, _: send_result(call, send),
    npy.MEDIA_TYPE: lambda call, send, _: npy.send_npy(call, send),
    sse.MEDIA_TYPE: sse.send_sse,
    frames.MEDIA_TYPE: lambda call, send, _: frames.send_frames(call, send),
}


@router.get("")
async def list_() -> list[dict[str, Any]]:
    """List the operations with their aliases."""
    return list_operations()


@router.get("/{op}")
async def describe_(op: str) -> dict[str, Any]:
    """Describe one operation: attributes, inputs, outputs, layouts."""
    return describe(op)


@router.post("/{op}/validate")
async def validate(op: str, request: Request) -> Response:
    """Check a call without computing it; its tensors may be dtype and shape alone."""
    return _Validation(op, request.app.state.service)


@router.post("/{op}")
async def compute(op: str, request: Request) -> Response:
    """Compute an operation."""
    return _Computation(op, request.app.state.service)


class _Deferred(Response):
    """Answer with the ASGI channels in hand, because the body is read, and the reply sent, piece by piece."""

    def __init__(self, op: str, service: Service) -> None:
        self._called = find_operation(op)
        self._service = service
        self.background = None


class _Validation(_Deferred):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        choose(Headers(scope=scope).get("accept"), ["application/json"])
        settings = self._service.settings
        with Holding(self._service.segments) as holding:
            async with asyncio.timeout(settings.deadline_s):
                request = await read_request(
                    scope, receive, self._called, holding, settings, need_data=False
                )
            reply = await self._service.validate(
                self._called.called_as, request.attributes, metas(request.inputs), request.options
            )
        await JSONResponse(reply)(scope, receive, send)


class _Computation(_Deferred):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, context = self._service, context_of(scope)
        send_reply = _SENDERS[choose(Headers(scope=scope).get("accept"), list(_SENDERS))]
        with service.admit(), Holding(service.segments) as holding:
            try:
                async with asyncio.timeout(service.settings.deadline_s):
                    request = await read_request(scope, receive, self._called, holding, service.settings)
            except TimeoutError:
                raise DeadlineExceeded("the deadline was over before the request had arrived") from None
            with context.timings.measure("decode"):
                prepared = await service.prepare(
                    self._called.called_as,
                    request.attributes,
                    metas(request.inputs),
                    request.options,
                    started=context.started,
                )
                tensors = await settle(request.inputs, holding)
            async with (
                cancel_on_disconnect(receive),
                service.call(prepared, tensors, holding, timings=context.timings) as call,
            ):
                await send_reply(call, send, context.request_id)
