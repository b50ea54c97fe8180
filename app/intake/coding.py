"""Decompress a body as it arrives: gzip and deflate, in pieces, up to a limit."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from convgrad._errors import ParseError, TooLarge, UnsupportedMediaType

__all__ = ["CODINGS", "Decompressor", "decompressor_of"]

CODINGS = ("gzip", "deflate")

# Decompressing this much takes well under a millisecond.
_PIECE = 128 << 10
# The first bytes of a member that are decompressed at a time. zlib copies what follows the end of a member: with a long
# chunk of short members, the whole rest for each.
_FIRST = 4 << 10
# Members before other requests get a turn, each of which takes a few microseconds; and the most of one body, enough for
# a gigabyte written in blocks of 64 KiB, as bgzip does.
_MEMBERS_PER_TURN = 64
_MOST_MEMBERS = 1 << 15
_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's `wbits`


class Decompressor:
    """Decompress one body, to at most `limit` bytes.

    Raises `ParseError` for malformed data and `TooLarge` as soon as the limit is exceeded: a small body that would
    expand to gigabytes costs no more than the limit and one piece.
    """

    def __init__(self, coding: str, limit: int) -> None:
        self._coding = coding
        self._limit = limit
        self._made = 0
        self._inflate: Any = None
        self._ended = False
        self._members = 0

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        """Decompress the next bytes of the body, in pieces of at most 128 KiB; at an empty one others get a turn."""
        start, view = 0, memoryview(chunk)
        while start < len(chunk):
            step = _PIECE
            if self._inflate is None or (self._ended and self._coding == "gzip"):
                self._inflate, self._ended, step = self._start(chunk[start]), False, _FIRST
            elif self._ended:
                raise ParseError(f"the {self._coding} body has data after its end")
            fed = view[start : start + step]
            try:
                piece = self._inflate.decompress(fed, _PIECE)
            except zlib.error:
                raise ParseError(f"the body is not valid {self._coding}, as its Content-Encoding claims") from None
            self._ended = self._inflate.eof
            taken = len(fed) - len(self._inflate.unused_data if self._ended else self._inflate.unconsumed_tail)
            start += taken
            self._made += len(piece)
            if self._made > self._limit:
                raise TooLarge(
                    f"the decompressed body exceeds the limit of {self._limit} bytes",
                    data={"reason": "body", "limit": self._limit},
                )
            if piece or (self._ended and self._members % _MEMBERS_PER_TURN == 0):
                yield piece

    def close(self) -> None:
        """Raise `ParseError` unless the body is complete."""
        if not self._ended:
            raise ParseError(f"the {self._coding} body is incomplete")

    def _start(self, first: int) -> Any:
        if self._coding == "gzip":
            # A gzip body may consist of several members.
            self._members += 1
            if self._members > _MOST_MEMBERS:
                raise ParseError(f"the gzip body has more than {_MOST_MEMBERS} members")
            return zlib.decompressobj(_GZIP)
        # `deflate` means zlib's format, but many clients send a raw stream. A zlib header has 8 in its low four bits;
        # a raw stream that begins like that would be invalid.
        return zlib.decompressobj(_ZLIB if first & 0x0F == 8 else _RAW)


def decompressor_of(content_encoding: str, limit: int) -> Decompressor | None:
    """Return the decompressor for a `Content-Encoding`, None for a plain body.

    Raises `UnsupportedMediaType` for a coding other than gzip and deflate, or more than one.
    """
    name = content_encoding.strip().lower()
    if name in ("", "identity"):
        return None
    name = "gzip" if name == "x-gzip" else name
    if name not in CODINGS:
        raise UnsupportedMediaType(f"the Content-Encoding must be {' or '.join(CODINGS)}")
    return Decompressor(name, limit)
