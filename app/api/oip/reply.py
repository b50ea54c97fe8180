"""The inference response: JSON with numbers, or JSON followed by the bytes of the outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from starlette.types import Send

from app.api.oip.regions import Region
from app.api.oip.request import HEAD_LENGTH, InferRequest, RequestedOutput
from app.calls.call import Call
from app.calls.work import Output
from app.replies.body import json_bytes, send_body
from app.replies.numbers import NUMBERS, list_pieces
from app.replies.result import spliced
from convgrad._dtypes import dtype

__all__ = ["VERSION", "send_inference"]

VERSION = "1"
"""The only version of every model."""


async def send_inference(
    call: Call, request: InferRequest, send: Send, *, coding: str | None, regions: Mapping[str, Region]
) -> None:
    """Reply with the outputs of a finished call, each in the requested form.

    Raises, before the reply begins, what `Region.write` raises.
    """
    timings, pairs = call.context.timings, list(zip(request.outputs, call.outputs, strict=True))
    with timings.measure("encode"):
        for wanted, output in pairs:
            if wanted.place is not None:
                await regions[wanted.name].write(wanted.place.offset, output.data)
    text = json_bytes(_document(call.prepared.op.called_as, request.id, pairs))
    binary = [output.data for wanted, output in pairs if wanted.binary]
    inside = [output for wanted, output in pairs if not wanted.binary and wanted.place is None]
    listed = [np.frombuffer(output.data, dtype(output.spec.dtype).numpy) for output in inside]

    def head() -> Iterator[bytes]:
        return timings.each("encode", spliced(text, b"data", list(map(list_pieces, listed)), quoted=False))

    size, pieces = None, head()
    if sum(map(len, listed)) <= NUMBERS:
        whole = b"".join(pieces)
        size, pieces = len(whole), iter([whole])
    elif binary:
        # The length of the JSON is sent before it: many numbers, which may be too many to keep, are formatted twice.
        size = 0
        for piece in head():
            size += len(piece)
            await asyncio.sleep(0)
    length = None if size is None else size + sum(map(len, binary))
    headers = {HEAD_LENGTH: str(size)} if binary else {}
    media_type = "application/octet-stream" if binary else "application/json"
    await send_body(send, chain(pieces, binary), media_type, length, headers=headers, coding=coding)


def _document(model: str, request_id: str | None, pairs: Sequence[tuple[RequestedOutput, Output]]) -> dict[str, Any]:
    """Return the JSON of the reply, in which numbers are an empty string.

    An output in shared memory has no parameters: Triton's clients would take any for those of binary data.
    """
    outputs = []
    for wanted, output in pairs:
        made: dict[str, Any] = {
            "name": wanted.name,
            "datatype": dtype(output.spec.dtype).oip,
            "shape": list(output.spec.shape),
        }
        if wanted.binary:
            made["parameters"] = {"binary_data_size": output.nbytes}
        elif wanted.place is None:
            made["data"] = ""
        outputs.append(made)
    named = {} if request_id is None else {"id": request_id}
    return {**named, "model_name": model, "model_version": VERSION, "outputs": outputs}
