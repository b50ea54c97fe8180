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
from app.api.oip.infer import OipState
from app.api.oip.infer import infer as run_inference
from app.api.oip.reply import VERSION
from app.api.routing import service_of
from app.http.exchange import exchange_of
from convgrad._errors import UnknownOperation
from schemas.problems import safe_text
from schemas.tables import CalledOperation, find_operation, operation_names

__all__ = ["OipState", "router"]


router = APIRouter(prefix="/v2")


def find_model(name: str, version: str | None = None) -> CalledOperation:
    """Return the operation of a model; raises `UnknownOperation` for an unknown name or version."""
    called = find_operation(name)
    if version not in (None, VERSION):
        shown = f"version {safe_text(version)}"
        raise UnknownOperation(f"the model {called.called_as} has no {shown}: the only one is {VERSION}")
    return called


@router.get("")
@router.get("/")
async def server(request: Request) -> Any:
    """Describe the server and its extensions."""
    return server_metadata(shared_memory=_state(request).regions.enabled)


@router.get("/health/live")
async def live(_: Request) -> Any:
    """Tell whether the server answers."""
    return {"live": True}


@router.get("/health/ready")
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


@router.get("/models/{model}/ready")
@router.get("/models/{model}/versions/{version}/ready")
async def model_ready(request: Request, model: str, version: str | None = None) -> Response:
    """Tell whether a model accepts calls."""
    return _readiness(request, {"name": find_model(model, version).called_as})


@router.get("/models/{model}/config")
@router.get("/models/{model}/versions/{version}/config")
async def config(request: Request, model: str, version: str | None = None) -> Any:
    """Return a model's configuration, which includes its attributes."""
    return model_config(find_model(model, version), service_of(request).settings.worker_count)


@router.get("/models/{model}/stats")
@router.get("/models/{model}/versions/{version}/stats")
async def statistics(request: Request, model: str, version: str | None = None) -> Any:
    """Report the statistics of a model."""
    name = find_model(model, version).called_as
    return {"model_stats": [_state(request).statistics.report(name, VERSION)]}


@router.post("/models/{model}/infer")
@router.post("/models/{model}/versions/{version}/infer")
async def infer(request: Request, model: str, version: str | None = None) -> None:
    """Compute an operation: JSON, optionally followed by the bytes of the tensors, in request and reply."""
    await run_inference(exchange_of(request.scope), find_model(model, version), service_of(request), _state(request))


def _state(request: Request) -> OipState:
    state: OipState = request.app.state.oip
    return state


def _readiness(request: Request, about: dict[str, Any]) -> Response:
    status = service_of(request).status
    if status == "ready":
        return JSONResponse(about | {"ready": True})
    headers = {"retry-after": "1"}
    return JSONResponse(about | {"ready": False, "error": f"the service is {status}"}, 503, headers)
