"""Decompress a body as it arrives: gzip and deflate, in pieces, up to a limit."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from typing import Any

from convgrad._errors import ParseError, TooLarge, UnsupportedMediaType

__all__ = ["coding_of", "decompressed"]

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
        rest = memoryview(chunk)
        while rest:
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
