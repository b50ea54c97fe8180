"""Routes that FastAPI documents and does not run: their endpoints reply themselves, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["BareRoute", "BareRoutes"]


# Limits of the cache of routes: the APIs have some dozens of paths, and other requests must not fill the memory.
_MOST_PATHS = 256
_LONGEST_PATH = 256


class BareRoute(APIRoute):
    """Call the endpoint with the request and the parameters of its path, which it validates itself."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; the base class answers those with another method."""
        if scope["method"] in (self.methods or ()):
            await self.endpoint(Request(scope, receive, send), **scope["path_params"])
        else:
            await super().handle(scope, receive, send)


class BareRoutes:
    """Match bare routes before all others.

    FastAPI's matching, its handlers of exceptions and its stacks of dependencies take a fifth of the time of a small
    call (`benchmarks.service`, tiny).
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        bare = [route for route in routes if isinstance(route, BareRoute)]

        @lru_cache(_MOST_PATHS)
        def find(method: str, path: str, root: str) -> tuple[BareRoute, Scope] | None:
            scope = {"type": "http", "method": method, "path": path, "root_path": root}
            for route in bare:
                match, child_scope = route.matches(scope)
                if match is Match.FULL:
                    return route, child_scope
            return None

        self._find = find

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        match = None
        if scope["type"] == "http" and len(scope["path"]) <= _LONGEST_PATH:
            match = self._find(scope["method"], scope["path"], scope.get("root_path", ""))
        if match is None:
            await self._app(scope, receive, send)
        else:
            route, child_scope = match
            scope.update(child_scope)
            await route.handle(scope, receive, send)
