"""Send replies: the head, a whole body, or a body in pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.types import Send

__all__ = ["SMALL", "json_bytes", "send_bytes", "send_data", "send_head", "send_piece", "slices"]

SMALL = 64 << 10
"""A reply up to this size is sent in one piece: copying its parts is cheaper than another write to the socket."""

# Numbers of this length may have taken a millisecond to format; writing 32 KiB to a socket takes some 10 us.
_GIVES_WAY = 4 << 10
# Bytes written to the socket at a time. While its client does not read, a reply holds two such pieces of text.
_SLICE = 256 << 10
_JSON = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def json_bytes(value: Any) -> bytes:
    """Encode a value as compact JSON."""
    return _JSON.encode(value).encode()


async def send_head(
    send: Send,
    media_type: str,
    *,
    status: int = 200,
    length: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Send status and headers; without `length` the body is chunked."""
    fields = {"content-type": media_type, **(headers or {})}
    if length is not None:
        fields["content-length"] = str(length)
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def send_piece(send: Send, piece: bytes | memoryview, *, last: bool = False) -> None:
    """Send a piece of the body; after a large one that is not the last, let other tasks run."""
    await send({"type": "http.response.body", "body": piece, "more_body": not last})
    if len(piece) > _GIVES_WAY and not last:
        await asyncio.sleep(0)  # `send` does not wait for a client that reads fast enough


async def send_data(send: Send, data: bytes | bytearray | memoryview) -> None:
    """Send a part of the body of any size, in slices; more has to follow."""
    for piece in slices(data):
        await send_piece(send, piece)


def slices(data: bytes | bytearray | memoryview) -> Iterator[memoryview]:
    """Cut data into pieces to write at a time."""
    view = memoryview(data)
    for start in range(0, len(view), _SLICE):
        yield view[start : start + _SLICE]


async def send_bytes(
    send: Send, body: bytes, media_type: str, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    """Send a whole reply."""
    await send_head(send, media_type, status=status, length=len(body), headers=headers)
    await send_piece(send, body, last=True)
