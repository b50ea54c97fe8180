"""The pages `/` and `/machine`, and their files under `/web/`; they load nothing from other hosts."""

from __future__ import annotations

from pathlib import Path

from app.api.routing import file_router

__all__ = ["PATHS", "router"]

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FOLDER = Path(__file__).parents[1] / "web"
_TYPES = {".css": "text/css", ".js": "text/javascript"}
_FILES = {
    "/": (_FOLDER / "explorer.html", "text/html"),
    "/machine": (_FOLDER / "machine.html", "text/html"),
    **{f"/web/{file.name}": (file, _TYPES[file.suffix]) for file in _FOLDER.iterdir() if file.suffix in _TYPES},
}

PATHS = frozenset(_FILES)
"""Paths of the pages and their files."""

router = file_router(_FILES, _POLICY)
