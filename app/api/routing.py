"""Routing: an endpoint returns its reply, or sends it piece by piece.

FastAPI only collects the routes: its matching, exception handlers and dependency stacks take a fifth of the time of a
small call (`benchmarks.service`, tiny).
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from app.calls.service import Service
from app.replies.coding import accepts
from convgrad._errors import MethodNotAllowed, NotFound

__all__ = ["Application", "Routes", "file_router", "service_of"]

# Limits of the cache of routes: the APIs have some dozens of paths, and other requests must not fill the memory.
_MOST_PATHS = 256
_LONGEST_PATH = 256


class Application(FastAPI):
    """The FastAPI application, which has the lifespan; requests go to the `stack`."""

    stack: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or the lifespan."""
        scope["app"] = self
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
        self._find_usual = lru_cache(_MOST_PATHS)(self._find)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        path = scope["path"]
        find = self._find_usual if len(path) <= _LONGEST_PATH else self._find
        route, child_scope = find(scope["method"], path)
        scope.update(child_scope)
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


def file_router(files: Mapping[str, tuple[Path, str]], policy: str) -> APIRouter:
    """Return routes that send a file with its media type for each path.

    `policy` is their Content-Security-Policy. Browsers ask each time whether a file has changed, so that no page mixes
    the files of two versions; files are compressed for clients that decode gzip.
    """
    router = APIRouter()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "vary": "accept-encoding",
    }

    def add(path: str, file: Path, media_type: str) -> None:
        @router.get(path)
        async def page(request: Request) -> Response:
            gzipped = accepts(request.headers.get("accept-encoding"), "gzip")
            content, tag = await asyncio.to_thread(_sent, file, gzipped)
            sent = {**headers, "etag": tag, **({"content-encoding": "gzip"} if gzipped else {})}
            if tag in re.findall(r'"[^"]*"', request.headers.get("if-none-match", "")):
                return Response(status_code=304, headers=sent)
            return Response(content, media_type=media_type, headers=sent)

    for path, (file, media_type) in files.items():
        add(path, file, media_type)
    return router


def _sent(file: Path, gzipped: bool) -> tuple[bytes, str]:
    """Return the bytes of a file as they are sent, and their entity tag, which the compression changes."""
    return _content(file, gzipped, file.stat().st_mtime_ns)


@lru_cache(128)
def _content(file: Path, gzipped: bool, _changed_ns: int) -> tuple[bytes, str]:
    content = file.read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:32]
    return (gzip.compress(content, mtime=0), f'"{digest}-gzip"') if gzipped else (content, f'"{digest}"')
