"""The `application/x-tensor-stream` reply: `begin`, then `progress` and `tile`, then `end` or `error`.

Several outputs follow each other in the requested order; each `begin` has the names of all `outputs`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, suppress
from itertools import chain
from typing import Any

from starlette.types import Send

from app.calls.work import Begin, End, Event, Progress, TileReady, Work
from app.replies.body import Stream, send_body, send_piece, slices
from app.telemetry.context import RequestContext, Timings
from convgrad._errors import Cancelled
from convgrad._frames import MEDIA_TYPE, Bytes, encode_pieces

__all__ = ["MEDIA_TYPE", "send_frames"]

_HEADERS = {"cache-control": "no-store"}

# Frames are gathered up to this size and for this long: a write to the socket costs more than a small frame, and it
# wakes the client.
_GATHER = 1 << 16
_LINGER_S = 0.002


async def send_frames(work: Work, send: Send) -> None:
    """Run work that has tiles and send its frames; an idle stream repeats its last progress.

    Errors are raised before the first frame is sent; after it they become the last frame, of type `error`.
    """
    async with _FrameStream(send, work.context.timings) as stream:
        try:
            async with aclosing(work.events()) as events:
                async for event in events:
                    await stream.put(await _header(work, event), event)
        except Exception as caught:
            if not stream.started or isinstance(caught, Cancelled):
                raise
            await stream.put(_error(work.context, caught))


class _FrameStream(Stream):
    """Gather small frames and send them together; a reply that is small as a whole has a length."""

    def __init__(self, send: Send, timings: Timings) -> None:
        super().__init__(send, MEDIA_TYPE, _HEADERS)
        self._timings = timings
        self._held = bytearray()
        """Frames that are not sent yet."""

    async def put(self, header: dict[str, Any], event: Event | None = None) -> None:
        """Send a frame, now or together with the next ones; a large one is made while it is sent."""
        tile = event if isinstance(event, TileReady) else None
        size, body = (tile.array.nbytes, tile.pieces()) if tile is not None else (0, iter(()))
        pieces = self._timings.each("encode", encode_pieces(header, size, chain.from_iterable(map(slices, body))))
        if size > _GATHER:
            await self.write(chain(self._gathered(), pieces))
            return
        frame = b"".join(pieces)
        if isinstance(event, Progress):
            self.beat = frame
        first = not self._held
        self._held += frame
        if len(self._held) > _GATHER:
            await self.write(self._gathered())
        elif first:
            self._start(self._send_soon())

    async def _send_soon(self) -> None:
        await asyncio.sleep(_LINGER_S)
        with suppress(Cancelled):  # the client reads too slowly, which the next write finds too
            await self.write(self._gathered())

    def _gathered(self) -> Iterator[Bytes]:
        while self._held:  # more may be gathered while a slow client reads
            held, self._held = self._held, bytearray()
            yield held

    async def _end(self) -> None:
        rest = bytes(self._held)
        if self.started:
            await send_piece(self._send, rest, last=True)
        else:
            await send_body(self._send, [rest], MEDIA_TYPE, len(rest), headers=_HEADERS)


async def _header(work: Work, event: Event) -> dict[str, Any]:
    match event:
        case Begin(output):
            document, names = work.result().document, [each.name for each in work.result().outputs]
            header = {"type": "begin", "op": document["op"], "output": output.name, **output.describe()}
            header |= {"tiles": output.tiles, "resolved": document["resolved"]}
            if len(names) > 1:
                header["outputs"] = names
            return header | {name: document[name] for name in ("warnings",) if name in document}
        case Progress(done, total):
            return {"type": "progress", "done": done, "total": total}
        case TileReady(_, seq, offset, shape):
            return {"type": "tile", "seq": seq, "offset": list(offset), "shape": list(shape)}
        case End(output, stats):
            with work.context.timings.measure("encode"):
                checksum = await output.sha256()
            return {"type": "end", "tiles": output.tiles, "sha256": checksum, "stats": stats}


def _error(context: RequestContext, caught: Exception) -> dict[str, Any]:
    error = context.fail(caught)
    return {"type": "error", "code": error.code, "message": error.message, "data": error.data}
