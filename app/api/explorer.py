"""The page `/explorer`, which draws a layer, and its files under `/web/`; it loads nothing from other hosts."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse
from starlette.responses import Response

__all__ = ["PATHS", "router"]

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FOLDER = Path(__file__).parents[1] / "web"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_FILES = {f"/web/{file.name}": file for file in sorted(_FOLDER.iterdir()) if file.suffix in (".css", ".js")}
_FILES["/explorer"] = _FOLDER / "explorer.html"
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

PATHS = frozenset(_FILES)
"""Paths of the page and its files."""

router = APIRouter(include_in_schema=False)


def _add(path: str, file: Path) -> None:
    @router.api_route(path, methods=["GET", "HEAD"])
    async def page(_: Request) -> Response:
        return FileResponse(file, media_type=_TYPES[file.suffix], headers=_HEADERS)


for _path, _file in _FILES.items():
    _add(_path, _file)
