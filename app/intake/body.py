"""Read a JSON body, whole, within a limit; media type and content encoding of any body."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pydantic_core import from_json

from app.intake.lease import Lease
from convgrad._errors import ParseError, TooLarge, UnsupportedMediaType

__all__ = ["MOST_VALUES", "media_type", "parse_json", "parse_text", "read_json", "refuse_encoding"]

# Of a Content-Type. Parsing the options of 8 KiB takes 15 ms.
_LONGEST = 1024
_CHARSETS = ("utf-8", "utf8", "us-ascii")
_BOM = b"\xef\xbb\xbf"

# A body up to this size is not counted, and is parsed in less than a millisecond.
_SMALL = 64 << 10
# What a body without a length is first counted as.
_FIRST_COUNTED = 1 << 20
# A number takes some 40 bytes.
_VALUE_BYTES = 40

MOST_VALUES = 1 << 22
"""Most values of a body: parsing holds the GIL for some 0.1 us for each. Base64 has no commas or brackets."""


async def read_json(chunks: AsyncIterator[bytes | memoryview], lease: Lease, *, length: int | None, limit: int) -> Any:
    """Read and parse a body of at most `limit` bytes; `length` is the declared size.

    What it takes counts in the memory for tensors until the lease ends. Raises `ParseError`, `TooLarge`, and what
    counting raises.
    """
    if length is not None and length > limit:
        raise _too_long(limit)
    counted = length or 0
    if counted > _SMALL:
        await lease.count(2 * counted)  # once more for its strings
    pieces: list[bytes | memoryview] = []
    received = 0
    async for chunk in chunks:
        pieces.append(chunk)
        received += len(chunk)
        if received > limit:
            raise _too_long(limit)
        if received > max(counted, _SMALL):  # the body has no length
            more = min(limit, max(_FIRST_COUNTED, 2 * counted)) - counted
            await lease.count(2 * more)
            counted += more
    return await parse_json(pieces, lease)


async def parse_json(pieces: list[bytes | memoryview], lease: Lease) -> Any:
    """Parse JSON, in a thread if it is long; of an object with the same name twice the last member counts.

    The pieces are removed from the list. Raises `ParseError`, also for NaN and Infinity, and `TooLarge` for more than
    4,194,304 values.
    """
    if sum(map(len, pieces)) <= _SMALL:
        return parse_text(b"".join(pieces))
    text, values = await asyncio.to_thread(_joined, pieces)
    if values > MOST_VALUES:
        raise TooLarge(
            f"the JSON has more than {MOST_VALUES} values: {_BINARY}", data={"reason": "json", "limit": MOST_VALUES}
        )
    if values * _VALUE_BYTES > _SMALL:
        await lease.count(values * _VALUE_BYTES)
    return await asyncio.to_thread(parse_text, text)


def _joined(pieces: list[bytes | memoryview]) -> tuple[bytes, int]:
    """Return the whole text, and at least how many values it has."""
    text = b"".join(pieces)
    pieces.clear()
    return text, text.count(b",") + text.count(b"[") + text.count(b"{")


def parse_text(text: bytes) -> Any:
    """Parse short JSON as `parse_json` does."""
    try:
        return from_json(text.removeprefix(_BOM) if text[:3] == _BOM else text, allow_inf_nan=False)
    except ValueError as error:
        raise ParseError(f"the body is not JSON: {error}") from None


_BINARY = "send the tensors as binary data, to /v1 as .npy parts of multipart/form-data"


def _too_long(limit: int) -> TooLarge:
    msg = f"a JSON body may have at most {limit} bytes: {_BINARY}"
    return TooLarge(msg, data={"reason": "json", "limit": limit})


def refuse_encoding(headers: Mapping[str, str]) -> None:
    """Raise `UnsupportedMediaType` for a content encoding."""
    if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise UnsupportedMediaType("the body must not have a content encoding")


def media_type(headers: Mapping[str, str]) -> str:
    """Return the media type in lower case, or an empty string; raises `UnsupportedMediaType` for another charset."""
    given = headers.get("content-type", "")
    if len(given) > _LONGEST:
        raise UnsupportedMediaType(f"the Content-Type has {len(given)} characters; at most {_LONGEST} are allowed")
    name, *parameters = given.split(";")
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip().lower() == "charset" and value.strip(' "').lower() not in _CHARSETS:
            raise UnsupportedMediaType("text must be UTF-8, but the Content-Type header names another charset")
    return name.strip().lower()
