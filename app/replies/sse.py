"""Server-sent events: one JSON-RPC message per event, the same for `/rpc` and `/v1`.

First `notifications/progress` and `notifications/tile` while the call computes, last the response, whose output has a
checksum instead of data. An error after the first byte is sent as the response.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.types import Send

from app.calls.work import Progress, TileReady, Work
from app.replies.body import Stream, json_bytes
from app.replies.errors import rpc_error
from app.replies.result import base64_pieces, json_text, list_pieces, rpc_response, spliced
from convgrad._dtypes import dtype
from convgrad._errors import Cancelled
from engine.options import Encoding

__all__ = ["MEDIA_TYPE", "EventStream", "send_events", "stream_work"]

MEDIA_TYPE = "text/event-stream"

# Keep proxies from buffering the stream.
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class EventStream(Stream):
    """Send messages as events, with comments while idle."""

    beat = b": ping\n\n"

    def __init__(self, send: Send, **options: float) -> None:
        super().__init__(send, MEDIA_TYPE, _HEADERS, **options)

    async def message(self, pieces: Iterable[bytes]) -> None:
        """Send one message, given as pieces of text without line breaks."""
        await self.write(_event(pieces))


def _event(pieces: Iterable[bytes]) -> Iterator[bytes]:
    before = b"data: "
    for piece in pieces:
        yield before + piece
        before = b""
    yield b"\n\n"


async def send_events(work: Work, send: Send) -> None:
    """Run the work and send its messages as the whole reply, with the request id as their id."""
    async with EventStream(send) as stream:
        await stream_work(work, stream, work.context.request_id)


async def stream_work(work: Work, stream: EventStream, request_id: Any) -> None:
    """Run the work and send its messages: those of a call's tiles, and the response or the error response last.

    `request_id` is the `id` of the JSON-RPC request, or another name of the call. Errors before the first message are
    raised.
    """
    tiles, wrap = work.streams == "tiles", partial(rpc_response, request_id)
    try:
        async with aclosing(work.events()) as events:
            async for event in events:
                if isinstance(event, Progress):
                    await stream.message([_progress(request_id, event)])
                elif isinstance(event, TileReady) and tiles:
                    tile = _tile(event, request_id, work.result().encoding)
                    await stream.message(work.context.timings.each("encode", tile))
        if tiles:
            await stream.message([json_bytes(wrap(await _result(work)))])
        else:
            pieces, _ = await json_text(work.result(), wrap)
            await stream.message(pieces)
    except Exception as caught:
        if not stream.started or isinstance(caught, Cancelled):
            raise
        error = rpc_error(work.context.fail(caught))
        await stream.message([json_bytes({"jsonrpc": "2.0", "id": request_id, "error": error})])


def _notification(name: str, params: dict[str, Any]) -> bytes:
    return json_bytes({"jsonrpc": "2.0", "method": f"notifications/{name}", "params": params})


def _progress(request_id: Any, event: Progress) -> bytes:
    return _notification("progress", {"progressToken": request_id, "progress": event.done, "total": event.total})


def _tile(tile: TileReady, request_id: Any, encoding: Encoding) -> Iterator[bytes]:
    text = _notification(
        "tile",
        {
            "requestId": request_id,
            "output": tile.output.name,
            "seq": tile.seq,
            "offset": list(tile.offset),
            "shape": list(tile.shape),
            "data": "",
        },
    )
    if encoding == "list":
        return spliced(text, b"data", [list_pieces(tile.array.view(dtype(tile.output.spec.dtype).numpy))], quoted=False)
    return spliced(text, b"data", [base64_pieces(tile.pieces())], quoted=True)


async def _result(work: Work) -> dict[str, Any]:
    result = work.result()
    listed = result.encoding == "list"
    with work.context.timings.measure("encode"):
        outputs = {
            output.name: output.describe() | {"sha256": await output.sha256(listed=listed)} for output in result.outputs
        }
    return {**result.document, "outputs": outputs}
