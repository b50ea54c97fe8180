"""The pages `/`, `/machine` and `/docs` (Swagger UI for the OpenAPI document), which load nothing from other hosts."""

from __future__ import annotations

import re
from functools import partial
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter

from app.api.documents import Document

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
}

# A comment from the beginning of a line to the end of one; those within a line are types of expressions.
_COMMENT = re.compile(rb"^[ \t]*/\*\*(?:[^*]|\*(?!/))*\*/$", re.MULTILINE)

PATHS = frozenset(_FILES)
"""Paths of the pages and their files."""

router = APIRouter()


def _sent(file: Path) -> bytes:
    """Return the bytes of a file as they are sent: modules without their comments, each line in its place."""
    content = file.read_bytes()
    if file.parent != _FOLDER or file.suffix != ".js":
        return content
    return _COMMENT.sub(lambda found: b"\n" * found[0].count(b"\n"), content)


for _path, _file in _FILES.items():
    router.get(_path)(Document(partial(_sent, _file), _TYPES[_file.suffix], _HEADERS).reply)
