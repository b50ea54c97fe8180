"""The JSON reply, whose tensors are encoded in slices so that no call blocks the event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import TypeVar, cast

import numpy as np
import pybase64
from starlette.types import Send

from app.calls.work import Output, Result, Work, finish
from app.replies.body import SMALL, json_bytes, send_bytes, send_head, send_piece
from app.replies.numbers import NUMBERS, list_pieces
from app.threads import in_thread_if
from convgrad._dtypes import dtype
from convgrad._npy import write_header
from engine.options import Encoding

__all__ = ["JsonResult", "base64_pieces", "encoded", "send_result"]

# Bytes encoded at a time, a multiple of 3. While its client does not read, a reply holds two such pieces of text.
_SLICE = 3 << 16
# The nodes of a graph that take about a millisecond to encode.
_NODES = 100


T = TypeVar("T")


def base64_pieces(parts: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Encode `parts`, as one, in pieces."""
    rest = b""  # without a third byte
    for part in parts:
        for start in range(0, len(part), _SLICE):
            data = part[start : start + _SLICE]
            data = rest + data if rest else data
            whole = len(data) - len(data) % 3
            yield pybase64.b64encode(data[:whole])
            rest = bytes(data[whole:])
    if rest:
        yield pybase64.b64encode(rest)


class JsonResult:
    """A result as JSON text, in pieces; valid while the memory of its tensors is.

    They have their bytes or a whole `.npy` file as base64, or numbers. `length` is None if numbers are too many to be
    formatted in advance.
    """

    def __init__(self, result: Result) -> None:
        encoding, outputs = result.encoding, result.outputs
        key, self._quote = "npy" if encoding == "npy" else "data", b"" if encoding == "list" or not outputs else b'"'
        described = {output.name: output.describe() | {key: ""} for output in outputs}
        text = json_bytes({**result.document, result.member: described} if outputs else result.document)
        # The tensors go where their key has an empty string; nothing else in the object has that key.
        *texts, last = text.split(b'"%s":""' % key.encode()) if outputs else [text]
        self._texts = [text + b'"%s":' % key.encode() + self._quote for text in texts]
        self._end = self._quote + last
        self._tensors = [_tensor_text(output, encoding) for output in outputs]
        lengths = [length for _, length in self._tensors]
        around = sum(map(len, self._texts)) + len(self._quote) * (len(texts) - 1) + len(self._end)
        self.length = None if None in lengths else around + sum(cast("list[int]", lengths))

    def pieces(self) -> Iterator[bytes]:
        """Yield the text in pieces."""
        before = b""
        for text, (tensor, _) in zip(self._texts, self._tensors, strict=True):
            yield before + text
            yield from tensor
            before = self._quote
        yield self._end


def _tensor_text(output: Output, encoding: Encoding) -> tuple[Iterable[bytes], int | None]:
    """Return the text of a tensor in pieces, without quotes, and its length, if that is known."""
    kind, data = dtype(output.spec.dtype), output.data
    if encoding == "list":
        pieces = list_pieces(np.frombuffer(data, kind.numpy).reshape(output.spec.shape))
        if prod(output.spec.shape) > NUMBERS:
            return pieces, None
        text = b"".join(pieces)
        return (text,), len(text)
    header = write_header(kind, output.spec.shape) if encoding == "npy" else b""
    return base64_pieces((header, data)), 4 * -(-(len(header) + len(data)) // 3)


async def encoded(result: Result, encode: Callable[[Result], T]) -> T:
    """Encode a result, in a thread if it has many nodes."""
    return await in_thread_if(len(result.document.get("nodes", ())) > _NODES, encode, result)


async def send_result(work: Work, send: Send) -> None:
    """Run the work to its end and reply with its JSON object."""
    timings = work.context.timings
    await finish(work)
    result = await encoded(work.result(), JsonResult)
    if result.length is not None and result.length <= SMALL:
        with timings.measure("encode"):
            body = b"".join(result.pieces())
        await send_bytes(send, body, "application/json")
        return
    await send_head(send, "application/json", length=result.length)
    for piece in timings.each("encode", result.pieces()):
        await send_piece(send, piece)
    await send_piece(send, b"", last=True)
