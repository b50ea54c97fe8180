"""Compress a reply with gzip or deflate, when the client asks for it."""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from app.caching import cached_if_short
from app.replies.accept import weighted
from app.replies.body import slices
from app.threads import in_thread_if

__all__ = ["accepts", "choose_coding", "coded"]

_WBITS = {"gzip": 31, "deflate": 15}
# The fastest level: tensors hardly shrink at any.
_LEVEL = 1
# Compressing this much takes about a millisecond; more is done in a thread.
_INLINE = 32 << 10


def choose_coding(accept_encoding: str | None) -> str | None:
    """Return the content coding that a client requests; None to send the reply as it is.

    HTTP libraries list every coding they can decode by default (`gzip, deflate, br`), and compressing a tensor takes
    longer than sending it. So a reply is compressed only for a client that names a single coding, or that rates one
    above `identity`.
    """
    return _choose(accept_encoding or "")


@cached_if_short
def _choose(header: str) -> str | None:
    qualities = dict(_items(header))
    named = {name: quality for name, quality in qualities.items() if name in _WBITS and quality > 0}
    if not named:
        return None
    best = max(named, key=lambda name: named[name])
    plain = qualities.get("identity", qualities.get("*"))
    if plain is None:
        return best if len([name for name, quality in qualities.items() if quality > 0]) == 1 else None
    return best if named[best] > plain else None


def accepts(accept_encoding: str | None, coding: str) -> bool:
    """Return whether the client can decode a content coding, which it lists with a quality above 0."""
    return dict(_items(accept_encoding or "")).get(coding, 0) > 0


def _items(header: str) -> list[tuple[str, float]]:
    return [("gzip" if name == "x-gzip" else name, quality) for name, quality in weighted(header)]


async def coded(pieces: AsyncIterator[bytes | memoryview], coding: str) -> AsyncGenerator[bytes | memoryview, None]:
    """Compress the pieces of a body; large ones in a thread."""
    deflate: Any = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WBITS[coding])
    async for whole in pieces:
        for piece in slices(whole):
            if made := await in_thread_if(len(piece) > _INLINE, deflate.compress, piece):
                yield made
    yield deflate.flush()
