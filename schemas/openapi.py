"""The OpenAPI document: the pages of `openapi.json`, and four paths for each operation, made from the tables.

`openapi.json` has the document's components, and `pages`: for each its paths and what the document says about them.
`problems` lists the statuses whose replies are problem objects (`call` stands for those of every call, `check` for
those of a sealed check, `job` for those of a job), or is `oip`, for the errors of that protocol. `example` names the
method whose example is that of the page too, and `method` the JSON-RPC method of a sealed check or a job, which
describes the page as well. `jobs` marks the pages whose calls may be jobs.

A body of an operation's path has the plain form of a call, which generated clients can type: the names of the new
edition, no wrapped values. The service accepts the others too, and OpenRPC describes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from convgrad._errors import PROBLEM_JSON
from schemas.checks import CHECK_METHODS
from schemas.describe import example
from schemas.examples import infer_example, infer_reply, verified_example
from schemas.jobs import JOB_METHODS
from schemas.method_examples import EXAMPLE_OPERATION, Example, method_examples
from schemas.rows import Operation
from schemas.tables import OPERATIONS, find_operation, verified
from schemas.wire import (
    OPERATION_NAME,
    AnyCall,
    CallReply,
    Problem,
    ToleranceReply,
    ValidateReply,
    VerifyReply,
    other_names,
    request_model,
    validate_model,
    verify_model,
)

__all__ = ["openapi_document"]

_STATIC = Path(__file__).with_name("openapi.json")
_REF = "#/components/schemas/{model}"
_FILE = {"type": "string", "format": "binary"}
_MODELS: tuple[type[BaseModel], ...] = (AnyCall, CallReply, Problem, ToleranceReply, ValidateReply, VerifyReply)
_OPERATION_PAGES = {
    "": (request_model, "", "{summary}\n\n{formula}"),
    "/validate": (validate_model, "validate_", "Check a call of {name} without computing it."),
    "/verify": (verify_model, "verify_", "Compare results of {name} with the float64 reference."),
    "/tolerance": (request_model, "tolerance_", "Return how far honest results of {name} may be from the reference."),
}
# What `openapi.json` says about pages for this module only.
_NOT_SHOWN = ("paths", "problems", "method", "example", "link", "links", "jobs")
_JSON, _FORM = "application/json", "multipart/form-data"
# Replies that only the general pages have, so that the functions of an operation return a result: jobs are submitted
# by those of `/v1/ops/{op}`.
_OF_JOBS = ("202", "507")

Page = dict[str, Any]


class _WithoutDefaults(GenerateJsonSchema):
    """Leave out defaults, which are in the descriptions: generators take a member with a default for a required one."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Return the schema of the member alone."""
        return self.generate_inner(schema["schema"])


def openapi_document(version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the service."""
    static = json.loads(_STATIC.read_text(encoding="utf-8"))
    components, paths = static["components"], dict[str, dict[str, Page]]()
    for page in static["pages"]:
        made = _page(page, static)
        for method, path in map(str.split, page["paths"]):
            name = made["operationId"] + ("_version" if "{version}" in path else "")
            places = [_place(place) for place in re.findall(r"{(\w+)}", path)]
            headers = [static["parameter"], *(static["job_parameters"] if "jobs" in page else ())]
            own = {"operationId": name, "parameters": [*places, *headers]}
            paths.setdefault(path, {})[method] = made | own
    names = {name: None for row in OPERATIONS for name in verified(find_operation(row.name)).operation.input_spellings}
    for suffix in _OPERATION_PAGES:
        general = paths[f"/v1/ops/{{op}}{suffix}"]["post"]
        general["requestBody"]["content"][_FORM] = _form(names)
        for row in OPERATIONS:
            responses = {status: each for status, each in general["responses"].items() if status not in _OF_JOBS}
            page = {"tags": general["tags"], "responses": deepcopy(responses), "parameters": [static["parameter"]]}
            paths[f"/v1/ops/{row.name}{suffix}"] = {"post": page | _operation_page(row, suffix)}
    for page in static["pages"]:
        for method, path in map(str.split, page["paths"]):
            _add_examples(paths[path][method], _page_examples(page.get("example", page.get("method"))))
    for row in OPERATIONS:
        called = find_operation(row.name)
        _add_examples(paths[f"/v1/ops/{row.name}"]["post"], {"small": method_examples()[row.name]})
        call = {name: value for name, value in method_examples()[row.name].params.items() if name != "options"}
        _add_examples(paths[f"/v1/ops/{row.name}/tolerance"]["post"], {"small": Example(call, None)})
        _add_examples(paths[f"/v1/ops/{row.name}/validate"]["post"], {"small": Example(example(called), None)})
        _add_examples(paths[f"/v1/ops/{row.name}/verify"]["post"], {"small": Example(verified_example(called), None)})
    makers = {make for make, *_ in _OPERATION_PAGES.values()}
    models = [make(find_operation(row.name), plain=True) for make in makers for row in OPERATIONS]
    kinds: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "validation") for model in (*_MODELS, *models)]
    _, schemas = models_json_schema(kinds, ref_template=_REF, schema_generator=_WithoutDefaults)
    components["schemas"] |= schemas["$defs"]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "convgrad",
            "summary": "Convolution gradients over HTTP.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "version": version,
        },
        "servers": [{"url": "/", "description": "This service."}],
        "paths": paths,
        "components": components,
        "security": [{}, *({name: []} for name in components["securitySchemes"])],
    }


def _page(given: Page, static: dict[str, Any]) -> Page:
    """Return what the paths of a page have in common, with its errors."""
    page = {name: value for name, value in given.items() if name not in _NOT_SHOWN}
    responses = page.get("responses", {})
    if "method" in given:
        page |= _check(given["method"], responses)
        responses = page["responses"]
    elif not {"200", "400"} & responses.keys():
        responses = {"200": {"description": "The reply.", "content": {_JSON: {"schema": {}}}}, **responses}
    if "links" in given:
        name = given.get("link", "check")
        places = {name: f"$response.body#/{name}"}
        links = {name: {"operationId": name, "parameters": places} for name in given["links"]}
        responses["200"] = {**responses["200"], "links": links}
    problems = given.get("problems", [])
    if problems == "oip":
        content = {_JSON: {"schema": {"$ref": _REF.format(model="OipError")}}}
        errors = static["oip"]
    else:
        content = {PROBLEM_JSON: {"schema": {"$ref": _REF.format(model=Problem.__name__)}}}
        statuses = problems if isinstance(problems, list) else static["problems"][problems]
        if "jobs" in given:
            statuses, responses = [*statuses, 507], {**responses, "202": static["accepted"]}
        errors = {str(status): static["statuses"][str(status)] for status in statuses}
    errors = {status: {"description": text, "content": content} for status, text in errors.items()}
    return page | {"responses": dict(sorted((errors | responses).items()))}


def _place(name: str) -> dict[str, Any]:
    """Describe a parameter of a path."""
    place: dict[str, Any] = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    if name in ("op", "model"):
        return place | OPERATION_NAME | {"example": EXAMPLE_OPERATION}
    if name == "version":
        schema = {"type": "string", "enum": ["1"]}
        return place | {"schema": schema, "description": "The only version of every model.", "example": "1"}
    if name == "job":
        return place | {"description": "The id in the reply to the call that became a job."}
    if name == "check":
        return place | {"description": "The id that `POST /v1/checks` returned."}
    if name == "handle":
        return place | {"description": "The handle that `POST /v1/tensors` or a tool of /mcp returned."}
    return place | {"description": "A name that the caller chooses.", "example": "example"}


def _page_examples(name: str | None) -> Mapping[str, Example]:
    """Return the bodies and replies of a page that has the example of a method, or those of its own."""
    called = find_operation(EXAMPLE_OPERATION)
    if name is None:
        return {}
    if name == "tensor":
        return {"small": Example({"inputs": {"tensor": {"dtype": "f32", "shape": [2], "data": [1.5, -2.0]}}}, None)}
    if name == "infer":
        return {"small": Example(infer_example(called), infer_reply(called))}
    params, result = method_examples()[EXAMPLE_OPERATION if name == "rpc" else name]
    if name == "rpc":
        asked = {"jsonrpc": "2.0", "id": 1, "method": EXAMPLE_OPERATION, "params": params}
        listed = {"jsonrpc": "2.0", "id": 2, "method": "ops.list"}
        reply = {"jsonrpc": "2.0", "result": result, "id": 1}
        others = {"jsonrpc": "2.0", "result": method_examples()["ops.list"].result, "id": 2}
        return {"call": Example(asked, reply), "batch": Example([asked, listed], [reply, others])}
    body = {param: value for param, value in params.items() if param not in ("op", "check", "job")}
    return {"small": Example(body["document"] if name == "check.verify_signature" else body, result)}


def _add_examples(page: Page, examples: Mapping[str, Example]) -> None:
    """Add examples by name to the bodies and the JSON reply of a page."""
    for kind, body in page.get("requestBody", {}).get("content", {}).items() if examples else ():
        if kind in (_JSON, _FORM):
            values = {
                name: {"request": each.params} if kind == _FORM else each.params for name, each in examples.items()
            }
            body["examples"] = {name: {"value": value} for name, value in values.items()}
    replies = {name: {"value": each.result} for name, each in examples.items() if each.result is not None}
    if replies:
        page["responses"]["200"]["content"][_JSON]["examples"] = replies


def _check(name: str, responses: dict[str, Any]) -> Page:
    """Describe body and replies of a method of a sealed check or a job; `responses` has other forms of the reply."""
    method, more = (CHECK_METHODS | JOB_METHODS)[name], responses.get("200", {})
    content = {_JSON: {"schema": method.result}, **more}
    docs: Page = {"responses": {"200": {"description": method.summary, "content": content}}}
    if name in ("check.drop", "check.key") or name in JOB_METHODS:
        return docs
    own = {param: schema for param, schema in method.params.items() if param != "check"}
    required = [param for param in method.required if param in own]
    body = {"type": "object", "required": required, "properties": own, "additionalProperties": False}
    if name == "check.verify_signature":
        body = own["document"]
    bodies = {_JSON: {"schema": body}}
    if name == "check.submit":
        parts = {"type": "object", "required": ["request"], "properties": {"request": body}}
        bodies[_FORM] = {"schema": {**parts, "additionalProperties": _FILE}}
    return docs | {"requestBody": {"required": bool(required), "content": bodies}}


def _operation_page(row: Operation, suffix: str) -> Page:
    """Describe a path of one operation."""
    make, prefix, text = _OPERATION_PAGES[suffix]
    called = find_operation(row.name)
    summary, _, description = text.format(summary=row.summary, formula=row.formula, name=row.name).partition("\n\n")
    taken = verified(called) if suffix in ("/validate", "/verify") else called
    content = {
        _JSON: {"schema": {"$ref": _REF.format(model=make(called, plain=True).__name__)}},
        _FORM: _form(each.name for each in taken.operation.inputs),
    }
    return {
        "summary": summary,
        "description": f"{description or row.summary}\n\n{other_names(row)}",
        "x-aliases": row.aliases,
        "operationId": prefix + row.snake_name,
        "requestBody": {"required": True, "content": content},
    }


def _form(names: Iterable[str]) -> dict[str, Any]:
    """Describe the multipart form of a call: the request object first, then a `.npy` file for each tensor."""
    names = list(names)
    request = {"type": "object", "description": "Attributes, options, and the inputs that are no part of the form."}
    return {
        "schema": {
            "type": "object",
            "required": ["request"],
            "properties": {"request": request, **dict.fromkeys(names, _FILE)},
        },
        "encoding": {
            "request": {"contentType": _JSON},
            **{name: {"contentType": "application/x-npy, application/octet-stream"} for name in names},
        },
    }
