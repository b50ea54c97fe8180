"""Pages for operators and tools: health, readiness, metrics and the OpenRPC document."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from app.calls.service import Service
from convgrad import __version__
from kernels.target import target
from schemas.openrpc import openrpc_document

__all__ = ["health", "router"]

router = APIRouter(tags=["operations of the service"])
health = APIRouter(tags=["operations of the service"])
"""Pages that the operators' port serves too: health and metrics."""


class Health(BaseModel):
    """The reply of /healthz."""

    status: str
    version: str


class Workers(BaseModel):
    """How many worker processes are ready, and how many are configured."""

    ready: int
    wanted: int


class Readiness(BaseModel):
    """Whether calls are accepted now.

    `status` is `ready` while at least one worker is, otherwise `starting`, `failed` or `draining`. `cause` says why
    workers are missing, even if only some are. `progress` is the share of the kernels that are compiled, `target` the
    processor that they are compiled for, and `unfit` lists wider targets whose code does not work on this processor,
    with the reasons.
    """

    status: str
    progress: float
    workers: Workers
    cause: str | None
    target: str
    unfit: list[str]


@health.get("/healthz", response_model=Health)
async def healthz(_: Request) -> Any:
    """Tell whether the process is alive."""
    return {"status": "ok", "version": __version__}


@health.get(
    "/readyz",
    response_model=Readiness,
    responses={503: {"model": Readiness, "description": "Starting, failed or draining."}},
)
async def readyz(request: Request) -> Response:
    """Tell whether calls are accepted: 503 while kernels compile, no worker can be started, or the service drains."""
    service: Service = request.app.state.service
    ready, wanted = service.engine.workers
    readiness = Readiness(
        status=service.status,
        progress=round(service.engine.progress(), 3),
        workers=Workers(ready=ready, wanted=wanted),
        cause=service.engine.failure,
        target=str(target()),
        unfit=list(service.unfit),
    )
    if readiness.status == "ready":
        return JSONResponse(readiness.model_dump())
    return JSONResponse(readiness.model_dump(), status_code=503, headers={"retry-after": "1"})


@health.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {"description": "The metrics, as text.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    },
)
async def metrics(request: Request) -> Response:
    """Return metrics in the Prometheus text format or OpenMetrics."""
    service: Service = request.app.state.service
    body, content_type = service.telemetry.page(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type, "cache-control": "no-store"})


@router.get("/openrpc.json")
async def openrpc(_: Request) -> dict[str, Any]:
    """Describe the JSON-RPC API as an OpenRPC document."""
    return openrpc_document()


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Any:
    """Describe the other APIs as an OpenAPI document."""
    return request.app.openapi()


for _path, _page in (("/healthz", healthz), ("/readyz", readyz)):
    health.add_api_route(_path, _page, methods=["HEAD"], include_in_schema=False, response_model=None)
