"""The `/v2` API: the Open Inference Protocol with Triton's extensions, for `tritonclient` and similar clients.

A model is an operation under one of its names; each has one version. The attributes of a call are the parameters of
its request.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from app.api.oip.documents import model_config, model_metadata, server_metadata
from app.api.oip.extensions import ERRORS, OipError
from app.api.oip.infer import OipState
from app.api.oip.infer import infer as run_inference
from app.api.oip.reply import VERSION
from app.calls.service import Service
from app.http.exchange import exchange_of
from convgrad._errors import UnknownOperation
from schemas.problems import safe_text
from schemas.tables import CalledOperation, find_operation, operation_names

__all__ = ["OipState", "router"]


router = APIRouter(prefix="/v2", tags=["Open Inference Protocol"], responses=ERRORS)


def find_model(name: str, version: str | None = None) -> CalledOperation:
    """Return the operation of a model; raises `UnknownOperation` for an unknown name or version."""
    called = find_operation(name)
    if version not in (None, VERSION):
        shown = f"version {safe_text(version)}"
        raise UnknownOperation(f"the model {called.called_as} has no {shown}: the only one is {VERSION}")
    return called


@router.get("")
@router.get("/", include_in_schema=False)
async def server(request: Request) -> Any:
    """Describe the server and its extensions."""
    return server_metadata(shared_memory=_state(request).regions.enabled)


@router.get("/health/live")
async def live(_: Request) -> Any:
    """Tell whether the server answers."""
    return {"live": True}


_READY: dict[str, Any] = {"responses": {503: {"description": "The service is starting, failed or draining."}}}


@router.get("/health/ready", **_READY)
async def ready(request: Request) -> Response:
    """Tell whether calls are accepted: 503 while the service is starting, failed or draining."""
    return _readiness(request, {"live": True})


@router.get("/models/stats")
async def all_statistics(request: Request) -> Any:
    """Report the statistics of every model."""
    return {"model_stats": [_state(request).statistics.report(name, VERSION) for name in operation_names()]}


@router.get("/models/{model}")
@router.get("/models/{model}/versions/{version}")
async def metadata(_: Request, model: str, version: str | None = None) -> Any:
    """Describe a model's inputs and outputs."""
    return model_metadata(find_model(model, version))


@router.get("/models/{model}/ready", **_READY)
@router.get("/models/{model}/versions/{version}/ready", **_READY)
async def model_ready(request: Request, model: str, version: str | None = None) -> Response:
    """Tell whether a model accepts calls."""
    return _readiness(request, {"name": find_model(model, version).called_as})


@router.get("/models/{model}/config")
@router.get("/models/{model}/versions/{version}/config")
async def config(request: Request, model: str, version: str | None = None) -> Any:
    """Return a model's configuration, which includes its attributes."""
    return model_config(find_model(model, version), _service(request).settings.worker_count)


@router.get("/models/{model}/stats")
@router.get("/models/{model}/versions/{version}/stats")
async def statistics(request: Request, model: str, version: str | None = None) -> Any:
    """Report the statistics of a model."""
    name = find_model(model, version).called_as
    return {"model_stats": [_state(request).statistics.report(name, VERSION)]}


_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": {"type": "string", "enum": ["FP32", "FP16", "BF16", "INT32", "INT64"]},
        "parameters": {"type": "object", "description": "For example binary_data_size."},
        "data": {"type": "array", "items": {}, "description": "Numbers, flat or nested like the shape."},
    },
}
_OUTPUT = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
_REQUEST = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string"},
        "parameters": {"type": "object", "description": "The operation's attributes, timeout and others."},
        "inputs": {"type": "array", "items": _TENSOR},
        "outputs": {"type": "array", "items": _OUTPUT},
    },
}
_REPLY = {
    "type": "object",
    "required": ["model_name", "model_version", "outputs"],
    "properties": {
        "id": {"type": "string"},
        "model_name": {"type": "string"},
        "model_version": {"const": VERSION},
        "outputs": {"type": "array", "items": _TENSOR, "minItems": 1},
    },
    "additionalProperties": False,
}
_BYTES = {
    "type": "string",
    "format": "binary",
    "description": "JSON, whose length is in the header Inference-Header-Content-Length, then the tensors' bytes.",
}


def _forms(document: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": document}, "application/octet-stream": {"schema": _BYTES}}


_INFER: dict[str, Any] = {
    "openapi_extra": {"requestBody": {"required": True, "content": _forms(_REQUEST)}},
    "responses": {
        200: {"description": "The outputs, in the form that the request asked for.", "content": _forms(_REPLY)},
        413: {"model": OipError, "description": "The body, or the memory or work of the call, exceeds a limit."},
        415: {"model": OipError, "description": "The content type or coding is not supported."},
        429: {"model": OipError, "description": "The key has reached its limit of calls; see Retry-After."},
        503: {"model": OipError, "description": "The queue or the memory is full, or the service is not ready."},
        504: {"model": OipError, "description": "The deadline passed."},
    },
}


@router.post("/models/{model}/infer", **_INFER)
@router.post("/models/{model}/versions/{version}/infer", **_INFER)
async def infer(request: Request, model: str, version: str | None = None) -> None:
    """Compute an operation: JSON, optionally followed by the bytes of the tensors, in request and reply."""
    await run_inference(exchange_of(request.scope), find_model(model, version), _service(request), _state(request))


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _state(request: Request) -> OipState:
    state: OipState = request.app.state.oip
    return state


def _readiness(request: Request, about: dict[str, Any]) -> Response:
    status = _service(request).status
    if status == "ready":
        return JSONResponse(about | {"ready": True})
    headers = {"retry-after": "1"}
    return JSONResponse(about | {"ready": False, "error": f"the service is {status}"}, 503, headers)
