"""The JSON reply, whose tensors are encoded in slices so that no call blocks the event loop: as base64, or numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pybase64
from starlette.types import Send

from app.calls.work import Output, Result, Work, finish
from app.replies.body import json_bytes, send_body
from app.threads import in_thread_if
from convgrad._dtypes import dtype
from convgrad._npy import write_header
from engine.options import Encoding

__all__ = ["NUMBERS", "base64_pieces", "json_text", "list_pieces", "rpc_response", "send_result", "spliced"]

NUMBERS = 2048
"""Elements that are formatted at a time: about a millisecond."""

_WORDS = {b"nan": b'"NaN"', b"inf": b'"Infinity"', b"-inf": b'"-Infinity"'}


def list_pieces(values: npt.NDArray[Any], before: bytes = b"") -> Iterator[bytes]:
    """Yield an array of at least one dimension as nested JSON lists, in pieces, the first after `before`.

    Each number is the shortest that float32, or float64 for f64, reads back as the same value; so do f16 and bf16,
    whose values are float32's too. JSON has no NaN or infinity: these are the strings that `app.intake.elements` reads.
    """
    inner = prod(values.shape[1:])
    step = max(1, NUMBERS // max(1, inner))
    before += b"["
    for start in range(0, len(values), step):
        if inner <= NUMBERS:
            yield before + _text(values[start : start + step])
        else:
            yield from list_pieces(values[start], before)
        before = b","
    yield b"]" if len(values) else before + b"]"


def _text(values: npt.NDArray[Any]) -> bytes:
    """Return the entries of an array, without the brackets around them all."""
    flat = values.reshape(-1).astype(np.float64 if values.dtype == np.float64 else np.float32, copy=False)
    items: list[bytes] = flat.astype("S").tolist()
    if not np.isfinite(flat).all():
        items = [_WORDS.get(item, item) for item in items]
    for axis in range(values.ndim - 1, 0, -1):
        size, lists = values.shape[axis], range(prod(values.shape[:axis]))
        items = [b"[%b]" % b",".join(items[at * size : (at + 1) * size]) for at in lists]
    return b",".join(items)


# Bytes encoded at a time, a multiple of 3. While its client does not read, a reply holds two such pieces of text.
_SLICE = 3 << 16
Wrap = Callable[[Mapping[str, Any]], Any]
JsonText = tuple[Iterator[bytes], int | None]


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


def spliced(text: bytes, key: bytes, values: Sequence[Iterable[bytes]], *, quoted: bool) -> Iterator[bytes]:
    """Yield JSON text with these values, texts in pieces, in place of each empty string under a key.

    Quotes inside of strings are escaped, so nothing else looks like such a member.
    """
    quote = b'"' if quoted else b""
    before, *others = text.split(b'"%b":""' % key, len(values))
    for pieces, after in zip(values, others, strict=True):
        yield b'%b"%b":%b' % (before, key, quote)
        yield from pieces
        before = quote + after
    yield before


def rpc_response(request_id: Any, result: Any) -> dict[str, Any]:
    """Build the JSON-RPC response of a request that was successful."""
    return {"jsonrpc": "2.0", "result": result, "id": request_id}


async def json_text(result: Result, wrap: Wrap = lambda document: document) -> JsonText:
    """Return a result, inside of the JSON value that `wrap` makes of it, as text: its pieces, and their length.

    The pieces are valid while the memory of the tensors is, which are base64 of their bytes or of a whole `.npy` file,
    or numbers. The length is None if numbers are too many to be formatted in advance.
    """
    return await in_thread_if(result.is_long, _json_text, result, wrap)


def _json_text(result: Result, wrap: Wrap) -> JsonText:
    encoding, outputs, document = result.encoding, result.outputs, result.document
    key, listed = "npy" if encoding == "npy" else "data", encoding == "list"
    described, texts = dict[str, Any](), list[Iterable[bytes]]()
    length: int | None = 0
    for output in outputs:
        described[output.name] = output.describe() | {key: ""}
        pieces, size = _tensor_text(output, encoding)
        texts.append(pieces)
        length = None if length is None or size is None else length + size - (2 if listed else 0)
    text = json_bytes(wrap({**document, result.member: described} if outputs else document))
    return spliced(text, key.encode(), texts, quoted=not listed), None if length is None else len(text) + length


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


async def send_result(work: Work, send: Send) -> None:
    """Run the work to its end and reply with its JSON object."""
    await finish(work)
    pieces, length = await json_text(work.result())
    await send_body(send, work.context.timings.each("encode", pieces), "application/json", length)
