"""The `multipart/form-data` reply: a JSON part `reply`, then each output as a `.npy` part of its name."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from itertools import chain

from starlette.types import Send

from app.calls.work import Result, Work, finish
from app.replies.body import json_bytes, send_body
from app.threads import in_thread_if
from convgrad._dtypes import dtype
from convgrad._frames import Bytes
from convgrad._npy import write_header

__all__ = ["MEDIA_TYPE", "send_multipart"]

MEDIA_TYPE = "multipart/form-data"


async def send_multipart(work: Work, send: Send) -> None:
    """Run the work to its end; reply with its JSON object, in which outputs have no data, and a file for each."""
    await finish(work)
    result = work.result()
    boundary = f"convgrad-{secrets.token_hex(16)}"
    with work.context.timings.measure("encode"):
        heads = await in_thread_if(result.is_long, _heads, boundary, result)
    files: Iterable[Bytes] = chain.from_iterable(
        (head, output.data) for head, output in zip(heads[1:], result.outputs, strict=True)
    )
    pieces: list[Bytes] = [heads[0], *files, f"\r\n--{boundary}--\r\n".encode()]
    await send_body(send, pieces, f"{MEDIA_TYPE}; boundary={boundary}", sum(map(len, pieces)))


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
