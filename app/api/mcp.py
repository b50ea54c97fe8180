"""The page of the Model Context Protocol (extra `mcp`), whose package is imported when its first message arrives."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.types import Message

from app.calls.service import Service
from app.http.exchange import exchange_of
from convgrad._errors import TooLarge

__all__ = ["ToolServer", "router"]

router = APIRouter()

# Bytes of a message, which has no tensors.
_LONGEST = 1 << 18


@router.post("/mcp")
async def page(request: Request) -> None:
    """Answer one message."""
    exchange, body = exchange_of(request.scope), bytearray()
    async for chunk in exchange.chunks():
        body += chunk
        if len(body) > _LONGEST:
            message = f"a message may have {_LONGEST} bytes: upload tensors to /v1/tensors"
            raise TooLarge(message, data={"reason": "json", "limit": _LONGEST})
    whole: list[Message] = [{"type": "http.request", "body": bytes(body)}]

    async def receive() -> Message:
        return whole.pop() if whole else await exchange.receive()

    sessions = await request.app.state.mcp.started()
    await sessions.handle_request(request.scope, receive, exchange.send)


class ToolServer:
    """The session manager of the package, which runs from its first message until `stop`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._starting: asyncio.Task[Any] | None = None
        self._running: asyncio.Task[None] | None = None

    async def started(self) -> Any:
        """Return the session manager, ready for requests."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def stop(self) -> None:
        """Stop it, if it has been started."""
        for task in filter(None, (self._starting, self._running)):
            task.cancel()
            await asyncio.wait([task])

    async def _start(self) -> Any:
        made, entered = await asyncio.to_thread(_imported, self._service), asyncio.Event()
        self._running = asyncio.create_task(self._run(made, entered))
        await entered.wait()
        return made

    async def _run(self, made: Any, entered: asyncio.Event) -> None:
        async with made.run():
            entered.set()
            await asyncio.Event().wait()


def _imported(service: Service) -> Any:
    from app.api.tools import session_manager  # half a second, and 23 MiB

    return session_manager(service)
