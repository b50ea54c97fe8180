"""Middlewares for every request: request id, timings, body limit, and the handler for all remaining errors."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.calls.errors import as_convgrad_error
from app.http.context import context_of, exchange_of, headers_of
from app.replies.body import send_json
from app.replies.errors import problem, problem_headers, reply_of
from app.telemetry.context import ANYONE, REQUEST_ID, RequestContext, address_of, api_of
from app.telemetry.metrics import Telemetry
from convgrad._errors import Cancelled, ConvgradError, TooLarge

__all__ = ["BodyLimit", "RequestContextMiddleware", "send_problem"]

_log = logging.getLogger("convgrad.request")

# Requested every few seconds by monitoring.
_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})

# The rest of a refused body is read and dropped before the connection closes: a client that sends without reading
# would otherwise see a reset instead of the answer. At most for this time, while bytes arrive at least every few
# seconds (a client under load is slow too), and for this many bytes.
_LINGER_S = 30.0
_LINGER_IDLE_S = 3.0
_LINGER_BYTES = 256 << 20
# Up to this size, the rest of a refused body is read and the connection kept open.
_KEEP_ALIVE_REST = 1 << 20


async def send_problem(scope: Scope, send: Send, error: ConvgradError) -> None:
    """Reply with the problem object of `error`."""
    context = context_of(scope)
    await send_json(
        send,
        problem(error, context.request_id),
        status=reply_of(error).status,
        headers=problem_headers(error),
        media_type="application/problem+json",
    )


class RequestContextMiddleware:
    """Give a request its id and timings, send both back, and answer errors that no API handled with a problem object.

    An error after the first byte of a reply cuts the connection, so that the client sees an incomplete body.
    """

    def __init__(self, app: ASGIApp, telemetry: Telemetry | None = None) -> None:
        self._app = app
        self._telemetry = telemetry or Telemetry()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = headers_of(scope)
        given = headers.get("x-request-id", "")
        peer = scope.get("client")
        context = RequestContext(
            given if REQUEST_ID.fullmatch(given) else os.urandom(16).hex(),
            api=api_of(scope["path"]),
            address=address_of(peer[0]) if peer else ANYONE,
        )
        exchange = exchange_of(scope)
        if exchange.on_counted is not None:
            context.on_counted = exchange.on_counted
        context.enter()
        exchange.context = context
        with self._telemetry.tracing.request(scope, headers, context):
            await self._handle(scope, receive, send, context)

    async def _handle(self, scope: Scope, receive: Receive, send: Send, context: RequestContext) -> None:
        status, replied = 0, False

        async def receive_until_replied() -> Message:
            message = await receive()
            if replied and message["type"] == "http.disconnect":
                # Servers send it after every reply too; `cancel_on_disconnect` must not see that.
                await asyncio.Event().wait()
            context.received += len(message.get("body", b""))
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal status, replied
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", context.request_id.encode())]
                if context.trace is not None:
                    headers.append((b"traceresponse", context.trace.header().encode()))
                if timing := context.timings.header():
                    headers.append((b"server-timing", timing.encode()))
                message["headers"] = headers
            elif message["type"] == "http.response.body":
                context.sent += len(message.get("body", b""))
                replied = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive_until_replied, send_with_headers)
        except Exception as caught:  # noqa: BLE001 - every error is answered here
            await self._answer(scope, send_with_headers, as_convgrad_error(caught, log=_log), started=status != 0)
        finally:
            context.on_counted()
            self._telemetry.request_done(context)
            level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
            if _log.isEnabledFor(level):
                _log.log(
                    level, "%s %.256s %s", scope["method"], scope["path"], status or "-", extra=_facts(context, status)
                )

    async def _answer(self, scope: Scope, send: Send, error: ConvgradError, *, started: bool) -> None:
        context_of(scope).fail(error)
        # If the client is gone or part of the reply is sent, the server closes the connection.
        if not started and not isinstance(error, Cancelled):
            await send_problem(scope, send, error)


def _facts(context: RequestContext, status: int) -> dict[str, Any]:
    facts = {
        "request_id": context.request_id,
        "key": context.key,
        "address": context.address,
        "status": status,
        "outcome": context.outcome,
        "ms": round(context.age() * 1000, 3),
    }
    return facts | ({"trace_id": context.trace.trace_id} if context.trace else {})


class BodyLimit:
    """Reject bodies over the limit: by `Content-Length` before reading, otherwise as soon as they exceed it.

    It also ends the connection of a rejected request so that the client can read the answer.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = headers_of(scope)
        length = headers.get("content-length", "")
        declared = int(length) if length.isdecimal() else None
        if declared == 0 or (declared is None and "transfer-encoding" not in headers):
            await self._app(scope, receive, send)
            return
        body = _Body(receive, send, declared, self._limit, expects_continue="expect" in headers)
        await self._app(scope, body.receive, body.send)
        await body.end()


class _Body:
    """Count a body while it is read, and read what is left of it after the reply."""

    def __init__(
        self, receive: Receive, send: Send, declared: int | None, limit: int, *, expects_continue: bool
    ) -> None:
        self._receive = receive
        self._send = send
        self._declared = declared
        self._limit = limit
        self._expects_continue = expects_continue
        self._seen = 0
        self._complete = False
        self._asked = False
        self._end_pending = False

    async def receive(self) -> Message:
        if self._declared is not None and self._declared > self._limit:
            raise _too_large(self._limit)  # here, so that each API formats the error itself
        self._asked = True
        message = await self._receive()
        if message["type"] != "http.request":
            self._complete = True
            return message
        self._seen += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._seen > self._limit:
            raise _too_large(self._limit)
        return message

    async def send(self, message: Message) -> None:
        if self._complete:
            await self._send(message)
        elif message["type"] == "http.response.start":
            if self._declared is None or self._declared - self._seen > _KEEP_ALIVE_REST or self._awaits_continue:
                MutableHeaders(scope=message)["connection"] = "close"
            await self._send(message)
        elif message.get("more_body", False) or self._awaits_continue:
            await self._send(message)
        else:
            await self._send({**message, "more_body": True})
            self._end_pending = True

    @property
    def _awaits_continue(self) -> bool:
        # The client waits for "100 Continue" and gets the final answer instead.
        return self._expects_continue and not self._asked

    async def end(self) -> None:
        """End a reply that was sent before the whole request arrived; called after the request's memory is released."""
        if not self._end_pending:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await self._drain()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _drain(self) -> None:
        most = self._seen + _LINGER_BYTES
        while not self._complete and self._seen < most:
            async with asyncio.timeout(_LINGER_IDLE_S):
                message = await self._receive()
            self._seen += len(message.get("body", b""))
            self._complete = message["type"] != "http.request" or not message.get("more_body", False)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request body exceeds the limit of {limit} bytes", data={"reason": "body", "limit": limit})
