"""The OpenAPI document: FastAPI's routes, `openapi.json` for the bodies that the APIs parse themselves, and the tables.

`openapi.json` has components of the document, and `operations`: the routes in `paths`, the request body, the responses,
and the statuses of those that are problem objects (`problems`; `call`: those of every call).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from app.api.oip.reply import VERSION
from app.api.openapi_operations import any_parts, operation_models, operation_paths
from app.replies import multipart, sse
from schemas.checks import CHECK_METHODS, CheckMethod
from schemas.tables import operation_names
from schemas.wire import AnyCall, CallReply, Problem, ValidateReply, VerifyReply

__all__ = ["install_openapi", "operation_id"]

_STATIC = Path(__file__).with_name("openapi.json")
_REF = "#/components/schemas/{model}"
_MODELS: tuple[type[BaseModel], ...] = (AnyCall, CallReply, Problem, ValidateReply, VerifyReply)
# Paths that take a call of any operation; the tables give each operation its own.
_ANY = {suffix: f"/v1/ops/{{op}}{suffix}" for suffix in ("", "/validate", "/verify")}
_APIS = {"/v2": "v2_"}

Operation = dict[str, Any]


def _place(name: str, description: str, *values: str) -> dict[str, Any]:
    schema = {"type": "string", "enum": list(values)}
    return {"name": name, "in": "path", "required": True, "description": description, "schema": schema}


_PLACES = {
    "op": _place("op", "Name or alias of an operation.", *operation_names()),
    "model": _place("model", "Name or alias of an operation.", *operation_names()),
    "version": _place("version", "The only version of every model.", VERSION),
}

_CHECKS = {
    "post /v1/checks": "check.begin",
    "post /v1/checks/verify-signature": "check.verify_signature",
    "post /v1/checks/{check}/next": "check.next",
    "post /v1/checks/{check}/submit": "check.submit",
    "post /v1/checks/{check}/finish": "check.finish",
    "delete /v1/checks/{check}": "check.drop",
}
_CHECK_STATUSES = (400, 401, 403, 404, 406, 413, 415, 422, 429, 499, 500, 503, 504)
_FILE = {"type": "string", "format": "binary"}
_CASE = {"schema": {**_FILE, "description": "A JSON part `reply`, then each input as a .npy file under its name."}}
_EVENTS = {"schema": {"type": "string", "description": "JSON-RPC messages: progress, the response."}}
_CHECK_REPLIES = {"check.next": {multipart.MEDIA_TYPE: _CASE}, "check.submit": {sse.MEDIA_TYPE: _EVENTS}}


class _WithoutDefaults(GenerateJsonSchema):
    """Leave out defaults, which the descriptions have: generators make a member with a default a required one."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Return the schema of the member alone."""
        return self.generate_inner(schema["schema"])


def operation_id(route: APIRoute) -> str:
    """Return the name of a route in the document: that of its function, with the API where several have the name."""
    api = next((name for path, name in _APIS.items() if route.path.startswith(path)), "")
    return f"{api}{route.name}{'_version' if '{version}' in route.path else ''}"


def install_openapi(app: FastAPI) -> None:
    """Generate the document of `app` once, from its routes and the models of the tables."""

    def document() -> dict[str, Any]:
        app.openapi_schema = app.openapi_schema or _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    made = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        license_info=app.license_info,
        routes=app.routes,
        servers=[{"url": "/", "description": "This service."}],
        separate_input_output_schemas=False,
    )
    static, paths = json.loads(_STATIC.read_text(encoding="utf-8")), made["paths"]
    kinds: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (model, "validation") for model in (*_MODELS, *operation_models())
    ]
    _, definitions = models_json_schema(kinds, ref_template=_REF, schema_generator=_WithoutDefaults)
    made["components"]["schemas"] |= definitions["$defs"] | static["components"]["schemas"]
    made["components"]["securitySchemes"] = static["components"]["securitySchemes"]
    made["security"] = [{}, *({name: []} for name in static["components"]["securitySchemes"])]
    for verb in _operations(paths):
        places = [entry for entry in verb.pop("parameters", []) if entry["in"] == "path"]
        verb |= {"parameters": [_PLACES.get(entry["name"], entry) for entry in places]} if places else {}
        if "HTTPValidationError" in str(verb["responses"].get("422")):
            del verb["responses"]["422"]  # FastAPI's
    statuses = static["statuses"]
    for own in static["operations"]:
        problems = own.pop("problems", [])
        for place in own.pop("paths"):
            _describe(paths, place, own, static["problems"] if problems == "call" else problems, statuses)
    for place, name in _CHECKS.items():
        _describe(paths, place, _check(name, CHECK_METHODS[name]), _CHECK_STATUSES, statuses)
    for path in _ANY.values():
        paths[path]["post"]["requestBody"]["content"]["multipart/form-data"] = any_parts()
    paths |= operation_paths({suffix: paths[path]["post"]["responses"] for suffix, path in _ANY.items()}, ref=_REF)
    for verb in _operations(paths):
        verb.setdefault("parameters", []).append(static["parameter"])
    return made


def _operations(paths: dict[str, Any]) -> Iterator[Operation]:
    return (verb for page in paths.values() for verb in page.values())


def _describe(
    paths: dict[str, Any], place: str, own: Operation, problems: Iterable[int], statuses: dict[str, str]
) -> None:
    """Add what is known of a route, such as `post /rpc`, to what FastAPI says of it."""
    method, path = place.split()
    content = {"application/problem+json": {"schema": {"$ref": _REF.format(model=Problem.__name__)}}}
    errors = {str(code): {"description": statuses[str(code)], "content": content} for code in problems}
    verb = paths[path][method]
    responses = verb["responses"] | own.get("responses", {}) | errors
    verb |= own | {"responses": dict(sorted(responses.items()))}


def _check(name: str, method: CheckMethod) -> Operation:
    """Describe a route of a sealed check."""
    content = {"application/json": {"schema": method.result}, **_CHECK_REPLIES.get(name, {})}
    docs = {"responses": {"200": {"description": method.summary, "content": content}}}
    if name == "check.drop":
        return docs
    own = {param: schema for param, schema in method.params.items() if param != "check"}
    required = [param for param in method.required if param in own]
    body = {"type": "object", "required": required, "properties": own, "additionalProperties": False}
    if name == "check.verify_signature":
        body = own["document"]
    bodies = {"application/json": {"schema": body}}
    if name == "check.submit":
        parts = {"type": "object", "required": ["request"], "properties": {"request": body}}
        bodies[multipart.MEDIA_TYPE] = {"schema": {**parts, "additionalProperties": _FILE}}
    return docs | {"requestBody": {"required": bool(required), "content": bodies}}
