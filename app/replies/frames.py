"""The `application/x-tensor-stream` reply: `begin`, then `progress` and `tile`, then `end` or `error`.

Several outputs are as many such streams in one, in the order asked for; each `begin` has the names of all `outputs`.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import Any

from starlette.types import Send

from app.calls.call import Call
from app.calls.errors import as_convgrad_error
from app.calls.work import Begin, End, Event, Progress, TileReady, Work
from app.replies.body import send_bytes, send_data, send_head, send_piece
from app.replies.heartbeat import Heartbeat
from app.telemetry.context import Timings, current_context
from convgrad._errors import Cancelled
from convgrad._frames import MEDIA_TYPE, Bytes, encode

__all__ = ["MEDIA_TYPE", "send_frames"]

_log = logging.getLogger("convgrad.request")

_HEADERS = {"cache-control": "no-store"}

# From this size a checksum is computed in a thread.
_HASH_INLINE = 2 << 20
# Frames are gathered up to this size and for this long: a write to the socket costs more than a small frame, and it
# wakes the client.
_GATHER = 1 << 16
_LINGER_S = 0.002


async def send_frames(call: Work, send: Send) -> None:
    """Run a `Call` and send its frames; an idle stream repeats its last progress.

    Errors are raised before the first frame is sent; after it they become the last frame, of type `error`.
    """
    assert isinstance(call, Call)
    stream = _FrameStream(send, call.timings)
    try:
        async with aclosing(call.events()) as events:
            async for event in events:
                await stream.put(await _header(call, event), event)
        await stream.finish()
    except Exception as caught:
        await stream.finish_write()
        if not stream.started or isinstance(caught, Cancelled):
            raise
        await stream.put(_error(caught))
        await stream.finish()
    finally:
        stream.stop()


class _FrameStream:
    """Gather small frames and send them together; `started` once anything was sent."""

    def __init__(self, send: Send, timings: Timings) -> None:
        self._send = send
        self._timings = timings
        self._heartbeat = Heartbeat(self._beat)
        self._progress: dict[str, Any] | None = None
        self._held: list[Bytes] = []
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None
        self._flushing: asyncio.Task[None] | None = None
        self.started = False

    async def put(self, header: dict[str, Any], event: Event | None = None) -> None:
        """Send a frame, now or together with the next ones."""
        with self._timings.measure("encode"):
            body = event.body() if isinstance(event, TileReady) else memoryview(b"")
            if len(body) > _HASH_INLINE:
                frame = await asyncio.to_thread(encode, header, body)
            else:
                frame = encode(header, body)
        if isinstance(event, Progress):
            self._progress = header
        self._held += frame
        self._size += sum(map(len, frame))
        if self._size > _GATHER:
            await self._flush()
        elif self._timer is None and (self._flushing is None or self._flushing.done()):
            self._timer = asyncio.get_running_loop().call_later(_LINGER_S, self._start_flush)

    async def finish(self) -> None:
        """Send the remaining frames and end the reply."""
        await self.finish_write()
        if not self.started:
            await send_bytes(self._send, b"".join(self._held), MEDIA_TYPE, headers=_HEADERS)
            self.started = True
            return
        self._heartbeat.stop()
        await send_piece(self._send, b"".join(self._held), last=True)

    async def finish_write(self) -> None:
        """Wait for a running write; start none."""
        self._stop_timer()
        if self._flushing is not None:
            await self._flushing

    def stop(self) -> None:
        """Send nothing more, and release the tensor's memory."""
        self._stop_timer()
        self._heartbeat.stop()
        if self._flushing is not None:
            self._flushing.cancel()
        self._held = []

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_flush(self) -> None:
        self._timer = None
        self._flushing = asyncio.ensure_future(self._flush())

    async def _flush(self) -> None:
        self._stop_timer()
        await self._heartbeat.write(self._write)

    async def _write(self) -> None:
        if not self.started:
            self.started = True
            await send_head(self._send, MEDIA_TYPE, headers=_HEADERS)
            self._heartbeat.start()
        while self._held:  # more may be gathered while a slow client reads
            held, size, self._held, self._size = self._held, self._size, [], 0
            for piece in held if size > _GATHER else [b"".join(held)]:
                await send_data(self._send, piece)

    async def _beat(self) -> None:
        if self._progress is not None:
            await send_piece(self._send, b"".join(encode(self._progress)))


async def _header(call: Call, event: Event) -> dict[str, Any]:
    match event:
        case Begin(output):
            op = call.prepared.op
            header = {"type": "begin", "op": op.called_as, "output": output.name, **output.describe()}
            header |= {"tiles": output.tiles, "resolved": call.prepared.resolved}
            if len(call.outputs) > 1:
                header["outputs"] = [each.name for each in call.outputs]
            return header | ({"warnings": list(op.warnings)} if op.warnings else {})
        case Progress(done, total):
            return {"type": "progress", "done": done, "total": total}
        case TileReady(_, seq, offset, shape):
            return {"type": "tile", "seq": seq, "offset": list(offset), "shape": list(shape)}
        case End(output, stats):
            with call.timings.measure("encode"):
                checksum = await output.sha256()
            return {"type": "end", "tiles": output.tiles, "sha256": checksum, "stats": stats}


def _error(caught: Exception) -> dict[str, Any]:
    error = as_convgrad_error(caught, log=_log)
    current_context().fail(error)
    return {"type": "error", "code": error.code, "message": error.message, "data": error.data}
