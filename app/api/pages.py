"""Pages for operators and tools: health, readiness, metrics and the documents of the APIs."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from app.api.documents import OPENAPI, OPENRPC
from app.api.routing import service_of
from app.calls.service import Service
from app.replies.errors import error_headers
from convgrad import __version__
from kernels.target import target

__all__ = ["health", "not_ready_headers", "router"]

router = APIRouter()
health = APIRouter()
"""Pages that the ops port serves too: health and metrics."""


@health.get("/healthz")
async def healthz(_: Request) -> Any:
    """Tell whether the process is alive."""
    return {"status": "ok", "version": __version__}


@health.get("/readyz")
async def readyz(request: Request) -> Response:
    """Tell whether calls are accepted: 503 while kernels compile, no worker can be started, or the service drains."""
    service = service_of(request)
    ready, wanted = service.engine.workers
    readiness = {
        "status": service.status,
        "progress": round(service.engine.launcher.share, 3),
        "workers": {"ready": ready, "wanted": wanted},
        "cause": service.engine.failure,
        "target": str(target()),
        "unfit": list(service.unfit),
    }
    if readiness["status"] == "ready":
        return JSONResponse(readiness)
    return JSONResponse(readiness, status_code=503, headers=not_ready_headers(service))


def not_ready_headers(service: Service) -> dict[str, str]:
    """Return when to ask again whether the service is ready."""
    return error_headers(service.starting()) if service.status == "starting" else {"retry-after": "1"}


@health.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return metrics in the Prometheus text format or OpenMetrics."""
    service = service_of(request)
    body, content_type = await service.telemetry.page(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type, "cache-control": "no-store"})


# The OpenRPC document describes the JSON-RPC API, the OpenAPI document the others.
router.get("/openrpc.json")(OPENRPC.reply)
router.get("/openapi.json")(OPENAPI.reply)
