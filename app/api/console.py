"""The page `/`: the operations, a call to check or to compute in the browser, and the same call for curl."""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from schemas.describe import example, list_operations
from schemas.tables import find_operation

__all__ = ["call", "page", "router"]

_TEMPLATE = Path(__file__).with_name("console.html").read_text(encoding="utf-8")
_URL = "http://127.0.0.1:8000"
"""Address in the page as it is sent; the page's script replaces it with its own."""

router = APIRouter(include_in_schema=False)


def call(op: str) -> str:
    """Return a small call of an operation as JSON, with its tensors: f32 of small integers.

    Raises `UnknownOperation`.
    """
    request = example(find_operation(op), channels=(1, 1))
    for tensor in request["inputs"].values():
        if isinstance(tensor, dict):
            values = np.arange(prod(tensor["shape"])) % 5 - 2
            tensor["data"] = base64.b64encode(values.astype("<f4").tobytes()).decode()
    return _lines(request)


def page() -> str:
    """Return the page as HTML, the same for every service."""
    operations = list_operations()
    first = operations[0]["op"]
    calls = {entry["op"]: call(entry["op"]) for entry in operations}
    parts = {
        "rows": "\n".join(_row(entry) for entry in operations),
        "options": "".join(f"<option>{escape(entry['op'])}</option>" for entry in operations),
        "request": escape(calls[first]),
        "curl": escape(f"curl -sS {_URL}/v1/ops/{first} -H 'Content-Type: application/json' -d '{calls[first]}'"),
        # In a script element, `</` would end it.
        "calls": json.dumps(calls).replace("</", "<\\/"),
    }
    text = _TEMPLATE
    for name, part in parts.items():
        text = text.replace(f"<!-- {name} -->", part)
    return text


def _lines(request: dict[str, dict[str, Any]]) -> str:
    """Return a request as JSON with a line for each attribute and input."""
    parts = [
        f' "{part}": {{\n' + ",\n".join(f'  "{name}": {json.dumps(value)}' for name, value in members.items()) + "}"
        for part, members in request.items()
    ]
    return "{\n" + ",\n".join(parts) + "}"


def _row(entry: dict[str, Any]) -> str:
    also = ", ".join(entry["aliases"])
    return f"<tr><td>{escape(entry['op'])}</td><td>{escape(entry['summary'])}</td><td>{escape(also)}</td></tr>"


def _inline(tag: str) -> str:
    """Return the policy that allows only the page's own script or style, by its digest."""
    text = _TEMPLATE.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_PAGE = page()
# The page is self-contained: it loads nothing from other hosts and sends nothing to them.
_HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; {_inline('script')}; {_inline('style')}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
}


@router.api_route("/", methods=["GET", "HEAD"])
async def console(_: Request) -> HTMLResponse:
    """Show the page."""
    return HTMLResponse(_PAGE, headers=_HEADERS)
