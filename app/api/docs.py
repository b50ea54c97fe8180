"""The page `/docs`: Swagger UI for the OpenAPI document, loading nothing from other hosts."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from app.api.routing import file_router

__all__ = ["PATHS", "router"]

# The icons are data: URLs in the stylesheet.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HERE = Path(__file__).parent
# Only Swagger UI's files are used from the package, which has them unchanged from npm.
_SWAGGER_UI = Path(str(files("fastapi_offline") / "static"))
_FILES = {
    "/docs": (_HERE / "docs.html", "text/html"),
    "/docs/start.js": (_HERE / "docs.js", "text/javascript"),
    "/docs/swagger-ui-bundle.js": (_SWAGGER_UI / "swagger-ui-bundle.js", "text/javascript"),
    "/docs/swagger-ui.css": (_SWAGGER_UI / "swagger-ui.css", "text/css"),
}
PATHS = frozenset(_FILES)
"""Paths of the page and its files."""

router = file_router(_FILES, _POLICY)
