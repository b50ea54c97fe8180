"""The `application/x-tensor-stream` reply: `begin`, then `progress` and `tile`, then `end` or `error`."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import Any

from starlette.types import Send

from app.call import Call
from app.context import current_context
from app.errors import as_convgrad_error
from app.events import Begin, End, Event, Progress, TileReady
from app.replies.body import send_head, send_piece
from app.replies.heartbeat import INTERVAL_S, Heartbeat
from convgrad._errors import Cancelled, ConvgradError
from convgrad._frames import MEDIA_TYPE, encode

__all__ = ["MEDIA_TYPE", "send_frames"]

_log = logging.getLogger("convgrad.request")

# What goes to the socket at a time, and the size from which a checksum is made in a thread.
_SLICE = 1 << 20
_HASH_INLINE = 2 << 20
# Below this a copy costs less than another message to the server.
_JOIN = 1 << 16


async def send_frames(call: Call, send: Send, *, beat_s: float = INTERVAL_S) -> None:
    """Run the call and send its frames; a quiet stream repeats its last progress.

    What fails before the first frame is raised; after it the last frame is an `error`.
    """
    stream = _FrameStream(send, beat_s)
    try:
        async with aclosing(call.events()) as events:
            async for event in events:
                await stream.send(await _header(call, event), event)
    except Exception as caught:
        if not stream.started or isinstance(caught, Cancelled):
            raise
        await stream.send(_error(as_convgrad_error(caught, log=_log)))
    finally:
        stream.stop()
    await send_piece(send, b"", last=True)


class _FrameStream:
    def __init__(self, send: Send, beat_s: float) -> None:
        self._send = send
        self._heartbeat = Heartbeat(self._beat, beat_s)
        self._progress: dict[str, Any] | None = None
        self.started = False

    async def send(self, header: dict[str, Any], event: Event | None = None) -> None:
        body = event.body() if isinstance(event, TileReady) else memoryview(b"")
        if len(body) > _HASH_INLINE:
            frame = await asyncio.to_thread(encode, header, body)
        else:
            frame = encode(header, body)
        if not self.started:
            self.started = True
            await send_head(self._send, MEDIA_TYPE, headers={"cache-control": "no-store"})
            self._heartbeat.start()
        if isinstance(event, Progress):
            self._progress = header

        if len(body) <= _JOIN:
            frame = [b"".join(frame)]

        async def write() -> None:
            for piece in frame:
                for start in range(0, len(piece), _SLICE):
                    await send_piece(self._send, memoryview(piece)[start : start + _SLICE])

        await self._heartbeat.write(write)

    def stop(self) -> None:
        self._heartbeat.stop()

    async def _beat(self) -> None:
        if self._progress is not None:
            await send_piece(self._send, b"".join(encode(self._progress)))


async def _header(call: Call, event: Event) -> dict[str, Any]:
    match event:
        case Begin():
            header = {
                "type": "begin",
                "op": event.op,
                "output": event.output,
                "dtype": event.dtype,
                "shape": list(event.shape),
                "tiles": event.tiles,
                "resolved": event.resolved,
            }
            return header | ({"warnings": list(event.warnings)} if event.warnings else {})
        case Progress(done, total):
            return {"type": "progress", "done": done, "total": total}
        case TileReady(seq, offset, shape):
            return {"type": "tile", "seq": seq, "offset": list(offset), "shape": list(shape)}
        case End(tiles, stats):
            return {"type": "end", "tiles": tiles, "sha256": await call.sha256(), "stats": stats}


def _error(error: ConvgradError) -> dict[str, Any]:
    current_context().fail(error)
    return {"type": "error", "code": error.code, "message": error.message, "data": error.data}
