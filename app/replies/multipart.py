"""The `multipart/form-data` reply: a JSON part `reply`, then each output as a `.npy` part of its name."""

from __future__ import annotations

import secrets

from starlette.types import Send

from app.calls.call import Call
from app.replies.body import dump, send_head, send_piece
from app.replies.result import result_members
from convgrad._dtypes import dtype
from convgrad._npy import write_header

__all__ = ["MEDIA_TYPE", "send_multipart"]

MEDIA_TYPE = "multipart/form-data"

# Bytes written to the socket at a time.
_SLICE = 1 << 20


async def send_multipart(call: Call, send: Send) -> None:
    """Run the call to its end and reply with its JSON object, in which outputs have no data, and their files."""
    await call.finish()
    boundary = f"convgrad-{secrets.token_hex(16)}"
    with call.timings.measure("encode"):
        document = dump(result_members(call, {output.name: output.describe() for output in call.outputs}))
        heads = [_head(boundary, "reply", "application/json") + document]
        heads += [
            b"\r\n"
            + _head(boundary, output.name, "application/x-npy")
            + write_header(dtype(output.spec.dtype), output.spec.shape)
            for output in call.outputs
        ]
        tail = f"\r\n--{boundary}--\r\n".encode()
    length = sum(map(len, heads)) + sum(output.nbytes for output in call.outputs) + len(tail)
    await send_head(send, f"{MEDIA_TYPE}; boundary={boundary}", length=length)
    await send_piece(send, heads[0])
    for head, output in zip(heads[1:], call.outputs, strict=True):
        await send_piece(send, head)
        for start in range(0, output.nbytes, _SLICE):
            await send_piece(send, output.data[start : start + _SLICE])
    await send_piece(send, tail, last=True)


def _head(boundary: str, name: str, content_type: str) -> bytes:
    file = "" if name == "reply" else f'; filename="{name}.npy"'
    disposition = f'Content-Disposition: form-data; name="{name}"{file}'
    return f"--{boundary}\r\n{disposition}\r\nContent-Type: {content_type}\r\n\r\n".encode()
