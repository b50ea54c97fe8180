"""The `/rpc` API: the whole of JSON-RPC 2.0, answered as JSON or as server-sent events.

Notifications are executed where they have an effect: those of `check.*`, and `notifications/cancelled`, which cancels
the request with its `requestId` (`app.calls.cancel`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from inspect import isawaitable
from itertools import chain
from typing import TypeGuard

from fastapi import APIRouter, Request
from starlette.types import Send

from app.api.answer import answer, check_media_type
from app.api.routing import service_of
from app.api.rpc.methods import METHODS, Method, Params, TaskMethod
from app.calls.service import Service
from app.calls.tasks import Task
from app.calls.work import Work, finish
from app.http.exchange import Exchange, exchange_of
from app.intake.body import media_type, read_json, refuse_encoding
from app.intake.lease import Lease
from app.intake.requests import RequestObject
from app.replies import sse
from app.replies.body import json_bytes, send_body, send_head, send_piece
from app.replies.errors import rpc_error
from app.replies.formats import choose
from app.replies.result import json_text, rpc_response
from convgrad._errors import Cancelled, ConvgradError, InvalidRequest, UnknownOperation, UnsupportedMediaType
from schemas import rpc
from schemas.broken_rules import safe_key
from schemas.tables import near_miss, operation_hint

__all__ = ["answer_rpc", "router"]

_CONTENT_TYPES = ("application/json", "application/json-rpc")
# Items of a batch that run at a time; each call uses all workers anyway.
_MAX_CONCURRENT = 4
# The messages that the specification defines; ours go to `data.detail`.
_STANDARD_MESSAGES = {-32700: "Parse error", -32600: "Invalid Request", -32601: "Method not found"}
# Longest body that is read without a valid key, to answer under its id.
_UNKNOWN = 64 << 10
# Names the session of a request.
_SESSION_HEADER = "x-session-id"

router = APIRouter()

_Item = rpc.Request | rpc.Invalid | ConvgradError
"""A request, an invalid one, or why the body could not be read."""

Write = Callable[[Iterable[bytes], int | None], Awaitable[None]]
"""Sends an answer, in pieces of text without line breaks, of which the length may be known."""


@router.post("/rpc")
async def call(request: Request) -> None:
    """Answer JSON-RPC 2.0: single requests, notifications and batches."""
    await answer_rpc(exchange_of(request.scope), service_of(request))


async def answer_rpc(exchange: Exchange, service: Service, methods: Mapping[str, Method] = METHODS) -> None:
    """Read one HTTP request, execute its JSON-RPC requests, and reply."""
    check_media_type(media_type(exchange.headers), (*_CONTENT_TYPES, ""))
    reply_type = choose(exchange.headers.get("accept", ""), (*_CONTENT_TYPES, sse.MEDIA_TYPE))
    with service.lease(exchange.context) as lease:
        message = await _read(exchange, service, lease)
        lease.received()
        await _Message(exchange, service, methods).answer(message, reply_type)


async def _read(exchange: Exchange, service: Service, lease: Lease) -> _Item | rpc.Batch:
    limit, denied = int(service.settings.json_limit), exchange.context.denied
    try:
        refuse_encoding(exchange.headers)
        if denied is not None and (exchange.length is None or exchange.length > _UNKNOWN):
            return denied
        message = rpc.parse_message(await read_json(exchange.chunks(), lease, length=exchange.length, limit=limit))
        return denied if denied is not None and isinstance(message, rpc.Batch) else message
    except (Cancelled, UnsupportedMediaType):
        raise
    except ConvgradError as fault:
        return fault.with_traceback(None)


class _Message:
    """One message: a request, a notification, or a batch of both."""

    def __init__(self, exchange: Exchange, service: Service, methods: Mapping[str, Method]) -> None:
        self._exchange = exchange
        self._context = exchange.context
        self._caller = exchange.context.tenant, exchange.headers.get(_SESSION_HEADER, "")
        self._service = service
        self._methods = methods
        self._one_check = asyncio.Lock()  # requests about checks run in their order

    async def answer(self, message: _Item | rpc.Batch, media_type: str) -> None:
        """Execute the message and reply."""
        items, send = message.items if isinstance(message, rpc.Batch) else (message,), self._exchange.send
        self._cancel_calls(items)
        wanted = [item for item in items if not _is_notification(item) or _changes_check(item)]
        if all(map(_is_notification, wanted)):
            for item in wanted:
                await self._execute(item, _nothing)
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send_piece(send, b"", last=True)
        elif media_type == sse.MEDIA_TYPE:
            async with sse.EventStream(send) as stream:
                write: Write = lambda pieces, _: stream.message(pieces)  # noqa: E731 -- of all items
                await self._run_concurrently(lambda number: self._execute(wanted[number], write, stream), len(wanted))
        elif isinstance(message, rpc.Batch):
            await self._reply_batch(wanted, media_type)
        else:
            await self._execute(wanted[0], lambda pieces, length: send_body(send, pieces, media_type, length))

    def _cancel_calls(self, items: Iterable[_Item]) -> None:
        """Handle the notifications that cancel calls."""
        for item in () if self._context.denied else items:
            if _is_notification(item) and item.method == "notifications/cancelled" and isinstance(item.params, Mapping):
                request_id = rpc.id_of({"id": item.params.get("requestId")})
                self._service.cancellations.cancel(*self._caller, request_id)

    async def _reply_batch(self, items: Sequence[_Item], media_type: str) -> None:
        """Send the answers in the order of their requests, each as soon as it and those before it are ready."""
        send, comma = self._exchange.send, b"["
        turns = [asyncio.Event() for _ in range(len(items) + 1)]
        turns[0].set()

        async def one(number: int) -> None:
            async def write(pieces: Iterable[bytes], _: int | None) -> None:
                nonlocal comma
                await turns[number].wait()
                if comma == b"[":
                    await send_head(send, media_type)
                before, comma = comma, b","
                for piece in chain((before,), pieces):
                    await send_piece(send, piece)

            await self._execute(items[number], write)
            await turns[number].wait()
            turns[number + 1].set()

        await self._run_concurrently(one, len(items))
        await send_piece(send, b"]", last=True)

    async def _execute(self, item: _Item, write: Write, stream: sse.EventStream | None = None) -> None:
        """Execute one item and write its answer, unless the work has sent it to the `stream`.

        A notification gets no answer. In a stream, the ids of messages tell those of several items apart.
        """
        request_id, begun = None if isinstance(item, ConvgradError) else item.id, False
        if _is_notification(item):
            write, stream = _nothing, None

        async def reply(pieces: Iterable[bytes], length: int | None) -> None:
            nonlocal begun
            begun = True
            await write(pieces, length)

        async def encode(work: Work, _: Send) -> None:
            running.add(work)
            if stream is not None and work.streams != "nothing":
                await sse.stream_work(work, stream, request_id)
                return
            await finish(work)
            pieces, length = await json_text(work.result(), partial(rpc_response, request_id))
            await reply(self._context.timings.each("encode", pieces), length)

        with self._service.cancellations.register(*self._caller, request_id) as running:
            try:
                async with self._one_check if _changes_check(item) else nullcontext():
                    method, params = self._method(item)
                    if isinstance(method, TaskMethod):
                        task, document = method.read(self._service, self._context, params)
                        await answer(self._exchange, task, partial(_decode, document), encode)
                    else:
                        value = method(params)
                        value = await value if isawaitable(value) else value
                        result = value if isinstance(value, bytes) else json_bytes(value)
                        text = b'{"jsonrpc":"2.0","result":%b,"id":%b}' % (result, json_bytes(request_id))
                        await reply((text,), len(text))
            except Exception as caught:
                if begun or (isinstance(caught, Cancelled) and not running.cancelled):  # the client has disconnected
                    raise
                error = self._error(request_id, caught)
                await write((error,), len(error))

    def _method(self, item: _Item) -> tuple[Method, Params]:
        """Return the method that an item calls, and its params; raises the error that answers it."""
        if isinstance(item, ConvgradError):
            raise item
        if self._context.denied is not None:
            raise self._context.denied.with_traceback(None)
        if isinstance(item, rpc.Invalid):
            raise InvalidRequest(item.message)
        method = self._methods.get(item.method)
        if method is None:
            raise _unknown(item.method, self._methods)
        return method, item.params

    async def _run_concurrently(self, work: Callable[[int], Awaitable[None]], count: int) -> None:
        """Run `work` for the numbers below `count`, a few at a time, started in order."""
        numbers = iter(range(count))
        runners = min(_MAX_CONCURRENT, count, self._service.admission.limit_of(self._context))

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
            # Without the traceback, whose frames hold views of the calls' memory until the next garbage collection.
            raise found.exceptions[0].with_traceback(None) from None

    def _error(self, request_id: rpc.Id, caught: Exception) -> bytes:
        fields = rpc_error(self._context.fail(caught))
        if fields["code"] in _STANDARD_MESSAGES:
            fields["data"]["detail"] = fields["message"]
            fields["message"] = _STANDARD_MESSAGES[fields["code"]]
        return json_bytes(rpc.error_response(request_id, **fields))


async def _nothing(_pieces: Iterable[bytes], _length: int | None) -> None:
    """Write no answer: the request is a notification."""


async def _decode(document: Mapping[str, object], _: Exchange, task: Task, __: Lease) -> RequestObject:
    return await (await task.read(document)).read()


def _is_notification(item: _Item) -> TypeGuard[rpc.Request]:
    return isinstance(item, rpc.Request) and item.is_notification


def _changes_check(item: _Item) -> bool:
    return isinstance(item, rpc.Request) and item.method.startswith("check.")


def _unknown(name: str, methods: Mapping[str, Method]) -> UnknownOperation:
    hint, end = operation_hint(name)
    if hint is None and (hint := near_miss(name, tuple(methods))) is not None:
        end = f"; did you mean {hint}?"
    msg = f"there is no method {safe_key(name)}: rpc.discover lists the methods{end}"
    return UnknownOperation(msg, data={"hint": hint})
