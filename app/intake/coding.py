"""Decompress a body as it arrives: gzip and deflate, in pieces, up to a limit."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from convgrad._errors import ParseError, TooLarge, UnsupportedMediaType

__all__ = ["CODINGS", "Decoder", "decoder_of"]

CODINGS = ("gzip", "deflate")

# Decompressing this much takes well under a millisecond.
_PIECE = 128 << 10
_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's `wbits`


class Decoder:
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

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        """Decompress the next bytes of the body, in pieces of at most 128 KiB."""
        while chunk:
            if self._inflate is None or (self._ended and self._coding == "gzip"):
                # A gzip body may consist of several members.
                self._inflate, self._ended = self._start(chunk), False
            elif self._ended:
                raise ParseError(f"the {self._coding} body has data after its end")
            try:
                piece = self._inflate.decompress(chunk, _PIECE)
            except zlib.error:
                raise ParseError(f"the body is not valid {self._coding}, as its Content-Encoding claims") from None
            self._made += len(piece)
            if self._made > self._limit:
                raise TooLarge(
                    f"the decompressed body exceeds the limit of {self._limit} bytes",
                    data={"reason": "body", "limit": self._limit},
                )
            self._ended = self._inflate.eof
            chunk = self._inflate.unused_data if self._ended else self._inflate.unconsumed_tail
            if piece:
                yield piece

    def close(self) -> None:
        """Raise `ParseError` unless the body is complete."""
        if not self._ended:
            raise ParseError(f"the {self._coding} body is incomplete")

    def _start(self, chunk: bytes) -> Any:
        if self._coding == "gzip":
            return zlib.decompressobj(_GZIP)
        # `deflate` means zlib's format, but many clients send a raw stream. A zlib header has 8 in its low four bits;
        # a raw stream that begins like that would be invalid.
        return zlib.decompressobj(_ZLIB if chunk[0] & 0x0F == 8 else _RAW)


def decoder_of(content_encoding: str, limit: int) -> Decoder | None:
    """Return the decoder for a `Content-Encoding`, None for a plain body.

    Raises `UnsupportedMediaType` for a coding other than gzip and deflate, or more than one.
    """
    name = content_encoding.strip().lower()
    if name in ("", "identity"):
        return None
    name = "gzip" if name == "x-gzip" else name
    if name not in CODINGS:
        raise UnsupportedMediaType(f"the Content-Encoding must be {' or '.join(CODINGS)}")
    return Decoder(name, limit)
