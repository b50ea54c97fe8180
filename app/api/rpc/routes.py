"""The `/rpc` API: the whole of JSON-RPC 2.0, answered as JSON or as server-sent events.

Notifications are executed where they have an effect: those of `check.*`, and `notifications/cancelled`, which cancels
the request with its `requestId` (`app.calls.cancel`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, nullcontext
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, TypeGuard

from fastapi import APIRouter, Request

from app.api.answer import check_media_type
from app.api.routing import service_of
from app.api.rpc.methods import METHODS, Method, TaskMethod
from app.calls.cancel import Running
from app.calls.service import Service
from app.calls.tasks import RequestReceiver, Task
from app.calls.work import Work, finish
from app.http.exchange import Exchange, exchange_of
from app.intake.body import begun_documents, media_type, refuse_encoding, whole
from app.intake.json import JsonIntake
from app.intake.lease import Lease
from app.intake.values import TensorValues
from app.replies import sse
from app.replies.accept import choose
from app.replies.body import json_bytes, send_head, send_piece
from app.replies.errors import rpc_error
from app.replies.result import JsonResult, encoded
from convgrad._errors import (
    Cancelled,
    ConvgradError,
    InvalidRequest,
    Overloaded,
    RateLimited,
    ShuttingDown,
    TooLarge,
    UnknownOperation,
    UnsupportedMediaType,
)
from schemas import rpc
from schemas.broken_rules import safe_key
from schemas.tables import near_miss, operation_hint

__all__ = ["answer_rpc", "router"]

_CONTENT_TYPES = ("application/json", "application/json-rpc")
# Items of a batch that run at a time; each call uses all workers anyway.
_MAX_CONCURRENT = 4
# The messages that the specification defines; ours go to `data.detail`.
_STANDARD_MESSAGES = {-32700: "Parse error", -32600: "Invalid Request", -32601: "Method not found"}
# A batch could request a document of tens of kilobytes a thousand times: the answer's documents are limited in total.
_DOCUMENTS = 4 << 20
# The first of these that a request has names its session.
_SESSION_HEADERS = ("x-session-id", "mcp-session-id")

router = APIRouter()


@router.post("/rpc")
async def call(request: Request) -> None:
    """Answer JSON-RPC 2.0: single requests, notifications and batches."""
    await answer_rpc(exchange_of(request.scope), service_of(request))


async def answer_rpc(exchange: Exchange, service: Service, methods: Mapping[str, Method] = METHODS) -> None:
    """Read one HTTP request, execute its JSON-RPC requests, and reply."""
    check_media_type(media_type(exchange.headers), (*_CONTENT_TYPES, ""))
    reply_type = choose(exchange.headers.get("accept"), (*_CONTENT_TYPES, sse.MEDIA_TYPE))
    with ExitStack() as admission, service.lease() as lease:
        await _Message(exchange, service, methods, lease, admission).answer(reply_type)


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


class _Message:
    """One message: a request, a notification, or a batch of both.

    If calls are not accepted now, their tensors are skipped while the body is read, so that each call can be answered
    under its own id.
    """

    def __init__(
        self,
        exchange: Exchange,
        service: Service,
        methods: Mapping[str, Method],
        lease: Lease,
        admission: ExitStack,
    ) -> None:
        self._exchange = exchange
        self._context = exchange.context
        self._caller = exchange.context.tenant, _session_of(exchange.headers)
        self._service = service
        self._methods = methods
        self._lease = lease
        self._refusal = self._context.denied
        if self._refusal is None:
            try:
                admission.enter_context(service.admit())
            except (Overloaded, RateLimited, ShuttingDown) as refusal:
                self._refusal = refusal
        self._task: Task | None = None  # of a request that is still arriving
        self._documents = _DOCUMENTS  # bytes that the documents of the answer, errors among them, may still have
        self._tensors = 0  # bytes of the tensors of its results
        self._one_check = asyncio.Lock()  # requests about checks run in their order

    async def answer(self, media_type: str) -> None:
        """Read the message and reply."""
        message = await self._read()
        items = message.items if isinstance(message, rpc.Batch) else (message,)
        self._cancel_calls(items)
        wanted = [item for item in items if not _is_notification(item) or _changes_check(item)]
        # A body that was not read to its end can't be watched for a disconnect.
        unread = isinstance(message, _Unreadable)
        async with nullcontext() if unread else self._exchange.watched():
            if all(map(_is_notification, wanted)):
                await self._reply_nothing(wanted)
            elif media_type == sse.MEDIA_TYPE:
                await self._stream(wanted)
            elif isinstance(message, rpc.Batch):
                await self._reply_batch(wanted, media_type)
            else:
                await self._reply(wanted[0], media_type)

    async def _read(self) -> _Item | rpc.Batch:
        limit, denied = int(self._service.settings.head_limit), self._context.denied
        error: ConvgradError | None = None
        try:
            refuse_encoding(self._exchange.headers)
            length = self._exchange.length
            if denied is not None and (length is None or length > limit):
                return _Unreadable(denied)  # don't read large bodies without a valid key
            document = JsonIntake(TensorValues(self._lease, self._refusal), length=length, max_skeleton=limit)
            async for begun in begun_documents(self._exchange.chunks(), document):
                # Without its id it may be a notification, which gets no reply.
                error = error or await self._check_begun(begun.document)
                if error is not None and "id" in begun.document:
                    return _Unreadable(error, rpc.id_of(begun.document))
            message = rpc.parse_message(await document.finish_async())
            return _Unreadable(denied) if denied is not None and isinstance(message, rpc.Batch) else message
        except (Cancelled, UnsupportedMediaType):
            raise
        except ConvgradError as fault:
            return _Unreadable(error or fault)

    async def _check_begun(self, request: Mapping[str, Any]) -> ConvgradError | None:
        """Check a request that is still arriving; in a batch the others have to be answered, and so read, anyway."""
        method = self._methods.get(str(request.get("method")))
        if self._refusal is None and isinstance(method, TaskMethod) and request.get("jsonrpc") == "2.0":
            try:
                self._task = await method.check_begun(self._service, request.get("params"), self._task)
            except ConvgradError as error:
                return error.with_traceback(None)
        return None

    def _cancel_calls(self, items: Iterable[_Item]) -> None:
        """Handle the notifications that cancel calls."""
        for item in () if self._context.denied else items:
            if _is_notification(item) and item.method == "notifications/cancelled" and isinstance(item.params, Mapping):
                request_id = rpc.id_of({"id": item.params.get("requestId")})
                self._service.cancellations.cancel(*self._caller, request_id)

    async def _reply_nothing(self, notifications: Sequence[_Item]) -> None:
        for item in notifications:
            async with AsyncExitStack() as opened:
                await self._answer(item, opened)
        await self._exchange.send({"type": "http.response.start", "status": 204, "headers": []})
        await send_piece(self._exchange.send, b"", last=True)

    async def _reply(self, item: _Item, media_type: str) -> None:
        send = self._exchange.send
        async with AsyncExitStack() as open_while_sent:
            text = await self._answer(item, open_while_sent)
            await send_head(send, media_type, length=text.length)
            for piece in text.pieces:
                await send_piece(send, piece)
            await send_piece(send, b"", last=True)

    async def _reply_batch(self, items: Sequence[_Item], media_type: str) -> None:
        """Send the answers in the order of their requests, each as soon as it and those before it are ready."""
        send = self._exchange.send
        written = [asyncio.Event() for _ in range(len(items) + 1)]
        written[0].set()
        first = next(number for number, item in enumerate(items) if not _is_notification(item))

        async def one(number: int) -> None:
            async with AsyncExitStack() as open_while_sent:
                text = await self._answer(items[number], open_while_sent)
                await written[number].wait()
                if number == first:
                    await send_head(send, media_type)
                if not _is_notification(items[number]):
                    await send_piece(send, b"[" if number == first else b",")
                    for piece in text.pieces:
                        await send_piece(send, piece)
            written[number + 1].set()

        await self._run_concurrently(one, len(items))
        await send_piece(send, b"]", last=True)

    async def _stream(self, items: Sequence[_Item]) -> None:
        """Send the messages of all items as one stream; their ids tell them apart."""
        async with sse.EventStream(self._exchange.send) as stream:

            async def one(number: int) -> None:
                silent = _is_notification(items[number])
                async with AsyncExitStack() as opened:
                    text = await self._answer(items[number], opened, None if silent else stream)
                    if text.length != 0 and not silent:
                        await stream.message(text.pieces)

            await self._run_concurrently(one, len(items))

    async def _answer(self, item: _Item, stack: AsyncExitStack, stream: sse.EventStream | None = None) -> _Text:
        """Execute one item and return its answer, which is empty if the work has sent it to the `stream`.

        The resources of the answer are released with `stack`.
        """
        context = self._context
        running = stack.enter_context(self._service.cancellations.register(*self._caller, item.id))
        if _changes_check(item):
            await stack.enter_async_context(self._one_check)
        try:
            opened = await self._open(item, stack, running)
            if isinstance(opened, bytes):
                self._add_document(len(opened))
                return _text(item.id, (opened,), len(opened))
            if stream is not None and opened.streams != "nothing":
                await sse.stream_work(opened, stream, item.id)
                return _Text((), 0)
            await finish(opened)
            result = opened.result()
            text = await encoded(result, JsonResult)
            if not result.outputs:
                self._add_document(text.length or 0)
            return _text(item.id, context.timings.each("encode", text.pieces()), text.length)
        except Cancelled as caught:
            if not running.cancelled:  # the caller is gone
                raise
            return self._error_text(item.id, caught)
        except Exception as caught:  # noqa: BLE001 - every fault is an answer
            return self._error_text(item.id, caught)

    async def _open(self, item: _Item, stack: AsyncExitStack, running: Running) -> Work | bytes:
        """Return the work that an item asks for, entered, or the text of its result."""
        if isinstance(item, _Unreadable):
            raise item.error
        if self._context.denied is not None:
            raise self._context.denied.with_traceback(None)
        if isinstance(item, rpc.Invalid):
            raise InvalidRequest(item.message)
        method = self._methods.get(item.method)
        if method is None:
            raise _unknown(item.method, self._methods)
        if not isinstance(method, TaskMethod):
            value = method(item.params)
            value = await value if isawaitable(value) else value
            return value if isinstance(value, bytes) else json_bytes(value)
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        task, document = method.read(self._service, item.params)
        events = whole(document, task.read, self._lease)
        work = await RequestReceiver(task, self._lease).receive(events)
        self._add_tensors(work.output_bytes)
        running.add(work)
        return await stack.enter_async_context(work)

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
            raise found.exceptions[0] from None

    def _add_document(self, count: int) -> None:
        """Count the bytes of a document of the answer; raises `TooLarge` when they exceed the limit in total."""
        if count > self._documents:
            raise TooLarge(
                f"the reply to a batch is limited to {_DOCUMENTS} bytes of JSON: send the rest in another request",
                data={"reason": "batch", "limit": _DOCUMENTS},
            )
        self._documents -= count

    def _add_tensors(self, count: int) -> None:
        """Count the bytes of a result's tensors; raises `TooLarge` when a batch exceeds the limit of one call."""
        limit = int(self._service.settings.output_limit)
        if self._tensors and self._tensors + count > limit:
            raise TooLarge(
                f"the reply to a batch is limited to {limit} bytes of tensors: send the rest in another request",
                data={"reason": "batch", "limit": limit},
            )
        self._tensors += count

    def _error_text(self, request_id: rpc.Id, caught: Exception) -> _Text:
        error = self._context.fail(caught)
        fields = rpc_error(error)
        if fields["code"] in _STANDARD_MESSAGES:
            fields["data"]["detail"] = fields["message"]
            fields["message"] = _STANDARD_MESSAGES[fields["code"]]
        text = json_bytes(rpc.error_response(request_id, **fields))
        try:
            self._add_document(len(text))
        except TooLarge as full:
            text = json_bytes(rpc.error_response(request_id, **rpc_error(full)))
        return _Text((text,), len(text))


def _session_of(headers: Mapping[str, str]) -> str:
    """Return the session that a request belongs to; empty if it names none."""
    return next((headers[name] for name in _SESSION_HEADERS if name in headers), "")


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


def _text(request_id: rpc.Id, result: Iterable[bytes], length: int | None) -> _Text:
    before, after = b'{"jsonrpc":"2.0","result":', b',"id":%s}' % json_bytes(request_id)

    def pieces() -> Iterator[bytes]:
        yield before
        yield from result
        yield after

    return _Text(pieces(), None if length is None else len(before) + length + len(after))
