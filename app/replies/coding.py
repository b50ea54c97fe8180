"""Code a reply as gzip or deflate, where the client asked for that."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator
from functools import lru_cache
from typing import Any

__all__ = ["choose_coding", "coded"]

_WBITS = {"gzip": 31, "deflate": 15}
_ITEM = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+)(?:[ \t]*;[ \t]*[qQ]=(0(?:\.\d{0,3})?|1(?:\.0{0,3})?))?")
_MOST_ITEMS = 32
# Tensors hardly shrink, whatever the level: the fastest.
_LEVEL = 1
# Deflating this much takes about a millisecond; more goes to a thread.
_INLINE = 32 << 10


@lru_cache(256)
def choose_coding(accept_encoding: str | None) -> str | None:
    """Return the coding that a client asked for; None to send the reply as it is.

    HTTP libraries offer by themselves all that they can undo (`gzip, deflate, br`). That is no wish, and
    deflating a tensor takes longer than to send it. So a reply is coded for a client that names one coding,
    or that rates one above a plain reply.
    """
    found = dict(_items(accept_encoding or ""))
    named = {name: quality for name, quality in found.items() if name in _WBITS and quality > 0}
    if not named:
        return None
    best = max(named, key=lambda name: named[name])
    plain = found.get("identity", found.get("*"))
    if plain is None:
        return best if len([name for name, quality in found.items() if quality > 0]) == 1 else None
    return best if named[best] > plain else None


def _items(header: str) -> list[tuple[str, float]]:
    items = (_ITEM.fullmatch(item.strip()) for item in header.split(",")[:_MOST_ITEMS])
    named = [(item[1].lower(), float(item[2] or 1)) for item in items if item]
    return [("gzip" if name == "x-gzip" else name, quality) for name, quality in named]


async def coded(pieces: AsyncIterator[bytes | memoryview], coding: str) -> AsyncIterator[bytes]:
    """Code the pieces of a body; large ones in a thread."""
    deflate: Any = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WBITS[coding])
    async for piece in pieces:
        if len(piece) <= _INLINE:
            made = deflate.compress(piece)
        else:
            made = await asyncio.to_thread(deflate.compress, piece)
        if made:
            yield made
    yield deflate.flush()
