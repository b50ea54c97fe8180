"""The `/v2` API: the Open Inference Protocol with Triton's extensions, for `tritonclient` and its like.

A model is an operation under one of its names, all of one version. The attributes of a call are the
parameters of its request.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.api.oip import extensions as oip_extensions
from app.api.oip.documents import model_config, model_metadata, server_metadata
from app.api.oip.infer import Inference, OipState
from app.api.oip.reply import VERSION
from app.calls.service import Service
from convgrad._errors import UnknownOperation
from schemas.tables import CalledOperation, find_operation, operation_names

__all__ = ["OipState", "router", "shortcuts"]


class OipError(BaseModel):
    """Say what is wrong, as every page under `/v2` does."""

    error: str


router = APIRouter(
    prefix="/v2",
    tags=["Open Inference Protocol"],
    responses={
        400: {"model": OipError, "description": "The request breaks a rule of the protocol or of the operation."},
        401: {"model": OipError, "description": "No key, or one that is not known, where the service has keys."},
        403: {"model": OipError, "description": "A host name, or a page of an origin, that is not answered."},
        404: {"model": OipError, "description": "There is no such model, version or page."},
    },
)
router.include_router(oip_extensions.router)


def find_model(name: str, version: str | None = None) -> CalledOperation:
    """Return the operation that a model's name calls; raises `UnknownOperation` for any other, or version."""
    called = find_operation(name)
    if version not in (None, VERSION):
        raise UnknownOperation(f"the model {called.called_as} has no such version: its only one is {VERSION}")
    return called


@router.get("")
@router.get("/", include_in_schema=False)
async def server(request: Request) -> Any:
    """Describe the server and its extensions."""
    return server_metadata(shared_memory=_state(request).regions.enabled)


@router.get("/health/live")
async def live() -> Any:
    """Tell whether the server answers."""
    return {"live": True}


_READY: dict[str, Any] = {"responses": {503: {"description": "Kernels compile, or the service drains."}}}


@router.get("/health/ready", **_READY)
async def ready(request: Request) -> Response:
    """Tell whether calls are taken: 503 while kernels compile and while the service drains."""
    return _readiness(request, {"live": True})


@router.get("/models/stats")
async def all_statistics(request: Request) -> Any:
    """Report the counts and times of every model."""
    return {"model_stats": [_state(request).statistics.report(name, VERSION) for name in operation_names()]}


@router.get("/models/{model}")
@router.get("/models/{model}/versions/{version}")
async def metadata(model: str, version: str | None = None) -> Any:
    """Describe a model's inputs and outputs."""
    return model_metadata(find_model(model, version))


@router.get("/models/{model}/ready", **_READY)
@router.get("/models/{model}/versions/{version}/ready", **_READY)
async def model_ready(request: Request, model: str, version: str | None = None) -> Response:
    """Tell whether a model takes calls."""
    return _readiness(request, {"name": find_model(model, version).called_as})


@router.get("/models/{model}/config")
@router.get("/models/{model}/versions/{version}/config")
async def config(request: Request, model: str, version: str | None = None) -> Any:
    """Give a model's configuration, its attributes among it."""
    return model_config(find_model(model, version), _service(request).settings.worker_count)


@router.get("/models/{model}/stats")
@router.get("/models/{model}/versions/{version}/stats")
async def statistics(request: Request, model: str, version: str | None = None) -> Any:
    """Report the counts and times of a model."""
    name = find_model(model, version).called_as
    return {"model_stats": [_state(request).statistics.report(name, VERSION)]}


_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": {"enum": ["FP32", "FP16", "BF16", "INT32", "INT64"]},
        "parameters": {"type": "object", "description": "Such as binary_data_size."},
        "data": {"type": "array", "description": "Numbers, flat or nested like the shape."},
    },
}
_OUTPUT = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
_REQUEST = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string"},
        "parameters": {"type": "object", "description": "The attributes of the operation, timeout and others."},
        "inputs": {"type": "array", "items": _TENSOR},
        "outputs": {"type": "array", "items": _OUTPUT, "maxItems": 1},
    },
}
_REPLY = {
    "type": "object",
    "required": ["model_name", "model_version", "outputs"],
    "properties": {
        "id": {"type": "string"},
        "model_name": {"type": "string"},
        "model_version": {"const": VERSION},
        "outputs": {"type": "array", "items": _TENSOR, "minItems": 1, "maxItems": 1},
    },
    "additionalProperties": False,
}
_BYTES = {
    "type": "string",
    "format": "binary",
    "description": "JSON, as long as the header Inference-Header-Content-Length says, then the tensors' bytes.",
}


def _forms(document: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": document}, "application/octet-stream": {"schema": _BYTES}}


_INFER: dict[str, Any] = {
    "openapi_extra": {"requestBody": {"required": True, "content": _forms(_REQUEST)}},
    "responses": {
        200: {"description": "The output, in the form that the request asked for.", "content": _forms(_REPLY)},
        413: {"model": OipError, "description": "The body, or what the call needs, is over a limit."},
        415: {"model": OipError, "description": "A content type or coding that this page does not read."},
        429: {"model": OipError, "description": "The key has as many calls as it may; see Retry-After."},
        503: {"model": OipError, "description": "The queue or the memory is full, or the service starts or drains."},
        504: {"model": OipError, "description": "The deadline was over."},
    },
}


@router.post("/models/{model}/infer", **_INFER)
@router.post("/models/{model}/versions/{version}/infer", **_INFER)
async def infer(request: Request, model: str, version: str | None = None) -> Response:
    """Compute an operation: JSON, or JSON followed by the bytes of the tensors, and the same in the reply."""
    return Inference(find_model(model, version), _service(request), _state(request))


class _Infer:
    """`infer` as a bare ASGI application."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        model, state = scope["path_params"], scope["app"].state
        called = find_model(model["model"], model.get("version"))
        await Inference(called, state.service, state.oip)(scope, receive, send)


def shortcuts() -> list[Route]:
    """Give the routes of `infer` once more, for the front of an application's routes.

    Finding a FastAPI route among all others and resolving its parameters takes a third of the time that the
    service needs for a small call.
    """
    paths = ("/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer")
    return [Route(path, _Infer(), methods=["POST"], include_in_schema=False) for path in paths]


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
