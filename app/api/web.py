"""The pages for browsers, and the files of `app/web/` that they load, under `/web/`; nothing comes from other hosts."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.replies.coding import accepts

__all__ = ["PATHS", "POLICY", "router"]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the pages: no inline script or style, nothing from another host."""

_FOLDER = Path(__file__).parents[1] / "web"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_PAGES = {"/machine": "machine.html"}
_FILES = {f"/web/{file.name}": file.name for file in sorted(_FOLDER.iterdir()) if file.suffix in _TYPES} | _PAGES
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Browsers ask each time whether the file is still the same, so that no page mixes the files of two versions.
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}

PATHS = frozenset(_FILES)
"""Paths of the pages and of their files."""

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class _File:
    """The content of a file, plain or compressed, and its headers."""

    content: bytes
    media_type: str
    headers: dict[str, str]


@cache
def _read(name: str, coding: str | None) -> _File:
    """Read a file of `app/web/`; `coding` is `gzip` or None."""
    file = _FOLDER / name
    content = file.read_bytes()
    # The tag names the bytes that are sent, which the coding changes.
    tag = hashlib.sha256(content).hexdigest()[:32] + (f"-{coding}" if coding else "")
    headers = {**_HEADERS, "etag": f'"{tag}"'}
    if coding is not None:
        content = gzip.compress(content, mtime=0)
        headers["content-encoding"] = coding
    return _File(content, _TYPES[file.suffix], headers)


def _is_held(file: _File, if_none_match: str) -> bool:
    """Whether the browser has the file already."""
    return file.headers["etag"] in (tag.strip().removeprefix("W/") for tag in if_none_match.split(","))


def _add(path: str, name: str) -> None:
    @router.api_route(path, methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        headers = request.headers
        file = _read(name, "gzip" if accepts(headers.get("accept-encoding"), "gzip") else None)
        if _is_held(file, headers.get("if-none-match", "")):
            return Response(status_code=304, headers=file.headers)
        return Response(file.content, media_type=file.media_type, headers=file.headers)


for _path, _name in _FILES.items():
    _add(_path, _name)
