"""Pass the body of an HTTP request to its reader as it arrives, in slices that don't block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from starlette.types import Message, Receive

from app.telemetry.timings import Timings
from convgrad._errors import Cancelled, UnsupportedMediaType

__all__ = ["SLICE", "BodyReader", "declared_length", "media_type", "read_body"]

SLICE = 256 * 1024
"""Bytes that are parsed before other requests get a turn; one read of uvloop is slightly smaller, so it is not cut."""


_CHARSETS = ("utf-8", "utf8", "us-ascii")


class BodyReader(Protocol):
    """Receives the bytes of a body in order."""

    async def take(self, chunk: bytes) -> None:
        """Receive the next bytes; raises a `ConvgradError` to reject the request."""


def declared_length(headers: Mapping[str, str]) -> int | None:
    """Return the declared length of the body, or None; raises `UnsupportedMediaType` for a content encoding."""
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType("the body must not have a content encoding")
    length = headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdecimal() and len(length) < 19 else None


def media_type(headers: Mapping[str, str]) -> str:
    """Return the media type in lower case, or an empty string; raises `UnsupportedMediaType` for another charset."""
    name, *parameters = headers.get("content-type", "").split(";")
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip().lower() == "charset" and value.strip(' "').lower() not in _CHARSETS:
            raise UnsupportedMediaType("text must be UTF-8, but the Content-Type header names another charset")
    return name.strip().lower()


class BodyPlacer(Protocol):
    """Knows the destination of the next bytes of a body."""

    def place(self) -> None:
        """Have them written there, if the destination is known."""

    async def placed(self, count: int) -> None:
        """Handle bytes that were written there; raises a `ConvgradError` to reject the request."""


async def read_body(receive: Receive, reader: BodyReader, timings: Timings, placer: BodyPlacer | None = None) -> None:
    """Pass the whole body to `reader`; raises what it raises, and `Cancelled` if the client disconnects."""
    more = True
    while more:
        with timings.measure("receive"):
            message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client disconnected before its request was complete")
        chunk, more = message.get("body", b""), message.get("more_body", False)
        if placer is not None and isinstance(chunk, memoryview):
            with timings.measure("decode"):
                await placer.placed(len(chunk))
            continue
        for start in range(0, len(chunk), SLICE):
            if start:
                await asyncio.sleep(0)
            with timings.measure("decode"):
                await reader.take(chunk[start : start + SLICE])
        if placer is not None and more:
            placer.place()
