"""The application: the service and its APIs as one ASGI app, created from settings."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from importlib.util import find_spec

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from app.api import mcp, rest, web
from app.api import pages as ops_pages
from app.api.jobs import Runner
from app.api.oip import routes as oip
from app.api.oip.request import HEAD_LENGTH
from app.api.routing import Application, Routes
from app.api.rpc import routes as rpc
from app.calls.metrics import ServiceMetrics
from app.calls.service import Service
from app.http.cross_origin import CrossOriginProtection
from app.http.exchange import BodyLimits, Exchanges
from app.http.keys import FREE_PAGES, Authentication, make_key_ring
from app.http.protocol import SLOW_S
from app.pool.buffers import SegmentPool
from app.pool.launcher import fork_server_environment
from app.pool.local import LocalEngine
from app.settings import Settings
from app.telemetry.metrics import Telemetry
from app.telemetry.tracing import Tracing
from convgrad._launch import install_hint
from kernels import gpu

__all__ = ["ROUTERS", "UNFIT", "create_app"]

UNFIT = "CONVGRAD_UNFIT_TARGETS"
"""Targets that don't work on this processor, one a line with the reason: passed on when the process restarts itself."""

ROUTERS = (
    rest.router,
    oip.router,
    rpc.router,
    ops_pages.health,
    ops_pages.router,
    web.router,
)
"""The routes of the application; the first match wins."""


def create_app(settings: Settings | None = None, slow_s: float = SLOW_S) -> FastAPI:
    """Build the application; its service starts and stops with the ASGI lifespan.

    `app.state.service` is the `Service`. Raises `ValueError` when a file that the settings name can't be used.
    """
    settings = settings or Settings()
    named = _name_gpu(settings)
    segments = SegmentPool(settings.memory_budget)
    telemetry = Telemetry(Tracing())
    unfit = tuple(os.environ.get(UNFIT, "").splitlines())
    service = Service(settings, make_engine(settings, segments), segments, telemetry, unfit)
    service.gpu = named
    telemetry.registry.register(ServiceMetrics(service))

    keys, tools = make_key_ring(settings), mcp.ToolServer(service)
    routers = ROUTERS if find_spec("mcp") is None else (*ROUTERS, mcp.router)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.engine.start()
        try:
            async with nullcontext() if service.jobs is None else Runner(service, service.jobs):
                yield
        finally:
            await tools.stop()
            await service.stop()
            await telemetry.tracing.close()

    app = Application(lifespan=lifespan)
    app.state.service = service
    app.state.mcp = tools
    app.state.oip = oip.OipState(shared_memory=settings.oip_shared_memory)
    free = FREE_PAGES | web.PATHS
    if settings.ops_port is not None:
        free -= {"/metrics"}
    checks = [CrossOriginProtection(settings).check]
    if keys is not None:
        checks.append(Authentication(keys, free).check)
    limits = BodyLimits(int(settings.body_limit), settings.deadline_s, slow_s)
    stack = telemetry.tracing.around(Exchanges(Routes(routers), limits, telemetry, checks))
    if settings.cors:
        stack = CORSMiddleware(
            stack,
            allow_origins=list(settings.cors),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[
                *("x-request-id", "x-tensor-dtype", "server-timing", "retry-after", "traceresponse", HEAD_LENGTH),
                *("location", "preference-applied"),
            ],
        )
    app.stack = stack
    return app


def _name_gpu(settings: Settings) -> str | None:
    """Return the GPU that the settings choose, found by a process of its own; raises ValueError if none can be used."""
    if settings.device == "cpu":
        return None
    command = [sys.executable, "-P", "-m", gpu.__name__]
    environment = fork_server_environment(os.environ)
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if found.returncode:
        raise ValueError(f"--device cuda: {(found.stdout or found.stderr).strip().splitlines()[-1]}")
    return found.stdout.strip()


def make_engine(settings: Settings, segments: SegmentPool) -> LocalEngine:
    """Create the engine that the settings name; raises ValueError when its package is not installed."""
    if settings.engine == "local":
        return LocalEngine(segments, workers=settings.worker_count, spare=settings.device == "cpu")
    if find_spec("ray") is None:
        raise ValueError(f"engine ray needs the package ray: {install_hint('ray')}")
    from app.cluster.costs import Costs
    from app.cluster.engine import RayEngine

    return RayEngine(
        segments,
        workers=settings.worker_count,
        address=settings.ray_address,
        join=int(settings.ray_join),
        expected=settings.ray_workers,
        costs=Costs(),
    )
