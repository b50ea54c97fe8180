"""The JSON reply of a call, whose base64 is encoded in slices so that no call blocks the event loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pybase64
from starlette.types import Send

from app.calls.call import Call
from app.replies.body import dump, send_head, send_piece
from convgrad._dtypes import dtype
from convgrad._npy import write_header

__all__ = ["JsonResult", "base64_pieces", "result_members", "send_result"]

# Bytes encoded at a time, a multiple of 3; about a third of a millisecond.
_SLICE = 3 << 18
# A reply up to this size is encoded before its head is sent, so that Server-Timing includes the encoding.
_EAGER = 4 << 20


def base64_pieces(data: memoryview, *, header: bytes = b"") -> Iterator[bytes]:
    """Encode `header` and `data`, as one, in pieces."""
    start = 0
    if header:
        start = min(len(data), -len(header) % 3)  # so that the first piece needs no padding
        yield pybase64.b64encode(header + data[:start])
    for position in range(start, len(data), _SLICE):
        yield pybase64.b64encode(data[position : position + _SLICE])


def result_members(call: Call, output: dict[str, Any]) -> dict[str, Any]:
    """Build the reply of a finished call around the object of its output tensor."""
    prepared = call.prepared
    reply = {
        "op": prepared.op.called_as,
        "outputs": {prepared.output_name: output},
        "resolved": prepared.op.reply_attributes(),
        "stats": call.stats,
    }
    return reply | ({"warnings": list(prepared.op.warnings)} if prepared.op.warnings else {})


class JsonResult:
    """The reply of a finished call as JSON text, in pieces; valid while the call is open."""

    def __init__(self, call: Call) -> None:
        spec = call.prepared.op.output
        kind = dtype(spec.dtype)
        output: dict[str, Any] = {"dtype": spec.dtype, "shape": list(spec.shape)}
        self._header = b""
        key = "data"
        if call.prepared.options.encoding == "npy":
            key, self._header = "npy", write_header(kind, spec.shape)
        # The tensor goes where its key has an empty string; nothing else in the object has that key.
        text = dump(result_members(call, output | {key: ""}))
        cut = text.index(b'"%s":""' % key.encode()) + len(key) + 4
        self._before, self._after = text[:cut], text[cut:]
        self._data = call.output
        self.length = len(text) + 4 * -(-(len(self._header) + len(self._data)) // 3)

    def pieces(self) -> Iterator[bytes]:
        """Yield the text in pieces."""
        yield self._before
        yield from base64_pieces(self._data, header=self._header)
        yield self._after


async def send_result(call: Call, send: Send) -> None:
    """Run the call to its end and reply with its JSON object."""
    await call.finish()
    result = JsonResult(call)
    if result.length <= _EAGER:
        with call.timings.measure("encode"):
            body = b"".join(result.pieces())
        await send_head(send, "application/json", length=len(body))
        await send_piece(send, body, last=True)
        return
    await send_head(send, "application/json", length=result.length)
    for piece in call.timings.each("encode", result.pieces()):
        await send_piece(send, piece)
    await send_piece(send, b"", last=True)
