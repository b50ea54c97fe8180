"""Documents: pages that are the same for every request, as bytes that are made once and off the event loop.

Clients ask each time whether a document has changed, so that no page mixes the files of two versions; it is compressed
for clients that decode gzip.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from fastapi import Request

from app.caching import Shared
from app.http.exchange import exchange_of
from app.replies.body import SMALL, json_bytes, send_body, slices
from app.replies.formats import accepts
from convgrad import __version__
from schemas.describe import describe, list_operations
from schemas.openapi import openapi_document
from schemas.openrpc import openrpc_document

__all__ = ["OPENAPI", "OPENRPC", "OPERATION_LIST", "Document", "description_of"]

_HEADERS = {"cache-control": "no-cache", "vary": "accept-encoding"}


class Document:
    """A page whose content `make` returns, in a thread, when it is requested for the first time."""

    def __init__(self, make: Callable[[], bytes], media_type: str, headers: Mapping[str, str] | None = None) -> None:
        self._make = make
        self._media_type = media_type
        self._headers = _HEADERS | dict(headers or {})
        self._variants = Shared(lambda: asyncio.to_thread(self._made))

    async def content(self) -> bytes:
        """Return the content, not compressed."""
        return (await self._variants.get())[False][0]

    async def reply(self, request: Request) -> None:
        """Send the document, or 304 if the client has it."""
        exchange = exchange_of(request.scope)
        gzipped = accepts(exchange.headers.get("accept-encoding", ""), "gzip")
        content, tag = (await self._variants.get())[gzipped]
        headers = {**self._headers, "etag": tag, **({"content-encoding": "gzip"} if gzipped else {})}
        if tag in exchange.headers.get("if-none-match", ""):
            await send_body(exchange.send, [], self._media_type, status=304, headers=headers)
            return
        # In pieces, of which a client that does not read has one in memory.
        await send_body(exchange.send, slices(content, SMALL), self._media_type, len(content), headers=headers)

    def _made(self) -> dict[bool, tuple[bytes, str]]:
        """Return content and entity tag, which the compression changes, by whether they are for gzip."""
        content = self._make()
        digest = hashlib.sha256(content).hexdigest()[:32]
        return {False: (content, f'"{digest}"'), True: (gzip.compress(content, mtime=0), f'"{digest}-gzip"')}


def _json_document(make: Callable[[], Any]) -> Document:
    return Document(lambda: json_bytes(make()), "application/json")


OPENAPI = _json_document(lambda: openapi_document(__version__))
OPENRPC = _json_document(openrpc_document)
OPERATION_LIST = _json_document(list_operations)


@cache
def description_of(name: str) -> Document:
    """Return the description of an operation under one of its names."""
    return _json_document(lambda: describe(name))
