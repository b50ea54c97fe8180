"""One HTTP request and its reply: limits of the body, request id, timings, and the error reply.

`Exchanges` is the outermost middleware. It puts an `Exchange` into the scope of each request, from which everything
else takes what it needs. Pages that use ASGI's `receive` and `send` get those of the exchange, with the same limits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.protocol import CONNECTION, DIRECT_BODY, FULL, SLOW_S
from app.pool.jobs import shutting_down
from app.replies.body import send_body
from app.replies.errors import error_headers, error_reply
from app.telemetry.context import ANYONE, CONTEXT, MONITORED, REQUEST_ID, RequestContext, address_of, api_of
from app.telemetry.metrics import Telemetry
from convgrad._errors import Cancelled, ConvgradError, DeadlineExceeded, Overloaded, TooLarge

__all__ = ["BodyLimits", "Exchange", "Exchanges", "exchange_of"]

_log = logging.getLogger("convgrad.request")

_KEY = "convgrad.exchange"

# The rest of a rejected body is read and dropped before the connection closes: a client that sends without reading
# would otherwise see a reset instead of the answer. At most for this time, while bytes arrive at least every few
# seconds (a client under load is slow too), and for this many bytes.
LINGER_S, LINGER_IDLE_S, LINGER_BYTES = 30.0, 3.0, 256 << 20
# Up to this size, the rest of a rejected body is read and the connection kept open.
_KEEP_ALIVE_REST = 1 << 20
# Most small calls end sooner, and need not be watched for a disconnect.
_UNWATCHED_S = 0.002
_RETRY_AFTER_S = 1
_RPC = "/rpc"


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of one request: bytes of its body, seconds until it must have arrived, and until its next bytes must."""

    body: int
    deadline_s: float = 3600.0
    slow_s: float = SLOW_S


def exchange_of(scope: Scope) -> Exchange:
    """Return the exchange of a request; only inside `Exchanges`."""
    return cast("Exchange", scope[_KEY])


class Exchange:
    """One request and its reply.

    `chunks` and `receive` raise `TooLarge` for a body over its limit, `DeadlineExceeded` for one that arrives too late
    or too slowly; `chunks` also `Cancelled` when the client disconnects.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: BodyLimits) -> None:
        self.scope = scope
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])
        }
        """By lower-case name; the first one where a name is repeated, but all of a repeated Accept."""
        if len(self.headers) < len(scope["headers"]):
            accept = [value.decode("latin-1") for name, value in scope["headers"] if name == b"accept"]
            self.headers |= {"accept": ", ".join(accept)} if accept else {}
        self.direct_body = scope.get(DIRECT_BODY)
        request_id, peer = self.headers.get("x-request-id", ""), scope.get("client")
        self.context = RequestContext(
            request_id if REQUEST_ID.fullmatch(request_id) else os.urandom(16).hex(),
            api=api_of(scope["path"]),
            connection=scope.get(CONNECTION, 0),
            address=address_of(peer[0]) if peer else ANYONE,
        )
        self.status = 0
        self._receive: Receive = receive if self.direct_body is None else self.direct_body.receive
        self._send = send
        self._limits = limits
        length = self.headers.get("content-length")
        self.length = None if length is None else int(length)
        """Bytes of the body, if its head declares them."""
        # Whether the whole body was received: ASGI's next message is the disconnect.
        self._complete = self.length == 0 or (self.length is None and "transfer-encoding" not in self.headers)
        self._asked = self._replied = self._end_pending = False

    # The request.

    async def receive(self) -> Message:
        """Return the next message: the next piece of the body; after the last one, the disconnect."""
        if self.length is not None and self.length > self._limits.body:
            raise self._too_large()
        self._asked = True
        if self._complete:
            message = await self._receive()
            while message["type"] == "http.disconnect" and self._replied:
                # Servers send it after every reply too; `watched` must not see that.
                await asyncio.Event().wait()
            return message
        context, slow_s = self.context, self._limits.slow_s
        left = self._limits.deadline_s - context.age()
        try:
            async with asyncio.timeout(min(slow_s, left)):
                message = await self._receive()
        except TimeoutError:
            if left <= slow_s:
                raise DeadlineExceeded("the deadline passed before the whole request arrived") from None
            raise DeadlineExceeded(
                f"the body arrived too slowly: nothing for {slow_s:g} s after {context.received} bytes",
                data={"reason": "slow_sender"},
            ) from None
        context.received += self._note(message)
        if context.received > self._limits.body:
            raise self._too_large()
        return message

    async def chunks(self) -> AsyncIterator[bytes | memoryview]:
        """Yield the body as it arrives; what was read straight to its destination comes as `memoryview`.

        A piece has at most a few hundred kilobytes: what one read brings.
        """
        add, clock, more = self.context.timings.add, time.perf_counter, True
        while more:
            begun = clock()
            message = await self.receive()
            add("receive", (arrived := clock()) - begun)
            if message["type"] == "http.disconnect":
                raise Cancelled("the client disconnected before its request was complete")
            chunk, more = message.get("body", b""), message.get("more_body", False)
            if chunk:
                yield chunk
                add("decode", clock() - arrived)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Cancel the block when the client disconnects, and raise `Cancelled`; the body must have been read."""
        task, gone = cast("asyncio.Task[None]", asyncio.current_task()), False
        before, watchers = task.cancelling(), list[asyncio.Task[None]]()

        async def watch() -> None:
            nonlocal gone
            while (await self.receive())["type"] != "http.disconnect":
                pass
            gone = True
            task.cancel()

        loop = asyncio.get_running_loop()
        start = loop.call_later(_UNWATCHED_S, lambda: watchers.append(loop.create_task(watch())))
        try:
            yield
        except asyncio.CancelledError as error:
            # More cancellations than before and the watcher's own: the task has been cancelled for another reason, too.
            if gone and task.cancelling() <= before + 1:
                raise Cancelled("the client disconnected before its reply was complete") from error
            raise
        finally:
            start.cancel()
            for watcher in watchers:
                watcher.cancel()
            if gone:
                task.uncancel()

    # The reply.

    async def send(self, message: Message) -> None:
        """Send the next message of the reply."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._reply_headers()]
        else:
            self.context.sent += len(message.get("body", b""))
            self._replied = not message.get("more_body", False)
            if self._replied and not (self._complete or self._awaits_continue):
                # The end follows when the request's memory is released and its body read.
                message, self._end_pending = {**message, "more_body": True}, True
        await self._send(message)

    def _reply_headers(self) -> list[tuple[bytes, bytes]]:
        context = self.context
        headers = [(b"x-request-id", context.request_id.encode())]
        if timing := context.timings.header():
            headers.append((b"server-timing", timing.encode()))
        rest_is_long = not self._complete and (
            self.length is None or self.length - context.received > _KEEP_ALIVE_REST or self._awaits_continue
        )
        if rest_is_long or FULL in self.scope:
            headers.append((b"connection", b"close"))
        return headers

    @property
    def _awaits_continue(self) -> bool:
        # The client waits for "100 Continue" and gets the final answer instead.
        return "expect" in self.headers and not self._asked

    def deny(self, error: ConvgradError) -> None:
        """Raise an error, except for JSON-RPC, which reports it under the ids of the calls."""
        if self.scope["path"] != _RPC:
            raise error
        self.context.denied = error

    async def fail(self, caught: Exception) -> None:
        """Reply with an error, in the format of the API.

        If a reply has begun, the server closes the connection instead, so that the client sees an incomplete body.
        """
        # Reading the rest of a rejected body may take seconds: the traceback would keep the call's memory.
        error = self.context.fail(caught).with_traceback(None)
        if not self.status and not isinstance(error, Cancelled):
            context = self.context
            accept = self.headers.get("accept", "")
            status, body, kind = error_reply(error, context.api, context.request_id, accept=accept)
            await send_body(self.send, [body], kind, len(body), status=status, headers=error_headers(error))

    async def end(self) -> None:
        """End a reply that was sent before the whole request arrived; called after the request's memory is released."""
        if not self._end_pending:
            return
        left = LINGER_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while not self._complete and left > 0:
                    async with asyncio.timeout(LINGER_IDLE_S):
                        left -= self._note(await self._receive())
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _note(self, message: Message) -> int:
        """Note whether a message is the last one of the body; return its bytes."""
        self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        return len(message.get("body", b""))

    def _too_large(self) -> TooLarge:
        limit = self._limits.body
        return TooLarge(f"the request body exceeds the limit of {limit} bytes", data={"reason": "body", "limit": limit})


class Exchanges:
    """Give each HTTP request its `Exchange`, run the `checks`, and answer errors that no API handled."""

    def __init__(
        self,
        app: ASGIApp,
        limits: BodyLimits,
        telemetry: Telemetry | None = None,
        checks: Sequence[Callable[[Exchange], object]] = (),
    ) -> None:
        self._app = app
        self._limits = limits
        self._telemetry = telemetry or Telemetry()
        self._checks = tuple(checks)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        exchange = scope[_KEY] = Exchange(scope, receive, send, self._limits)
        context = scope[CONTEXT] = exchange.context
        try:
            if FULL in scope:
                _check_connections(exchange)
            for check in self._checks:
                check(exchange)
            await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:  # uvicorn ends what still runs when the service ends, such as slow uploads
            await exchange.fail(shutting_down())
            raise
        except Exception as caught:  # noqa: BLE001 - every error is answered here
            await exchange.fail(caught)
        finally:
            self._telemetry.request_done(context)
            level = logging.DEBUG if scope["path"] in MONITORED else logging.INFO
            if _log.isEnabledFor(level):
                words = scope["method"], scope["path"], exchange.status or "-"
                _log.log(level, "%s %.256s %s", *words, extra={"facts": context.facts(exchange.status)})
            await exchange.end()


def _check_connections(exchange: Exchange) -> None:
    """Raise `Overloaded` beyond the limit of connections, except for health and metrics."""
    limit = exchange.scope[FULL]
    if exchange.scope["path"] not in MONITORED:
        exchange.deny(
            Overloaded(
                f"the limit of {limit} connections is reached",
                retry_after=_RETRY_AFTER_S,
                data={"reason": "connections", "limit": limit},
            )
        )
