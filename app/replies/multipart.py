"""The `multipart/form-data` reply: a JSON part `reply`, then each output as a `.npy` part of its name."""

from __future__ import annotations

import asyncio
import secrets
from functools import partial

from starlette.types import Send

from app.calls.work import Result, Work, finish
from app.replies.body import json_bytes, send_data, send_head, send_piece
from app.replies.result import encoded
from convgrad._dtypes import dtype
from convgrad._npy import write_header

__all__ = ["MEDIA_TYPE", "send_multipart"]

MEDIA_TYPE = "multipart/form-data"

# Small outputs that are sent in a millisecond.
_AT_ONCE = 64


async def send_multipart(work: Work, send: Send) -> None:
    """Run the work to its end; reply with its JSON object, in which outputs have no data, and a file for each."""
    await finish(work)
    result = work.result()
    boundary = f"convgrad-{secrets.token_hex(16)}"
    with work.context.timings.measure("encode"):
        heads = await encoded(result, partial(_heads, boundary))
    tail = f"\r\n--{boundary}--\r\n".encode()
    length = sum(map(len, heads)) + sum(len(output.data) for output in result.outputs) + len(tail)
    await send_head(send, f"{MEDIA_TYPE}; boundary={boundary}", length=length)
    await send_piece(send, heads[0])
    for number, (head, output) in enumerate(zip(heads[1:], result.outputs, strict=True), 1):
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)
        await send_piece(send, head)
        await send_data(send, output.data)
    await send_piece(send, tail, last=True)


def _heads(boundary: str, result: Result) -> list[bytes]:
    """Return the part `reply`, and the head of the file of each output."""
    outputs = result.outputs
    document = {**result.document, result.member: {output.name: output.describe() for output in outputs}}
    files = (
        b"\r\n"
        + _head(boundary, output.name, "application/x-npy")
        + write_header(dtype(output.spec.dtype), output.spec.shape)
        for output in outputs
    )
    return [_head(boundary, "reply", "application/json") + json_bytes(document), *files]


def _head(boundary: str, name: str, content_type: str) -> bytes:
    file = "" if name == "reply" else f'; filename="{name}.npy"'
    disposition = f'Content-Disposition: form-data; name="{name}"{file}'
    return f"--{boundary}\r\n{disposition}\r\nContent-Type: {content_type}\r\n\r\n".encode()
