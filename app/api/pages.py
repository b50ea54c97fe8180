"""Pages for operators and tools: health, readiness, metrics and the documents of the APIs; the ops port."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from app.api.documents import OPENAPI, OPENRPC
from app.api.routing import Application, Routes, service_of
from app.calls.service import Service
from app.http.exchange import BodyLimits, Exchanges
from app.http.protocol import HttpProtocol
from app.http.sockets import address_of
from app.replies.errors import error_headers
from convgrad import __version__
from kernels.target import target

__all__ = ["OpsPort", "health", "not_ready_headers", "router"]

_log = logging.getLogger("convgrad")

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
    if service.gpu is not None:
        readiness["device"] = service.gpu
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


class OpsPort(uvicorn.Server):
    """Serve health and metrics on listeners, on the event loop of the service."""

    def __init__(self, service: Service, listeners: list[socket.socket]) -> None:
        app = Application()
        app.state.service = service
        app.stack = Exchanges(Routes([health]), BodyLimits(0))  # no page reads a body
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._listeners = listeners
        self._serving: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start serving."""
        self._serving = asyncio.create_task(self.serve(self._listeners))
        for each in self._listeners:
            _log.info("health and metrics at %s", address_of(each, secure=False))

    async def end(self) -> None:
        """Close the listeners and their connections."""
        self.should_exit = True
        if self._serving is not None:
            await self._serving

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the main server."""
        yield
