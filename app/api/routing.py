"""Routing: an endpoint returns its reply, or sends it piece by piece.

FastAPI only collects the routes: its matching, exception handlers and dependency stacks take a fifth of the time of a
small call (`benchmarks.service`, tiny).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from app.caching import cached_if_short
from app.calls.service import Service
from convgrad._errors import MethodNotAllowed, NotFound

__all__ = ["Application", "Routes", "service_of"]


class Application(FastAPI):
    """The FastAPI application, which has the lifespan; requests go to the `stack`."""

    stack: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or the lifespan."""
        scope["app"] = self
        with suppress(asyncio.CancelledError):  # uvicorn would log the traceback of each request that it cancels
            await (self.stack if scope["type"] == "http" else self.router)(scope, receive, send)


def service_of(request: Request) -> Service:
    """Return the service of the application that a request has reached."""
    service: Service = request.app.state.service
    return service


class Routes:
    """Call the endpoint of a route with the request and its path parameters, which the endpoint validates.

    The endpoint returns a response or a JSON value, or None if it has already replied. Raises `NotFound`,
    `MethodNotAllowed` and the endpoint's exceptions.
    """

    def __init__(self, routers: Sequence[APIRouter]) -> None:
        self._routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
        self._find_usual = cached_if_short(self._find)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        route, child_scope = self._find_usual(scope["method"], scope["path"])
        scope.update(child_scope, path_params=dict(child_scope["path_params"]))  # the cache keeps the original
        reply = await route.endpoint(Request(scope, receive, send), **scope["path_params"])
        if reply is not None:
            await (reply if isinstance(reply, Response) else JSONResponse(reply))(scope, receive, send)

    def _find(self, method: str, path: str) -> tuple[APIRoute, Scope]:
        # Of a reply to HEAD the server sends the head only.
        scope = {"type": "http", "method": "GET" if method == "HEAD" else method, "path": path}
        others = []
        for route in self._routes:
            match, child_scope = route.matches(scope)
            if match is Match.FULL:
                return route, child_scope
            if match is Match.PARTIAL:
                others.append(route)
        if not others:
            raise NotFound("there is no such page")
        # A literal part of a path takes precedence over a parameter.
        allowed = {method for route in others if route.path == others[0].path for method in route.methods or ()}
        if "GET" in allowed:
            allowed.add("HEAD")
        raise MethodNotAllowed("this page does not support that method", data={"allow": sorted(allowed)})
