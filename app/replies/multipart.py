"""The `multipart/form-data` reply: a JSON part `reply`, then each output as a `.npy` part of its name."""

from __future__ import annotations

import secrets

from starlette.types import Send

from app.calls.work import Work, finish
from app.replies.body import dump, send_data, send_head, send_piece
from app.telemetry.context import current_context
from convgrad._dtypes import dtype
from convgrad._npy import write_header

__all__ = ["MEDIA_TYPE", "send_multipart"]

MEDIA_TYPE = "multipart/form-data"


async def send_multipart(work: Work, send: Send) -> None:
    """Run the work to its end; reply with its JSON object, in which outputs have no data, and a file for each."""
    await finish(work)
    result = work.result()
    outputs = result.outputs
    boundary = f"convgrad-{secrets.token_hex(16)}"
    with current_context().timings.measure("encode"):
        text = dump({**result.document, result.member: {output.name: output.describe() for output in outputs}})
        heads = [_head(boundary, "reply", "application/json") + text]
        heads += [
            b"\r\n"
            + _head(boundary, output.name, "application/x-npy")
            + write_header(dtype(output.spec.dtype), output.spec.shape)
            for output in outputs
        ]
        tail = f"\r\n--{boundary}--\r\n".encode()
    length = sum(map(len, heads)) + sum(len(output.data) for output in outputs) + len(tail)
    await send_head(send, f"{MEDIA_TYPE}; boundary={boundary}", length=length)
    await send_piece(send, heads[0])
    for head, output in zip(heads[1:], outputs, strict=True):
        await send_piece(send, head)
        await send_data(send, output.data)
    await send_piece(send, tail, last=True)


def _head(boundary: str, name: str, content_type: str) -> bytes:
    file = "" if name == "reply" else f'; filename="{name}.npy"'
    disposition = f'Content-Disposition: form-data; name="{name}"{file}'
    return f"--{boundary}\r\n{disposition}\r\nContent-Type: {content_type}\r\n\r\n".encode()
