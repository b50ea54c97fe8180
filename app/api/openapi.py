"""The OpenAPI document: what FastAPI generates, and the request bodies that the APIs parse themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from app.api.oip.reply import VERSION
from app.api.openapi_operations import any_parts, operation_models, operation_paths
from app.replies import sse
from schemas.tables import operation_names
from schemas.wire import AnyCall, CallReply, Problem, ValidateReply, VerifyReply

__all__ = [
    "COMPUTE_DOCS",
    "DESCRIBE_DOCS",
    "EVENTS",
    "GRAPH_DOCS",
    "GRAPH_VALIDATE_DOCS",
    "LIST_DOCS",
    "VALIDATE_DOCS",
    "VERIFY_DOCS",
    "binary",
    "install_openapi",
    "operation_id",
    "problems",
]

_REF = "#/components/schemas/{model}"

_STATUSES = {
    400: "The request is malformed.",
    401: "The service requires an API key, and the request has none or an unknown one.",
    403: "The host name, or the origin of the calling web page, is not allowed.",
    404: "Unknown operation.",
    405: "This path does not support the method.",
    406: "The Accept header allows none of the reply formats.",
    413: "The body, or the work, output or memory of the call, exceeds a limit.",
    415: "Unsupported content type or encoding.",
    422: "Attributes, inputs or options are invalid, or a dtype is not supported.",
    429: "The key or address has reached its limit or its share of the queue or memory; see Retry-After.",
    499: "The client disconnected or cancelled the call.",
    500: "Internal error.",
    503: "The service is overloaded, starting or draining; see Retry-After.",
    504: "The deadline passed, or the body arrived too slowly.",
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the responses that are problem objects."""
    content = {"application/problem+json": {"schema": _ref(Problem)}}
    return {status: {"description": _STATUSES[status], "content": content} for status in statuses}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}


def _place(name: str, description: str, *values: str) -> dict[str, Any]:
    schema = {"type": "string", "enum": list(values)}
    return {"name": name, "in": "path", "required": True, "description": description, "schema": schema}


_PLACES = {
    "op": _place("op", "Name or alias of an operation.", *operation_names()),
    "model": _place("model", "Name or alias of an operation.", *operation_names()),
    "version": _place("version", "The only version of every model.", VERSION),
}

_REQUEST_ID = {
    "name": "X-Request-ID",
    "in": "header",
    "description": "For the logs and the reply: at most 128 letters, digits and `._~:/+=@-`. Any other is replaced.",
    "schema": {"type": "string"},
}

_FILE = {"type": "string", "format": "binary"}
_BODY = {
    "required": True,
    "content": {"application/json": {"schema": _ref(AnyCall)}, "multipart/form-data": any_parts()},
}


EVENTS = {"schema": {"type": "string", "description": "JSON-RPC messages: progress, the response."}}


def binary(description: str) -> dict[str, Any]:
    """Describe a binary body."""
    return {"schema": {"type": "string", "format": "binary", "description": description}}


_CALL_REPLY = {
    "description": "The result, in the format that the Accept header requests.",
    "headers": {
        "X-Request-ID": {"schema": {"type": "string"}, "description": "The id that the request gave, or a new one."},
        "Server-Timing": {"schema": {"type": "string"}, "description": "Milliseconds spent in each phase."},
        "X-Tensor-Dtype": {"schema": {"type": "string"}, "description": "For .npy replies: the dtype."},
    },
    "content": {
        "application/json": {"schema": _ref(CallReply)},
        "application/x-npy": binary("The one output as a .npy file, sent while it is computed."),
        sse.MEDIA_TYPE: {
            "schema": {"type": "string", "description": "JSON-RPC messages: progress, tiles, the response."}
        },
        "application/x-tensor-stream": binary("Frames: begin, progress, tile, end or error; these for each output."),
        "multipart/form-data": binary("A JSON part `reply`, then each output as a .npy file under its name."),
    },
}

_MESSAGE = {
    "type": "object",
    "required": ["jsonrpc", "method"],
    "properties": {
        "jsonrpc": {"const": "2.0"},
        "method": {"type": "string", "description": "An operation, ops.list, and others: see /openrpc.json."},
        "params": {"type": ["object", "array"], "items": {}},
        "id": {"type": ["string", "number", "null"]},
    },
}
_MESSAGES = {"anyOf": [_MESSAGE, {"type": "array", "items": _MESSAGE, "minItems": 1}]}
_RESPONSE = {
    "type": "object",
    "required": ["jsonrpc", "id"],
    "properties": {
        "jsonrpc": {"const": "2.0"},
        "result": {},
        "error": {
            "type": "object",
            "required": ["code", "message", "data"],
            "properties": {"code": {"type": "integer"}, "message": {"type": "string"}, "data": {"type": "object"}},
            "additionalProperties": False,
        },
        "id": {"type": ["string", "number", "null"]},
    },
    "oneOf": [{"required": ["result"]}, {"required": ["error"]}],
    "additionalProperties": False,
}
_ANSWER = {"anyOf": [_RESPONSE, {"type": "array", "items": _RESPONSE, "minItems": 1}]}
_RPC = {
    "requestBody": {
        "required": True,
        # application/json-rpc is accepted too, but generators refuse it
        "content": {"application/json": {"schema": _MESSAGES}},
    },
    "responses": {
        "200": {
            "description": "The response; errors are JSON-RPC errors.",
            "content": {
                "application/json": {"schema": _ANSWER},
                "application/json-rpc": {"schema": _ANSWER},
                "text/event-stream": {"schema": {"type": "string"}},
            },
        },
        "204": {"description": "The request has notifications only."},
        **{str(status): answer for status, answer in problems(403, 405, 406, 413, 415, 500).items()},
    },
}

_CALL_STATUSES = (400, 401, 403, 404, 405, 406, 413, 415, 422, 429, 500, 503, 504)

LIST_DOCS: dict[str, Any] = {"operation_id": "list_operations", "responses": problems(401, 403, 405, 500)}
DESCRIBE_DOCS: dict[str, Any] = {
    "operation_id": "describe_operation",
    "responses": problems(401, 403, 404, 405, 500),
}
VALIDATE_DOCS: dict[str, Any] = {
    "operation_id": "validate_operation",
    "responses": {
        200: {
            "description": "The resolved call: its outputs, kernel and cost.",
            "content": {"application/json": {"schema": _ref(ValidateReply)}},
        },
        **problems(*_CALL_STATUSES),
    },
    "openapi_extra": {"requestBody": _BODY},
}
VERIFY_DOCS: dict[str, Any] = {
    "operation_id": "verify_operation",
    "responses": {
        200: {
            "description": "The report: the verdict is its member `passed`.",
            "content": {"application/json": {"schema": _ref(VerifyReply)}, sse.MEDIA_TYPE: EVENTS},
        },
        **problems(*_CALL_STATUSES),
    },
    "openapi_extra": {"requestBody": _BODY},
}
COMPUTE_DOCS: dict[str, Any] = {
    "operation_id": "compute_operation",
    "responses": {200: _CALL_REPLY, **problems(*_CALL_STATUSES)},
    "openapi_extra": {"requestBody": _BODY},
}


_GRAPH_TENSORS = {"type": "array", "items": {"type": "object", "required": ["id"]}}
_GRAPH_NODE = {
    "type": "object",
    "required": ["id", "kind", "inputs", "outputs"],
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": "string"},
        "kind": {"type": "string", "description": "The name of an operation."},
        "attrs": {"type": "object", "description": "Attributes, each as an object with `type` and `value`."},
        "inputs": _GRAPH_TENSORS,
        "outputs": _GRAPH_TENSORS,
    },
}
_GRAPH_REQUEST = {
    "type": "object",
    "required": ["graph"],
    "properties": {
        "graph": {
            "type": "object",
            "description": "A graph as oneDNN Graph dumps it.",
            "required": ["graph"],
            "properties": {"graph": {"type": "array", "items": _GRAPH_NODE, "minItems": 1}},
        },
        "inputs": {"type": "object", "description": "Tensors by the id of their logical tensor."},
        "outputs": {"type": "array", "items": {"type": "integer"}, "description": "Ids of what to return."},
        "layout": {
            "type": "string",
            "enum": ["logical", "memory"],
            "description": "C order, or the strides of the logical tensors.",
        },
        "options": {"type": "object"},
    },
    "additionalProperties": False,
}
_GRAPH_BODY = {
    "required": True,
    "content": {
        "application/json": {"schema": _GRAPH_REQUEST},
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["request"],
                "properties": {"request": _GRAPH_REQUEST},
                "additionalProperties": _FILE,
            }
        },
    },
}
_ANY = {"schema": {"type": "object"}}
GRAPH_DOCS: dict[str, Any] = {
    "operation_id": "run_graph",
    "responses": {
        200: {
            "description": "The tensors asked for by id, and each node's attributes and cost.",
            "content": {
                "application/json": _ANY,
                "multipart/form-data": binary("A JSON part `reply`, then each output as a .npy file under its id."),
                sse.MEDIA_TYPE: EVENTS,
            },
        },
        **problems(*_CALL_STATUSES),
    },
    "openapi_extra": {"requestBody": _GRAPH_BODY},
}
GRAPH_VALIDATE_DOCS: dict[str, Any] = {
    "operation_id": "validate_graph",
    "responses": {
        200: {"description": "The resolved graph.", "content": {"application/json": _ANY}},
        **problems(*_CALL_STATUSES),
    },
    "openapi_extra": {"requestBody": _GRAPH_BODY},
}


_APIS = {"/v2": "v2_"}

# Keys are optional: a service without keys requires none.
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}


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
        if app.openapi_schema is None:
            made = get_openapi(
                title=app.title,
                version=app.version,
                summary=app.summary,
                license_info=app.license_info,
                routes=app.routes,
                servers=[{"url": "/", "description": "This service."}],
                separate_input_output_schemas=False,
            )
            models: list[type[BaseModel]] = [AnyCall, CallReply, Problem, ValidateReply, VerifyReply]
            models += operation_models()
            kinds: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "validation") for model in models]
            _, definitions = models_json_schema(kinds, ref_template=_REF, schema_generator=_WithoutDefaults)
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(definitions["$defs"])
            for page in made["paths"].values():
                for verb in page.values():
                    _clean(verb)
            made["paths"]["/rpc"]["post"].update(_RPC)
            answers = {"": COMPUTE_DOCS, "/validate": VALIDATE_DOCS, "/verify": VERIFY_DOCS}
            made["paths"] |= operation_paths({path: docs["responses"] for path, docs in answers.items()}, ref=_REF)
            for page in made["paths"].values():
                for verb in page.values():
                    verb.setdefault("parameters", []).append(_REQUEST_ID)
            made["components"]["securitySchemes"] = _KEYS
            made["security"] = [{}, *({name: []} for name in _KEYS)]
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _clean(verb: dict[str, Any]) -> None:
    """Drop what FastAPI adds but the routes do not use: its 422 body, query parameters."""
    answers = verb.get("responses", {})
    if "HTTPValidationError" in str(answers.get("422")):
        del answers["422"]
    places = [entry for entry in verb.pop("parameters", []) if entry["in"] == "path"]
    if places:
        verb["parameters"] = [_PLACES.get(entry["name"], entry) for entry in places]
