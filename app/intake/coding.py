"""Undo a body's content coding while it arrives: gzip and deflate, in pieces, never past a limit."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from convgrad._errors import ParseError, TooLarge, UnsupportedMediaType

__all__ = ["CODINGS", "Decoder", "decoder_of"]

CODINGS = ("gzip", "deflate")

# Inflating this much takes well under a millisecond.
_PIECE = 128 << 10
_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's `wbits`


class Decoder:
    """Decode one coded body; `limit` is the most bytes that may come out of it.

    Raises `ParseError` for bytes that are not in the coding and `TooLarge` as soon as the limit is passed:
    a small body that inflates to gigabytes costs one piece more than the limit.
    """

    def __init__(self, coding: str, limit: int) -> None:
        self._coding = coding
        self._limit = limit
        self._made = 0
        self._inflate: Any = None
        self._ended = False

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        """Give what the next bytes of the body decode to, in pieces of moderate size."""
        while chunk:
            if self._inflate is None or (self._ended and self._coding == "gzip"):
                # A gzip file may be several, one after another.
                self._inflate, self._ended = self._start(chunk), False
            elif self._ended:
                raise ParseError(f"the {self._coding} body goes on after its end")
            try:
                piece = self._inflate.decompress(chunk, _PIECE)
            except zlib.error:
                raise ParseError(f"the body is not {self._coding}, though its Content-Encoding says so") from None
            self._made += len(piece)
            if self._made > self._limit:
                raise TooLarge(
                    f"the decoded body is over the limit of {self._limit} bytes",
                    data={"reason": "body", "limit": self._limit},
                )
            self._ended = self._inflate.eof
            chunk = self._inflate.unused_data if self._ended else self._inflate.unconsumed_tail
            if piece:
                yield piece

    def close(self) -> None:
        """Check that the coded body is complete."""
        if not self._ended:
            raise ParseError(f"the {self._coding} body ends too early")

    def _start(self, chunk: bytes) -> Any:
        if self._coding == "gzip":
            return zlib.decompressobj(_GZIP)
        # The name means zlib's format, and many senders mean the bare one. A zlib header has 8 in its low
        # four bits; a bare stream that begins so would open with a stored block of reserved type.
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
        raise UnsupportedMediaType(
            f"the body may be coded as {' or '.join(CODINGS)}, and its Content-Encoding says otherwise"
        )
    return Decoder(name, limit)
