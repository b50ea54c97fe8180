"""The content coding of a reply: gzip or deflate, when the client asks for it."""

from __future__ import annotations

import zlib
from typing import Any

from app.caching import cached_if_short
from app.replies.accept import weighted

__all__ = ["INLINE", "accepts", "choose_coding", "compressor"]

_WBITS = {"gzip": 31, "deflate": 15}
# The fastest level: tensors hardly shrink at any.
_LEVEL = 1
INLINE = 32 << 10
"""Compressing this much takes about a millisecond; more is done in a thread."""


@cached_if_short
def choose_coding(accept_encoding: str) -> str | None:
    """Return the content coding that a client requests; None to send the reply as it is.

    HTTP libraries list every coding they can decode by default (`gzip, deflate, br`), and compressing a tensor takes
    longer than sending it. So a reply is compressed only for a client that names a single coding, or that rates one
    above `identity`.
    """
    qualities = dict(_items(accept_encoding))
    named = {name: quality for name, quality in qualities.items() if name in _WBITS and quality > 0}
    if not named:
        return None
    best = max(named, key=lambda name: named[name])
    plain = qualities.get("identity", qualities.get("*"))
    if plain is None:
        return best if len([name for name, quality in qualities.items() if quality > 0]) == 1 else None
    return best if named[best] > plain else None


def accepts(accept_encoding: str, coding: str) -> bool:
    """Return whether the client can decode a content coding, which it lists with a quality above 0."""
    return dict(_items(accept_encoding)).get(coding, 0) > 0


def _items(header: str) -> list[tuple[str, float]]:
    return [("gzip" if name == "x-gzip" else name, quality) for name, quality in weighted(header)]


def compressor(coding: str) -> Any:
    """Return what compresses one body."""
    return zlib.compressobj(_LEVEL, zlib.DEFLATED, _WBITS[coding])
