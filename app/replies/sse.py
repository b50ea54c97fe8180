"""Server-sent events: JSON-RPC messages, one event each; the same stream behind `/rpc` and `/v1`.

First `notifications/progress` and `notifications/tile` as the work goes on, last the response itself, whose
output carries a checksum instead of data. An error after the first byte is the response of that stream.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from starlette.types import Send

from app.calls.call import Call
from app.calls.errors import as_convgrad_error
from app.calls.events import Begin, End, Event, Progress, TileReady
from app.replies.body import dump, send_head, send_piece
from app.replies.errors import rpc_error
from app.replies.heartbeat import INTERVAL_S, Heartbeat
from app.replies.result import base64_pieces, result_members
from app.telemetry.context import current_context
from convgrad._errors import Cancelled

__all__ = ["MEDIA_TYPE", "EventStream", "send_sse", "stream_call"]

MEDIA_TYPE = "text/event-stream"

_log = logging.getLogger("convgrad.request")
# Proxies must not wait for the end of a stream.
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class EventStream:
    """Send messages as events, with a ping on a quiet line; use with ``async with``.

    The head goes out with the first message, so that what fails before it can still have a status of its own.
    """

    def __init__(self, send: Send, *, ping_s: float = INTERVAL_S) -> None:
        self._send = send
        self._heartbeat = Heartbeat(self._ping, ping_s)
        self.started = False

    async def __aenter__(self) -> Self:
        self._heartbeat.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._heartbeat.stop()
        if kind is None:
            await send_piece(self._send, b"", last=True)

    async def message(self, value: dict[str, Any]) -> None:
        """Send one message."""
        await self.pieces([dump(value)])

    async def pieces(self, pieces: Iterable[bytes]) -> None:
        """Send one message whose text comes in pieces without line breaks."""

        async def write() -> None:
            if not self.started:
                self.started = True
                await send_head(self._send, MEDIA_TYPE, headers=_HEADERS)
            before = b"data: "
            for piece in pieces:
                await send_piece(self._send, before + piece)
                before = b""
            await send_piece(self._send, b"\n\n")

        await self._heartbeat.write(write)

    async def _ping(self) -> None:
        if self.started:
            await send_piece(self._send, b": ping\n\n")


async def send_sse(call: Call, send: Send, request_id: Any) -> None:
    """Run the call and reply with its stream."""
    async with EventStream(send) as stream:
        await stream_call(call, stream, request_id)


async def stream_call(call: Call, stream: EventStream, request_id: Any) -> None:
    """Run the call and send its messages, the response or the error response last.

    `request_id` is the `id` of the JSON-RPC request, or whatever names the call elsewhere. What fails before
    the first message is raised.
    """
    try:
        async with aclosing(call.events()) as events:
            async for event in events:
                if (pieces := await _message(call, event, request_id)) is not None:
                    await stream.pieces(call.timings.each("encode", pieces))
    except Exception as caught:
        if not stream.started or isinstance(caught, Cancelled):
            raise
        await stream.message({"jsonrpc": "2.0", "id": request_id, "error": _error(caught)})


def _error(caught: Exception) -> dict[str, Any]:
    error = as_convgrad_error(caught, log=_log)
    current_context().fail(error)
    return rpc_error(error)


async def _message(call: Call, event: Event, request_id: Any) -> Iterable[bytes] | None:
    match event:
        case Progress(done, total):
            return [_notification("progress", {"progressToken": request_id, "progress": done, "total": total})]
        case TileReady():
            return _tile(call, event, request_id)
        case End():
            return [dump({"jsonrpc": "2.0", "id": request_id, "result": await _result(call)})]
        case Begin():
            return None  # it has nothing that the last message does not say


def _notification(name: str, params: dict[str, Any]) -> bytes:
    return dump({"jsonrpc": "2.0", "method": f"notifications/{name}", "params": params})


def _tile(call: Call, tile: TileReady, request_id: Any) -> Iterator[bytes]:
    text = _notification(
        "tile",
        {
            "requestId": request_id,
            "output": call.prepared.output_name,
            "seq": tile.seq,
            "offset": list(tile.offset),
            "shape": list(tile.shape),
            "data": "",
        },
    )
    yield text.removesuffix(b'"}}')
    yield from base64_pieces(tile.body())
    yield b'"}}'


async def _result(call: Call) -> dict[str, Any]:
    spec = call.prepared.op.output
    with call.timings.measure("encode"):
        checksum = await call.sha256()
    return result_members(call, {"dtype": spec.dtype, "shape": list(spec.shape), "sha256": checksum})
