"""The sealed checks in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from app.api.openapi import binary, problems
from app.replies import multipart, sse
from schemas.checks import CHECK_METHODS, CheckMethod

__all__ = ["CHECK_DOCS"]

_JSON = "application/json"
_STATUSES = (400, 401, 403, 404, 406, 413, 415, 422, 429, 499, 500, 503, 504)


def _docs(name: str, method: CheckMethod) -> dict[str, Any]:
    answer = {"type": "object", "required": [*method.result], "properties": dict(method.result)}
    content: dict[str, Any] = {_JSON: {"schema": answer}}
    if name == "check.next":
        content[multipart.MEDIA_TYPE] = binary("A JSON part `reply`, then each input as a .npy file under its name.")
    if name == "check.submit":
        content[sse.MEDIA_TYPE] = {
            "schema": {"type": "string", "description": "JSON-RPC messages: progress, the response."}
        }
    docs: dict[str, Any] = {
        "responses": {200: {"description": method.summary, "content": content}, **problems(*_STATUSES)}
    }
    if name == "check.drop":
        return docs
    return docs | {
        "openapi_extra": {
            "requestBody": {"required": bool({*method.required} - {"check"}), "content": _bodies(name, method)}
        }
    }


def _bodies(name: str, method: CheckMethod) -> dict[str, Any]:
    if name == "check.verify_signature":
        return {_JSON: {"schema": method.params["document"]}}
    own = {param: schema for param, schema in method.params.items() if param != "check"}
    required = [param for param in method.required if param != "check"]
    schema = {"type": "object", "required": required, "properties": own, "additionalProperties": False}
    if name != "check.submit":
        return {_JSON: {"schema": schema}}
    file = {"type": "string", "format": "binary"}
    parts = {"type": "object", "required": ["request"], "properties": {"request": schema}, "additionalProperties": file}
    return {_JSON: {"schema": schema}, multipart.MEDIA_TYPE: {"schema": parts}}


CHECK_DOCS = {name: _docs(name, method) for name, method in CHECK_METHODS.items()}
"""The documentation of each route, by the name of its method."""
