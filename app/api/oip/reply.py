"""The inference response: JSON with numbers, or JSON followed by the output's bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.types import Send

from app.api.oip.body import HEAD_LENGTH
from app.api.oip.regions import Region
from app.api.oip.request import InferRequest
from app.calls.call import Call
from app.replies.body import dump, send_head, send_piece
from app.replies.coding import coded
from convgrad._dtypes import dtype
from convgrad._errors import Unsupported
from schemas.ops import TensorSpec

__all__ = ["VERSION", "send_inference"]

VERSION = "1"
"""The only version of every model."""

# Bytes written to the socket at a time.
_SLICE = 1 << 20
# A reply up to this size is sent in one piece: cheaper than two system calls.
_WHOLE = 64 << 10
# Elements that are formatted as text at a time: about a millisecond.
_NUMBERS = 2048
# Checking this many elements takes about a millisecond.
_INLINE = 1 << 20


async def send_inference(
    call: Call, request: InferRequest, send: Send, *, coding: str | None, region: Region | None
) -> None:
    """Reply with the output of a finished call, in the form that the request asked for.

    Raises, before the reply begins, `Unsupported` when the output has values that JSON can't represent, and what
    `Region.write` raises.
    """
    if region is not None and request.output.place is not None:
        with call.timings.measure("encode"):
            await region.write(request.output.place.offset, call.output)
        await _send(send, [_head(call, request)], coding=coding)
    elif request.output.binary:
        with call.timings.measure("encode"):
            head = _head(call, request)
        await _send(send, [head, call.output], coding=coding, head_length=len(head))
    else:
        await _send_numbers(call, request, send, coding)


def _head(call: Call, request: InferRequest) -> bytes:
    wanted, spec = request.output, call.prepared.op.output
    # None for an output in shared memory: Triton's clients would take any parameters for those of binary data.
    size = call.nbytes if wanted.binary and wanted.place is None else None
    return _text(call.prepared.op.called_as, request.id, wanted.name, spec, size)


# The same call has the same head.
@lru_cache(256)
def _text(model: str, request_id: str | None, name: str, spec: TensorSpec, size: int | None) -> bytes:
    output: dict[str, Any] = {"name": name, "datatype": dtype(spec.dtype).oip, "shape": list(spec.shape)}
    if size is not None:
        output["parameters"] = {"binary_data_size": size}
    called = {"model_name": model, "model_version": VERSION} | ({} if request_id is None else {"id": request_id})
    return dump(called | {"outputs": [output]})


async def _send(
    send: Send, parts: list[bytes | memoryview], *, coding: str | None, head_length: int | None = None
) -> None:
    headers, media_type = {}, "application/json"
    if head_length is not None:
        headers[HEAD_LENGTH], media_type = str(head_length), "application/octet-stream"
    if coding is not None:
        await _send_coded(send, _slices(parts), coding, media_type, headers)
        return
    length = sum(map(len, parts))
    await send_head(send, media_type, length=length, headers=headers)
    if length <= _WHOLE:
        await send_piece(send, b"".join(parts), last=True)
        return
    async for piece in _slices(parts):
        await send_piece(send, piece)
    await send_piece(send, b"", last=True)


async def _slices(parts: list[bytes | memoryview]) -> AsyncGenerator[bytes | memoryview, None]:
    for part in parts:
        for start in range(0, len(part), _SLICE):
            yield part[start : start + _SLICE]


async def _send_coded(
    send: Send,
    pieces: AsyncIterator[bytes | memoryview],
    coding: str,
    media_type: str,
    headers: dict[str, str],
) -> None:
    await send_head(send, media_type, headers=headers | {"content-encoding": coding, "vary": "accept-encoding"})
    async for piece in coded(pieces, coding):
        await send_piece(send, piece)
    await send_piece(send, b"", last=True)


async def _send_numbers(call: Call, request: InferRequest, send: Send, coding: str | None) -> None:
    kind = dtype(call.prepared.op.output.dtype).numpy
    values = np.frombuffer(call.output, kind)
    finite = _finite(values) if len(values) <= _INLINE else await asyncio.to_thread(_finite, values)
    if not finite:
        raise Unsupported(
            f"{request.output.name} has NaN or infinity, which JSON can't represent: request it with binary_data"
        )
    head = _head(call, request).removesuffix(b"}]}")
    pieces = _numbers(call, head, values)
    if coding is not None:
        await _send_coded(send, pieces, coding, "application/json", {})
        return
    async with aclosing(pieces):
        if len(values) <= _NUMBERS:
            body = b"".join([piece async for piece in pieces])
            await send_head(send, "application/json", length=len(body))
            await send_piece(send, body, last=True)
            return
        await send_head(send, "application/json")
        async for piece in pieces:
            await send_piece(send, piece)
        await send_piece(send, b"", last=True)


async def _numbers(call: Call, head: bytes, values: npt.NDArray[Any]) -> AsyncGenerator[bytes, None]:
    yield head + b',"data":['
    for start in range(0, len(values), _NUMBERS):
        # float64 represents every element exactly, and its text parses to the same bits.
        with call.timings.measure("encode"):
            text = json.dumps(values[start : start + _NUMBERS].astype(np.float64).tolist(), separators=(",", ":"))
        yield (b"," if start else b"") + text[1:-1].encode()
        await asyncio.sleep(0)  # sending or compressing a piece may not yield to the event loop
    yield b"]}]}"


def _finite(values: npt.NDArray[Any]) -> bool:
    return bool(np.isfinite(values).all())
