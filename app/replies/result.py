"""The JSON reply of a call, whose base64 is encoded in slices so that no call blocks the event loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def result_members(call: Call, outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Build the reply of a finished call around the objects of its output tensors."""
    op = call.prepared.op
    reply = {"op": op.called_as, "outputs": outputs, "resolved": op.reply_attributes(), "stats": call.stats}
    return reply | ({"warnings": list(op.warnings)} if op.warnings else {})


class JsonResult:
    """The reply of a finished call as JSON text, in pieces; valid while the call is open."""

    def __init__(self, call: Call) -> None:
        npy = call.prepared.options.encoding == "npy"
        key = "npy" if npy else "data"
        outputs = {output.name: output.describe() | {key: ""} for output in call.outputs}
        # The tensors go where their key has an empty string; nothing else in the object has that key.
        *texts, last = dump(result_members(call, outputs)).split(b'"%s":""' % key.encode())
        self._texts = [text + b'"%s":"' % key.encode() for text in texts]
        self._end = b'"' + last
        self._tensors = [
            (write_header(dtype(output.spec.dtype), output.spec.shape) if npy else b"", output.data)
            for output in call.outputs
        ]
        encoded = sum(4 * -(-(len(header) + len(data)) // 3) for header, data in self._tensors)
        self.length = sum(map(len, self._texts)) + len(texts) - 1 + len(self._end) + encoded

    def pieces(self) -> Iterator[bytes]:
        """Yield the text in pieces."""
        before = b""
        for text, (header, data) in zip(self._texts, self._tensors, strict=True):
            yield before + text
            yield from base64_pieces(data, header=header)
            before = b'"'
        yield self._end


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
