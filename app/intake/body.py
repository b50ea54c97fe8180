"""The body of one HTTP request, passed on to its reader as it arrives, in slices that leave the loop room."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from starlette.types import Message, Receive

from app.telemetry.timings import Timings
from convgrad._errors import Cancelled, UnsupportedMediaType

__all__ = ["SLICE", "BodyReader", "declared_length", "media_type", "read_body"]

SLICE = 256 * 1024
"""Bytes that are parsed before other requests get a turn; what uvloop reads at a time is just below, and is not cut."""


_CHARSETS = ("utf-8", "utf8", "us-ascii")


class BodyReader(Protocol):
    """Take the bytes of a body in order."""

    async def take(self, chunk: bytes) -> None:
        """Take the next bytes; raises a `ConvgradError` to refuse the request."""


def declared_length(headers: Mapping[str, str]) -> int | None:
    """Return the body's length where the headers tell; raises `UnsupportedMediaType` when it is coded."""
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType("the body must come without a content encoding")
    length = headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdecimal() and len(length) < 19 else None


def media_type(headers: Mapping[str, str]) -> str:
    """Return the body's media type in lower case, or nothing; raises `UnsupportedMediaType` for another charset."""
    name, *parameters = headers.get("content-type", "").split(";")
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip().lower() == "charset" and value.strip(' "').lower() not in _CHARSETS:
            raise UnsupportedMediaType("text must come in UTF-8, and the Content-Type header says otherwise")
    return name.strip().lower()


class BodyPlacer(Protocol):
    """Know where the next bytes of a body belong."""

    def place(self) -> None:
        """Have them put there, if the place is known."""

    async def placed(self, count: int) -> None:
        """Take note of bytes that were; raises a `ConvgradError` to refuse the request."""


async def read_body(receive: Receive, reader: BodyReader, timings: Timings, placer: BodyPlacer | None = None) -> None:
    """Pass the whole body to `reader`; raises what it raises, and `Cancelled` when the client leaves."""
    more = True
    while more:
        with timings.measure("receive"):
            message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client left before its request was complete")
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
