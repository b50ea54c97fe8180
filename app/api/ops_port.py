"""The ops port: health and metrics without keys, separate from the APIs."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from app.api import pages as ops_pages
from app.api.routing import Application, Routes
from app.calls.service import Service
from app.http.exchange import Exchanges, Limits
from app.http.protocol import HttpProtocol
from app.http.sockets import address_of

__all__ = ["OpsPort"]

_log = logging.getLogger("convgrad")


class OpsPort(uvicorn.Server):
    """Serve health and metrics on listeners, on the event loop of the service."""

    def __init__(self, service: Service, listeners: list[socket.socket]) -> None:
        app = Application()
        app.state.service = service
        app.stack = Exchanges(Routes([ops_pages.health]), Limits(0))  # no page reads a body
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
