"""The inference response: JSON with numbers, or JSON followed by the bytes of the outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import lru_cache, partial
from math import prod
from typing import Any

import numpy as np
from starlette.types import Send

from app.api.oip.body import HEAD_LENGTH
from app.api.oip.regions import Region
from app.api.oip.request import InferRequest, RequestedOutput
from app.calls.call import Call
from app.calls.work import Output
from app.replies.body import SMALL, json_bytes, send_bytes, send_head, send_piece, slices
from app.replies.coding import coded
from app.replies.numbers import NUMBERS, list_pieces
from convgrad._dtypes import dtype
from schemas.ops import TensorSpec

__all__ = ["VERSION", "send_inference"]

VERSION = "1"
"""The only version of every model."""


async def send_inference(
    call: Call, request: InferRequest, send: Send, *, coding: str | None, regions: Mapping[str, Region]
) -> None:
    """Reply with the outputs of a finished call, each in the requested form.

    Raises, before the reply begins, what `Region.write` raises.
    """
    pairs = list(zip(request.outputs, call.outputs, strict=True))
    with call.context.timings.measure("encode"):
        for wanted, output in pairs:
            if wanted.place is not None:
                await regions[wanted.name].write(wanted.place.offset, output.data)
    start, described = _head(
        call.prepared.op.called_as,
        tuple([(wanted.name, output.spec, output.nbytes if wanted.binary else None) for wanted, output in pairs]),
    )
    if request.id is not None:
        start = json_bytes({"id": request.id}).removesuffix(b"}") + b"," + start.removeprefix(b"{")
    binary = [output.data for wanted, output in pairs if wanted.binary]
    numbers = [prod(output.spec.shape) for wanted, output in pairs if wanted.in_json]
    with_numbers = partial(_with_numbers, call, start, described, pairs)
    parts: list[bytes | memoryview] = []
    if not numbers:
        parts = [start + b",".join(described) + b"]}", *binary]
    elif sum(numbers) <= NUMBERS:
        parts = [b"".join([piece async for piece in with_numbers()]), *binary]
    headers, media_type, length = {}, "application/json", None
    if binary:
        # The length of the JSON is sent before it: many numbers, which may be too many to keep, are formatted twice.
        size = len(parts[0]) if parts else sum([len(piece) async for piece in with_numbers()])
        headers[HEAD_LENGTH], media_type, length = str(size), "application/octet-stream", size + sum(map(len, binary))
    pieces = _slices(parts) if parts else with_numbers(binary)
    if parts:
        length = sum(map(len, parts))
    if coding is not None:
        headers |= {"content-encoding": coding, "vary": "accept-encoding"}
        pieces, length = coded(pieces, coding), None
    elif parts and length is not None and length <= SMALL:
        await send_bytes(send, b"".join(parts), media_type, headers=headers)
        return
    await send_head(send, media_type, length=length, headers=headers)
    async with aclosing(pieces):
        async for piece in pieces:
            await send_piece(send, piece)
    await send_piece(send, b"", last=True)


Described = tuple[str, TensorSpec, int | None]
"""An output in the head of a reply: its name, what it is, and its bytes after the head if it is there."""


# The same call has the same head, but for the caller's id.
@lru_cache(256)
def _head(model: str, outputs: tuple[Described, ...]) -> tuple[bytes, list[bytes]]:
    """Return the head as text: what is before its outputs, and each of them.

    An output in shared memory has no parameters: Triton's clients would take any for those of binary data.
    """
    called = {"model_name": model, "model_version": VERSION}
    described = []
    for name, spec, size in outputs:
        made: dict[str, Any] = {"name": name, "datatype": dtype(spec.dtype).oip, "shape": list(spec.shape)}
        described.append(json_bytes(made | ({} if size is None else {"parameters": {"binary_data_size": size}})))
    return json_bytes(called | {"outputs": []}).removesuffix(b"]}"), described


async def _slices(parts: Sequence[bytes | memoryview]) -> AsyncGenerator[bytes | memoryview, None]:
    for part in parts:
        for piece in slices(part):
            yield piece


async def _with_numbers(
    call: Call,
    start: bytes,
    described: Sequence[bytes],
    pairs: Sequence[tuple[RequestedOutput, Output]],
    binary: Sequence[memoryview] = (),
) -> AsyncGenerator[bytes | memoryview, None]:
    """Yield the head, with the elements of outputs neither binary nor in shared memory; then those in `binary`."""
    before = start
    for text, (wanted, output) in zip(described, pairs, strict=True):
        if not wanted.in_json:
            yield before + text
            before = b","
            continue
        yield before + text.removesuffix(b"}") + b',"data":'
        values = np.frombuffer(output.data, dtype(output.spec.dtype).numpy)
        for piece in call.context.timings.each("encode", list_pieces(values)):
            yield piece
            await asyncio.sleep(0)  # sending or compressing a piece may not yield to the event loop
        before = b"},"
    yield before.removesuffix(b",") + b"]}"
    async for block in _slices(binary):
        yield block
