"""The sealed checks in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from app.api.openapi import EVENTS, binary, problems
from app.replies import multipart, sse
from schemas.checks import CHECK_METHODS, CheckMethod

__all__ = ["CHECK_DOCS"]

_JSON = "application/json"
_STATUSES = (400, 401, 403, 404, 406, 413, 415, 422, 429, 499, 500, 503, 504)
_MORE = {
    "check.next": {multipart.MEDIA_TYPE: binary("A JSON part `reply`, then each input as a .npy file under its name.")},
    "check.submit": {sse.MEDIA_TYPE: EVENTS},
}


def _docs(name: str, method: CheckMethod) -> dict[str, Any]:
    content = {_JSON: {"schema": method.result}, **_MORE.get(name, {})}
    docs = {"responses": {200: {"description": method.summary, "content": content}, **problems(*_STATUSES)}}
    if name == "check.drop":
        return docs
    own = {param: schema for param, schema in method.params.items() if param != "check"}
    required = [param for param in method.required if param in own]
    body = {"type": "object", "required": required, "properties": own, "additionalProperties": False}
    if name == "check.verify_signature":
        body = own["document"]
    bodies = {_JSON: {"schema": body}}
    if name == "check.submit":
        file = {"type": "string", "format": "binary"}
        parts = {"type": "object", "required": ["request"], "properties": {"request": body}}
        bodies[multipart.MEDIA_TYPE] = {"schema": {**parts, "additionalProperties": file}}
    return {**docs, "openapi_extra": {"requestBody": {"required": bool(required), "content": bodies}}}


CHECK_DOCS = {name: _docs(name, method) for name, method in CHECK_METHODS.items()}
"""The documentation of each route, by the name of its method."""
