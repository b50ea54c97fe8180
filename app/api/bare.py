"""Routes that FastAPI documents and does not run: their endpoints reply themselves, piece by piece."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["BareRoute", "BareRoutes"]


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
        self._routes = defaultdict[str, list[BareRoute]](list)  # by the first segment of the path
        for route in routes:
            if isinstance(route, BareRoute):
                self._routes[_first_segment(route.path)].append(route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        for route in self._routes.get(_first_segment(scope["path"]), ()) if scope["type"] == "http" else ():
            match, child_scope = route.matches(scope)
            if match is Match.FULL:
                scope.update(child_scope)
                await route.handle(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _first_segment(path: str) -> str:
    return path[1:].partition("/")[0]
