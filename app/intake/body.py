"""Read a JSON body, whole, within a limit; media type and content coding of any body, and its decompression."""

from __future__ import annotations

import asyncio
import ctypes
import zlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pydantic_core import from_json

from app.intake.lease import Lease
from convgrad._errors import ParseError, TooLarge, UnsupportedMediaType

__all__ = [
    "MOST_VALUES",
    "coding_of",
    "decompressed",
    "media_type",
    "parse_json",
    "parse_text",
    "read_json",
    "refuse_encoding",
]

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

# Bytes that are searched for one by one before all are counted.
_RARE = 1 << 10

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
    text, at = _unwritten(counted) if counted > _SMALL else bytearray(), 0
    async for chunk in chunks:
        if (end := at + len(chunk)) > limit:
            raise _too_long(limit)
        if end <= len(text):
            with memoryview(text) as view:
                view[at:end] = chunk
        else:
            del text[at:]
            text += chunk
        at = end
        if at > max(counted, _SMALL):  # the body has no length
            more = min(limit, max(_FIRST_COUNTED, 2 * counted)) - counted
            await lease.count(2 * more)
            counted += more
    del text[at:]
    return await parse_json(text, lease)


def _unwritten(size: int) -> bytearray:
    """Return a bytearray of a size with undefined content.

    Writing zeros to it would block the event loop for milliseconds, and so would growing it where that copies.
    """
    room = bytearray()
    ctypes.pythonapi.PyByteArray_Resize(ctypes.py_object(room), ctypes.c_ssize_t(size))
    return room


async def parse_json(text: bytes | bytearray, lease: Lease) -> Any:
    """Parse JSON, in a thread if it is long; of an object with the same name twice the last member counts.

    Raises `ParseError`, also for NaN and Infinity, and `TooLarge` for more than 4,194,304 values.
    """
    if len(text) <= _SMALL:
        return parse_text(text)
    values = await asyncio.to_thread(_values, text)
    if values > MOST_VALUES:
        raise TooLarge(
            f"the JSON has more than {MOST_VALUES} values: {_BINARY}", data={"reason": "json", "limit": MOST_VALUES}
        )
    if values * _VALUE_BYTES > _SMALL:
        await lease.count(values * _VALUE_BYTES)
    return await asyncio.to_thread(parse_text, text)


def _values(text: bytes | bytearray) -> int:
    """Return at least how many values a text has."""
    return sum(_count(text, sign) for sign in (b",", b"[", b"{"))


def _count(text: bytes | bytearray, sign: bytes) -> int:
    """Count a byte; fast where it is rare, as in base64."""
    at, found = text.find(sign), 0
    while at >= 0 and found < _RARE:
        at, found = text.find(sign, at + 1), found + 1
    return found if at < 0 else text.count(sign)


def parse_text(text: bytes | bytearray) -> Any:
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


# Decompressing this much takes well under a millisecond.
_PIECE = 128 << 10
# The first bytes of a member that are decompressed at a time. zlib copies what follows the end of a member: with a long
# chunk of short members, the whole rest for each.
_FIRST = 4 << 10
# A gzip body may consist of several members: as many before other requests get a turn, each of which takes a few
# microseconds; and the most of one body, enough for a gigabyte written in blocks of 64 KiB, as bgzip does.
_MEMBERS_PER_TURN = 64
_MOST_MEMBERS = 1 << 15
_GZIP, _ZLIB, _RAW = 31, 15, -15


def coding_of(content_encoding: str) -> str | None:
    """Return the coding that a `Content-Encoding` names, None for a plain body.

    Raises `UnsupportedMediaType` for a coding other than gzip and deflate, or more than one.
    """
    name = content_encoding.strip().lower()
    if name in ("", "identity"):
        return None
    if name not in ("gzip", "x-gzip", "deflate"):
        raise UnsupportedMediaType("the Content-Encoding must be gzip or deflate")
    return name.removeprefix("x-")


async def decompressed(chunks: AsyncIterator[bytes | memoryview], coding: str, limit: int) -> AsyncIterator[bytes]:
    """Decompress a body to at most `limit` bytes, in pieces of at most 128 KiB, after which others get a turn.

    Raises `ParseError` for malformed data and `TooLarge` as soon as the limit is exceeded: a small body that would
    expand to gigabytes costs no more than the limit and one piece.
    """
    inflate: Any = None
    made = members = 0
    async for chunk in chunks:
        rest, more = memoryview(chunk), False
        while rest or more:
            step = _PIECE
            if inflate is None or (inflate.eof and coding == "gzip"):
                members += 1
                if members > _MOST_MEMBERS:
                    raise ParseError(f"the gzip body has more than {_MOST_MEMBERS} members")
                inflate, step = zlib.decompressobj(_wbits(coding, rest[0])), _FIRST
            elif inflate.eof:
                raise ParseError(f"the {coding} body has data after its end")
            fed = rest[:step]
            try:
                piece = inflate.decompress(fed, _PIECE)
            except zlib.error:
                raise ParseError(f"the body is not valid {coding}, as its Content-Encoding claims") from None
            left = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
            rest = rest[len(fed) - len(left) :]
            more = len(piece) == _PIECE and not inflate.eof  # zlib may hold some that did not fit the piece
            made += len(piece)
            if made > limit:
                msg = f"the decompressed body exceeds the limit of {limit} bytes"
                raise TooLarge(msg, data={"reason": "body", "limit": limit})
            if piece:
                yield piece
            if piece or (inflate.eof and members % _MEMBERS_PER_TURN == 0):
                await asyncio.sleep(0)
    if inflate is None or not inflate.eof:
        raise ParseError(f"the {coding} body is incomplete")


def _wbits(coding: str, first: int) -> int:
    """Return zlib's `wbits` for a stream that begins with the byte `first`."""
    if coding == "gzip":
        return _GZIP
    # `deflate` means zlib's format, but many clients send a raw stream. A zlib header has 8 in its low four bits; a raw
    # stream that begins like that would be invalid.
    return _ZLIB if first & 0x0F == 8 else _RAW
