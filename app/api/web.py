"""The pages `/`, `/machine` and `/docs` (Swagger UI for the OpenAPI document), which load nothing from other hosts.

Browsers ask each time whether a file has changed, so that no page mixes the files of two versions; files are compressed
for clients that decode gzip.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.replies.coding import accepts

__all__ = ["PATHS", "router"]

_FOLDER, _DOCS = Path(__file__).parents[1] / "web", Path(__file__).parent
# Only Swagger UI's files are used from the package, which has them unchanged from npm; its icons are data: URLs.
_SWAGGER_UI = Path(str(files("fastapi_offline") / "static"))
_FILES = {
    "/": _FOLDER / "explorer.html",
    "/machine": _FOLDER / "machine.html",
    **{f"/web/{file.name}": file for file in _FOLDER.iterdir() if file.suffix in (".css", ".js")},
    "/docs": _DOCS / "docs.html",
    "/docs/start.js": _DOCS / "docs.js",
    "/docs/swagger-ui-bundle.js": _SWAGGER_UI / "swagger-ui-bundle.js",
    "/docs/swagger-ui.css": _SWAGGER_UI / "swagger-ui.css",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}

PATHS = frozenset(_FILES)
"""Paths of the pages and their files."""

router = APIRouter()


async def _page(request: Request) -> Response:
    file, gzipped = _FILES[request.scope["path"]], accepts(request.headers.get("accept-encoding"), "gzip")
    content, tag = await asyncio.to_thread(_sent, file, gzipped)
    sent = {**_HEADERS, "etag": tag, **({"content-encoding": "gzip"} if gzipped else {})}
    if tag in re.findall(r'"[^"]*"', request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=sent)
    return Response(content, media_type=_TYPES[file.suffix], headers=sent)


for _path in _FILES:
    router.get(_path)(_page)


def _sent(file: Path, gzipped: bool) -> tuple[bytes, str]:
    """Return the bytes of a file as they are sent, and their entity tag, which the compression changes."""
    return _content(file, gzipped, file.stat().st_mtime_ns)


@lru_cache(128)
def _content(file: Path, gzipped: bool, _changed_ns: int) -> tuple[bytes, str]:
    content = file.read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:32]
    return (gzip.compress(content, mtime=0), f'"{digest}-gzip"') if gzipped else (content, f'"{digest}"')
