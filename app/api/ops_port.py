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
from app.settings import Settings

__all__ = ["OpsPort", "listen_for_operators"]

_log = logging.getLogger("convgrad")


def listen_for_operators(settings: Settings) -> socket.socket | None:
    """Listen on the ops port; None when the settings name none. Raises `OSError` when it is in use."""
    if settings.ops_port is None:
        return None
    family = socket.AF_INET6 if ":" in settings.ops_host else socket.AF_INET
    return socket.create_server((settings.ops_host, settings.ops_port), family=family)


class OpsPort(uvicorn.Server):
    """Serve health and metrics on a listener, on the event loop of the service."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
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
        self._listener = listener
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start serving."""
        self._serving = asyncio.create_task(self.serve([self._listener]))
        host, port = self._listener.getsockname()[:2]
        _log.info("health and metrics at http://%s:%d", f"[{host}]" if ":" in host else host, port)

    async def stop(self) -> None:
        """Close the listener and its connections."""
        self.should_exit = True
        if self._serving is not None:
            await self._serving

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the main server."""
        yield
