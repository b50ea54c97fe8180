"""Routing, without a server."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.types import Scope

from app.api.routing import Routes


def test_the_parameters_of_a_path_belong_to_one_request() -> None:
    """What a page does to the parameters of its path does not reach the next request for the same path."""
    router, found = APIRouter(), list[dict[str, Any]]()

    @router.get("/things/{name}")
    async def page(request: Request, name: str) -> None:
        found.append(dict(request.path_params))
        request.path_params.clear()
        request.path_params["other"] = name

    routes = Routes([router])
    for _ in range(2):
        scope: Scope = {"type": "http", "method": "GET", "path": "/things/a"}
        asyncio.run(routes(scope, asyncio.Event().wait, asyncio.Event().wait))  # type: ignore[arg-type]
    assert found == [{"name": "a"}] * 2
