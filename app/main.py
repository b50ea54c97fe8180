"""The application: the service and its APIs as one ASGI app, created from settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api import console, rest
from app.api import docs as docs_pages
from app.api import pages as ops_pages
from app.api.bare import BareRoutes
from app.api.oip import routes as oip
from app.api.openapi import install_openapi, operation_id
from app.api.rpc import routes as rpc
from app.calls.service import Service
from app.calls.state import ServiceState
from app.http.authentication import FREE_PAGES, Authentication, make_key_ring
from app.http.cross_origin import CrossOriginProtection
from app.http.exchange import ErrorReplies, Exchanges, Limits
from app.pool.buffers import SegmentPool
from app.pool.engine import Engine
from app.pool.local import LocalEngine
from app.settings import Settings
from app.telemetry.metrics import Telemetry
from app.telemetry.tracing import Tracing
from convgrad import __version__
from convgrad._errors import (
    CallerError,
    ConvgradError,
    InternalError,
    InvalidParams,
    MethodNotAllowed,
    NotFound,
)

__all__ = ["create_app"]

# The calls first: every route is tried in turn.
_ROUTERS = (
    rest.calls,
    oip.calls,
    rpc.router,
    rest.graphs,
    rest.checks,
    rest.router,
    oip.router,
    ops_pages.health,
    ops_pages.router,
    console.router,
    docs_pages.router,
)


def create_app(settings: Settings | None = None) -> FastAPI:
    """Build the application; its service starts and stops with the ASGI lifespan.

    `app.state.service` is the `Service`. Raises `ValueError` when a file that the settings name can't be used.
    """
    settings = settings or Settings()
    segments = SegmentPool(settings.memory_budget)
    telemetry = Telemetry(Tracing(settings.otlp_endpoint))
    service = Service(settings, make_engine(settings, segments), segments, telemetry)
    telemetry.registry.register(ServiceState(service))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()
            if settings.otlp_endpoint is not None:
                await asyncio.to_thread(telemetry.tracing.close)

    app = _Application(
        title="convgrad",
        version=__version__,
        summary="Convolution gradients over HTTP.",
        generate_unique_id_function=operation_id,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from other hosts; `docs_pages` serves its own
        redoc_url=None,
        redirect_slashes=False,  # the redirect would go to whatever host the Host header names
    )
    app.state.service = service
    app.state.oip = oip.OipState(shared_memory=settings.oip_shared_memory)
    for router in _ROUTERS:
        app.include_router(router)
    for kind in (HTTPException, RequestValidationError):  # the middleware handles our own errors
        app.add_exception_handler(kind, _raise_convgrad_error)
    free = FREE_PAGES | docs_pages.PATHS
    if settings.ops_port is not None:
        free -= {"/metrics"}
    app.add_middleware(ErrorReplies)
    install_openapi(app)
    checks = [CrossOriginProtection(settings).check, Authentication(make_key_ring(settings), free).check]
    limits = Limits(int(settings.body_limit), settings.deadline_s, settings.slow_s, int(settings.slow_rate))
    bare = BareRoutes(app.build_middleware_stack(), [route for router in _ROUTERS for route in router.routes])
    stack: ASGIApp = Exchanges(bare, limits, telemetry, checks)
    if settings.cors:
        stack = CORSMiddleware(
            stack,
            allow_origins=list(settings.cors),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-tensor-dtype", "server-timing", "retry-after", "traceresponse"],
        )
    app.stack = stack
    return app


class _Application(FastAPI):
    """FastAPI within our own middleware."""

    stack: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or the lifespan."""
        scope["app"] = self
        await self.stack(scope, receive, send)


def make_engine(settings: Settings, segments: SegmentPool) -> Engine:
    """Create the engine that the settings name; raises ValueError when its package is not installed."""
    if settings.engine == "local":
        return LocalEngine(segments, workers=settings.worker_count)
    if find_spec("ray") is None:
        raise ValueError("engine ray needs the extra [ray]: ray is not installed")
    from app.cluster.costs import Costs
    from app.cluster.engine import RayEngine

    return RayEngine(
        segments,
        workers=settings.worker_count,
        address=settings.ray_address,
        join=int(settings.ray_join),
        expected=settings.ray_workers,
        fallback=settings.ray_away == "fall_back",
        mixed=settings.ray_mixed,
        costs=Costs(),
    )


async def _raise_convgrad_error(request: Request, error: Exception) -> Response:
    """Raise FastAPI's errors as ours; the middleware answers."""
    raise _translate(error, request) from None


def _translate(error: Exception, request: Request) -> ConvgradError:
    match error:
        case RequestValidationError():
            errors = [
                {"loc": list(entry["loc"]), "msg": entry["msg"], "type": entry["type"]} for entry in error.errors()
            ]
            return InvalidParams("the request is not valid for this page", errors=errors)
        case HTTPException(status_code=404):
            return NotFound("there is no such page")
        case HTTPException(status_code=405):
            return MethodNotAllowed("this page does not support that method", data={"allow": _allowed(request)})
        case HTTPException() if error.status_code < 500:
            return CallerError(str(error.detail))
        case _:
            return InternalError("internal error; the service's log has the details under the request id")


def _allowed(request: Request) -> list[str]:
    """List the methods of a page; Starlette reports only those of the first route with its path."""
    routes = [*request.app.routes, *(route for router in _ROUTERS for route in router.routes)]
    matching = [
        route for route in routes if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    ]
    # A name in a path comes before a parameter in its place.
    same = [route for route in matching if route.path == matching[0].path]
    return sorted({method for route in same for method in route.methods or ()})
