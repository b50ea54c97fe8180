"""The JSON-RPC API as an OpenRPC document, made from the tables: `rpc.discover` and `GET /openrpc.json`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from schemas.checks import CHECK_METHODS, CheckMethod
from schemas.jobs import JOB_METHODS
from schemas.method_examples import Example, method_examples
from schemas.rows import Operation
from schemas.tables import OPERATIONS, CalledOperation, find_operation
from schemas.wire import (
    OPERATION_NAME,
    CallOptions,
    CallReply,
    ProblemError,
    ToleranceReply,
    ValidateReply,
    VerifyReply,
    other_names,
    request_model,
    validate_model,
    verify_model,
)

__all__ = ["RPC_ERRORS", "openrpc_document"]

# Every error of the API: code, name and message.
RPC_ERRORS: tuple[tuple[int, str, str], ...] = (
    (-32700, "ParseError", "Malformed request"),
    (-32600, "InvalidRequest", "Invalid request"),
    (-32601, "MethodNotFound", "Unknown operation or method"),
    (-32602, "InvalidParams", "Attributes, inputs or options break a rule: data.errors lists all"),
    (-32603, "InternalError", "Internal error"),
    (-32000, "Overloaded", "Overloaded: data.retry_after has the seconds to wait"),
    (-32001, "DeadlineExceeded", "Deadline exceeded"),
    (-32002, "Cancelled", "Cancelled"),
    (-32003, "TooLarge", "Too large: bytes, output, scratch or work"),
    (-32004, "Unsupported", "Unsupported dtype or layout"),
    (-32005, "Unauthorised", "Unauthorised"),
    (-32006, "ShuttingDown", "Shutting down"),
    (-32007, "WorkerLost", "Worker lost"),
    (-32008, "NotFound", "No such sealed check or job"),
)

_REF = "#/components/schemas/{model}"

_OP: dict[str, Any] = {"name": "op", "required": True, **OPERATION_NAME}


def openrpc_document(*, version: str = "1") -> dict[str, Any]:
    """Return the OpenRPC 1.3 document of the service: a method for each operation, and those of the service."""
    methods = [*map(_operation, OPERATIONS), *_service_methods()]
    return {
        "openrpc": "1.3.2",
        "info": {
            "title": "convgrad",
            "version": version,
            "description": "Convolution gradients as oneDNN Graph defines them, over JSON-RPC 2.0.",
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "servers": [{"name": "this service", "url": "/rpc"}],
        "methods": [method | _examples(method, method_examples()[method["name"]]) for method in methods],
        "components": {
            "schemas": _schemas(),
            "errors": {name: {"code": code, "message": text} for code, name, text in RPC_ERRORS},
        },
    }


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}


def _param(name: str, schema: dict[str, Any], description: str, *, required: bool = True) -> dict[str, Any]:
    return {"name": name, "required": required, "description": description, "schema": schema}


def _errors(*left_out: str) -> list[dict[str, str]]:
    return [{"$ref": f"#/components/errors/{name}"} for _, name, _ in RPC_ERRORS if name not in left_out]


def _operation(row: Operation) -> dict[str, Any]:
    request = request_model(find_operation(row.name))
    return {
        "name": row.name,
        "summary": row.summary,
        "description": f"{row.formula}\n\n{other_names(row)}",
        "x-aliases": row.aliases,
        "tags": [{"name": row.name}],
        "paramStructure": "either",
        "params": [
            _param("attributes", _member(request, "attributes"), "Attributes, in either spelling."),
            _param("inputs", _member(request, "inputs"), "Tensors by name, in either spelling."),
            _param("options", _ref(CallOptions), "How to compute and encode the result.", required=False),
        ],
        "result": {"name": "reply", "schema": _ref(CallReply)},
        "errors": _errors(),
    }


def _examples(method: dict[str, Any], example: Example) -> dict[str, Any]:
    params = [
        {"name": param["name"], "value": example.params[param["name"]]}
        for param in method["params"]
        if param["name"] in example.params
    ]
    result = {"name": method["result"]["name"], "value": example.result}
    return {"examples": [{"name": "small", "params": params, "result": result}]}


def _member(request: type[BaseModel], name: str) -> dict[str, str]:
    model = request.model_fields[name].annotation
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    return _ref(model)


def _service_methods() -> list[dict[str, Any]]:
    anything: dict[str, Any] = {"type": "object"}
    return [
        _method("ops.list", "List the operations.", [], {"type": "array", "items": anything}),
        _method("ops.describe", "Return the table of an operation as data.", [_OP], anything),
        _call_method(
            "ops.validate",
            "Check a call without computing it: resolved attributes, output shapes, plan and cost.",
            validate_model,
            "Inputs: dtype and shape are enough.",
            "As in the call itself.",
            ValidateReply,
        ),
        _call_method(
            "ops.verify",
            "Compare a result, one more input named like the output, with the float64 reference.",
            verify_model,
            "The inputs of the call, and its result.",
            "deadline_ms, explain, fast and arithmetic; the others have no effect.",
            VerifyReply,
        ),
        _call_method(
            "ops.tolerance",
            "Return how far honest results of a call may be from its float64 reference, element by element.",
            request_model,
            "The inputs of the call.",
            "encoding, deadline_ms, outputs (one) and arithmetic.",
            ToleranceReply,
        ),
        {
            **_method(
                "graph.run",
                "Compute a graph dumped by oneDNN Graph: its nodes in order, with inputs by tensor id.",
                _graph_params(anything),
                anything,
            ),
            "errors": _errors(),
        },
        _method(
            "graph.validate",
            "Check a dumped graph: everything that is wrong with it at once.",
            _graph_params(anything),
            anything,
        ),
        *(_check_method(name, method) for name, method in (JOB_METHODS | CHECK_METHODS).items()),
        _method("rpc.discover", "Return this document.", [], anything),
    ]


def _call_method(
    name: str,
    summary: str,
    model: Callable[[CalledOperation], type[BaseModel]],
    inputs: str,
    options: str,
    result: type[BaseModel],
) -> dict[str, Any]:
    """Describe a method whose parameter `op` names the operation of a call."""
    requests = [model(find_operation(row.name)) for row in OPERATIONS]
    params = [
        _OP,
        _param("attributes", _any_of(requests, "attributes"), "Attributes of the operation."),
        _param("inputs", _any_of(requests, "inputs"), inputs),
        _param("options", _ref(CallOptions), options, required=False),
    ]
    return {**_method(name, summary, params, _ref(result)), "errors": _errors()}


def _check_method(name: str, method: CheckMethod) -> dict[str, Any]:
    params = [
        _param(param, schema, schema["description"], required=param in method.required)
        for param, schema in method.params.items()
    ]
    return {**_method(name, method.summary, params, method.result), "errors": _errors()}


def _graph_params(anything: dict[str, Any]) -> list[dict[str, Any]]:
    ids: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
    layout: dict[str, Any] = {"enum": ["logical", "memory"]}
    return [
        _param("graph", anything, "The dump: an object with a list `graph` of ops."),
        _param("inputs", anything, "Tensors by the id of their logical tensor.", required=False),
        _param("outputs", ids, "Ids of what to return; by default what no node reads.", required=False),
        _param("options", _ref(CallOptions), "As in a call.", required=False),
        _param("layout", layout, "C order, or the strides of the logical tensors.", required=False),
    ]


def _method(name: str, summary: str, params: list[dict[str, Any]], result: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "summary": summary,
        "paramStructure": "either",
        "params": params,
        "result": {"name": "result", "schema": result},
        "errors": _errors("Overloaded", "DeadlineExceeded", "Cancelled", "WorkerLost"),
    }


def _any_of(bodies: Sequence[type[BaseModel]], name: str) -> dict[str, Any]:
    return {"anyOf": [_member(body, name) for body in bodies]}


def _schemas() -> dict[str, Any]:
    models: list[type[BaseModel]] = [CallReply, ToleranceReply, ValidateReply, VerifyReply, ProblemError, CallOptions]
    for row in OPERATIONS:
        called = find_operation(row.name)
        models += [request_model(called), validate_model(called), verify_model(called)]
    _, made = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    found: dict[str, Any] = made["$defs"]
    return found
