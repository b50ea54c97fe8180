"""The `/rpc` API: the whole of JSON-RPC 2.0, answered as JSON or as server-sent events.

Methods have no side effects, so notifications are read and not executed, except `notifications/cancelled`
(`app.calls.cancel`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.api.rpc.methods import METHODS, Method, MethodContext
from app.calls.call import Call
from app.calls.cancel import NOTIFICATION, Running, session_of
from app.calls.errors import as_convgrad_error
from app.calls.service import Service
from app.http.context import context_of, headers_of
from app.http.disconnect import cancel_on_disconnect
from app.intake.body import declared_length, media_type, read_body
from app.intake.json import JsonIntake
from app.intake.values import TensorValues
from app.replies import sse
from app.replies.accept import choose
from app.replies.body import dump, send_head, send_piece
from app.replies.errors import rpc_error
from app.replies.result import JsonResult
from app.telemetry.context import RequestContext, current_context
from convgrad._errors import (
    Cancelled,
    ConvgradError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RateLimited,
    ShuttingDown,
    TooLarge,
    UnknownOperation,
    UnsupportedMediaType,
)
from schemas import rpc
from schemas.problems import safe_key
from schemas.tables import near_miss, operation_hint

__all__ = ["RpcResponse", "router", "shortcuts"]

_log = logging.getLogger("convgrad.request")

_CONTENT_TYPES = ("application/json", "application/json-rpc")
# Items of a batch that run at a time; each call uses all workers anyway.
_MAX_CONCURRENT = 4
# The messages that the specification defines; ours go to `data.detail`.
_STANDARD_MESSAGES = {-32700: "Parse error", -32600: "Invalid Request", -32601: "Method not found"}

router = APIRouter(tags=["JSON-RPC"])


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """A body that could not be read."""

    error: ConvgradError
    id: rpc.Id = None


@dataclass(frozen=True, slots=True)
class _Text:
    """One answer as JSON text."""

    pieces: Iterable[bytes]
    length: int | None


_Item = rpc.Request | rpc.Invalid | _Unreadable


@router.post("/rpc", operation_id="json_rpc")
async def call(request: Request) -> Response:
    """Answer JSON-RPC 2.0: single requests, notifications and batches."""
    return RpcResponse(METHODS, request.app.state.service)


def shortcuts() -> list[Route]:
    """Return the route of `call` for matching before all other routes (see `oip.shortcuts`)."""
    return [Route("/rpc", _Rpc(), methods=["POST"], include_in_schema=False)]


class _Rpc:
    """`call` as a bare ASGI application."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await RpcResponse(METHODS, scope["app"].state.service)(scope, receive, send)


class RpcResponse(Response):
    """Respond to one HTTP request with the given methods."""

    def __init__(self, methods: Mapping[str, Method], service: Service) -> None:
        self._methods = methods
        self._service = service
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, execute its requests, and reply."""
        headers = headers_of(scope)
        _check_content_type(headers)
        media_type = choose(headers.get("accept"), (*_CONTENT_TYPES, sse.MEDIA_TYPE))
        context = context_of(scope)
        with ExitStack() as admission, self._service.lease() as lease:
            context.session = session_of(headers)
            ctx = MethodContext(self._service, lease, context, self._admit(context, admission))
            message = await self._read(headers, receive, ctx)
            items = message.items if isinstance(message, rpc.Batch) else (message,)
            self._cancel_calls(items, ctx)
            wanted = [item for item in items if not (isinstance(item, rpc.Request) and item.is_notification)]
            if not wanted:
                await send({"type": "http.response.start", "status": 204, "headers": []})
                await send_piece(send, b"", last=True)
                return
            # A body that was not read to its end can't be watched for a disconnect.
            unread = isinstance(message, _Unreadable)
            async with nullcontext() if unread else cancel_on_disconnect(receive):
                if media_type == sse.MEDIA_TYPE:
                    await self._stream(wanted, ctx, send)
                elif isinstance(message, rpc.Batch):
                    await self._reply_batch(wanted, ctx, send, media_type)
                else:
                    await self._reply(wanted[0], ctx, send, media_type)

    def _admit(self, context: RequestContext, admission: ExitStack) -> ConvgradError | None:
        """Admit the request, or return why not: this is answered under the ids of the calls in the body."""
        if context.denied is not None:
            return context.denied
        try:
            admission.enter_context(self._service.admit())
        except (Overloaded, RateLimited, ShuttingDown) as refusal:
            return refusal
        return None

    async def _read(self, headers: Mapping[str, str], receive: Receive, ctx: MethodContext) -> _Item | rpc.Batch:
        settings = self._service.settings
        try:
            length = declared_length(headers)
            if ctx.context.denied is not None and (length is None or length > settings.head_limit):
                return _Unreadable(ctx.context.denied)  # don't read large bodies without a valid key
            values = TensorValues(ctx.lease, ctx.refusal)
            intake = JsonIntake(values, length=length, max_skeleton=int(settings.head_limit))
            async with asyncio.timeout(settings.deadline_s):
                await read_body(receive, intake, ctx.context.timings)
                return rpc.parse_message(await intake.finish_async())
        except TimeoutError:
            return _Unreadable(DeadlineExceeded("the deadline passed before the whole request arrived"))
        except (Cancelled, UnsupportedMediaType):
            raise
        except ConvgradError as error:
            return _Unreadable(error)

    def _cancel_calls(self, items: Iterable[_Item], ctx: MethodContext) -> None:
        """Handle the notifications that cancel calls."""
        context = ctx.context
        notifications = (item for item in items if isinstance(item, rpc.Request) and item.is_notification)
        for item in () if context.denied else notifications:
            if item.method == NOTIFICATION:
                self._service.cancellations.cancel(context.key, context.session, item.params)

    def _cancellable(self, item: _Item, ctx: MethodContext) -> AbstractContextManager[Running]:
        return self._service.cancellations.register(ctx.context.key, ctx.context.session, item.id)

    async def _reply(self, item: _Item, ctx: MethodContext, send: Send, media_type: str) -> None:
        async with AsyncExitStack() as open_while_sent:
            text = await self._answer(item, ctx, open_while_sent)
            await send_head(send, media_type, length=text.length)
            for piece in text.pieces:
                await send_piece(send, piece)
            await send_piece(send, b"", last=True)

    async def _reply_batch(self, items: Sequence[_Item], ctx: MethodContext, send: Send, media_type: str) -> None:
        """Send the answers in the order of their requests, each as soon as it and those before it are ready."""
        written = [asyncio.Event() for _ in range(len(items) + 1)]
        written[0].set()

        async def one(number: int) -> None:
            async with AsyncExitStack() as open_while_sent:
                text = await self._answer(items[number], ctx, open_while_sent)
                await written[number].wait()
                if not number:
                    await send_head(send, media_type)
                await send_piece(send, b"," if number else b"[")
                for piece in text.pieces:
                    await send_piece(send, piece)
            written[number + 1].set()

        await self._run_concurrently(one, len(items))
        await send_piece(send, b"]", last=True)

    async def _stream(self, items: Sequence[_Item], ctx: MethodContext, send: Send) -> None:
        """Send the messages of all items as one stream; their ids tell them apart."""
        async with sse.EventStream(send) as stream:

            async def one(number: int) -> None:
                item = items[number]
                async with AsyncExitStack() as opened:
                    running = opened.enter_context(self._cancellable(item, ctx))
                    running.on_progress = partial(stream.progress, item.id)
                    try:
                        outcome = await self._open(item, ctx, opened, running)
                        if isinstance(outcome, Call):
                            with running.call(outcome):
                                await sse.stream_call(outcome, stream, item.id)
                            return
                        pieces = _plain_text(item.id, outcome, ctx).pieces
                    except Cancelled as caught:
                        if not running.cancelled:  # the caller is gone
                            raise
                        pieces = _error_text(item.id, caught, ctx).pieces
                    except Exception as caught:  # noqa: BLE001 - every fault is an answer
                        pieces = _error_text(item.id, caught, ctx).pieces
                    await stream.pieces(pieces)

            await self._run_concurrently(one, len(items))

    async def _answer(self, item: _Item, ctx: MethodContext, stack: AsyncExitStack) -> _Text:
        """Execute one item; the resources of its answer are released with `stack`."""
        with self._cancellable(item, ctx) as running:
            return await self._outcome(item, ctx, stack, running)

    async def _outcome(self, item: _Item, ctx: MethodContext, stack: AsyncExitStack, running: Running) -> _Text:
        try:
            outcome = await self._open(item, ctx, stack, running)
            if not isinstance(outcome, Call):
                return _plain_text(item.id, outcome, ctx)
            with running.call(outcome):
                await outcome.finish()
            result = JsonResult.of(outcome)
            return _text(item.id, outcome.timings.each("encode", result.pieces()), result.length)
        except Cancelled as caught:
            if not running.cancelled:  # the caller is gone
                raise
            return _error_text(item.id, caught, ctx)
        except Exception as caught:  # noqa: BLE001 - every fault is an answer
            return _error_text(item.id, caught, ctx)

    async def _open(self, item: _Item, ctx: MethodContext, stack: AsyncExitStack, running: Running) -> Any:
        if isinstance(item, _Unreadable):
            raise item.error
        if ctx.context.denied is not None:
            raise ctx.context.denied.with_traceback(None)
        if isinstance(item, rpc.Invalid):
            raise InvalidRequest(item.message)
        method = self._methods.get(item.method)
        if method is None:
            hint, end = operation_hint(item.method)
            if hint is None and (hint := near_miss(item.method, tuple(self._methods))) is not None:
                end = f"; did you mean {hint}?"
            msg = f"there is no method {safe_key(item.method)}: rpc.discover lists the methods{end}"
            raise UnknownOperation(msg, data={"hint": hint})
        return await stack.enter_async_context(method(item.params, ctx, running))

    async def _run_concurrently(self, work: Callable[[int], Awaitable[None]], count: int) -> None:
        """Run `work` for the numbers below `count`, a few at a time, started in order."""
        numbers = iter(range(count))
        runners = min(_MAX_CONCURRENT, count, self._service.admission.limit_of(current_context()))

        async def runner() -> None:
            for number in numbers:
                await work(number)
                await asyncio.sleep(0)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(runners):
                    group.create_task(runner())
        except BaseExceptionGroup as found:
            # Errors of items are answers; what is raised here concerns the connection and is the same for all.
            raise found.exceptions[0] from None


def _check_content_type(headers: Mapping[str, str]) -> None:
    if media_type(headers) not in ("", *_CONTENT_TYPES):
        raise UnsupportedMediaType(
            f"the Content-Type must be {' or '.join(_CONTENT_TYPES)}", data={"supported": _CONTENT_TYPES}
        )


def _text(request_id: rpc.Id, result: Iterable[bytes], length: int | None) -> _Text:
    before, after = b'{"jsonrpc":"2.0","result":', b',"id":%s}' % dump(request_id)

    def pieces() -> Iterator[bytes]:
        yield before
        yield from result
        yield after

    return _Text(pieces(), None if length is None else len(before) + length + len(after))


def _plain_text(request_id: rpc.Id, outcome: Any, ctx: MethodContext) -> _Text:
    if isinstance(outcome, JsonResult):
        return _text(request_id, ctx.context.timings.each("encode", outcome.pieces()), outcome.length)
    text = outcome if isinstance(outcome, bytes) else dump(outcome)
    ctx.documents.add(len(text))
    return _text(request_id, (text,), len(text))


def _error_text(request_id: rpc.Id, caught: Exception, ctx: MethodContext) -> _Text:
    error = as_convgrad_error(caught, log=_log)
    ctx.context.fail(error)
    fields = rpc_error(error)
    if fields["code"] in _STANDARD_MESSAGES:
        fields["data"]["detail"] = fields["message"]
        fields["message"] = _STANDARD_MESSAGES[fields["code"]]
    text = dump(rpc.error_response(request_id, **fields))
    try:
        ctx.documents.add(len(text))
    except TooLarge as full:
        text = dump(rpc.error_response(request_id, **rpc_error(full)))
    return _Text((text,), len(text))
