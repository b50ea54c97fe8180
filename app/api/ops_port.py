"""The ops port: health and metrics without keys, separate from the APIs."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from app.api import pages as ops_pages
from app.api.routing import Application, Routes
from app.calls.service import Service
from app.http.exchange import Exchanges, Limits
from app.http.protocol import HttpProtocol, http_protocol
from app.settings import Settings

__all__ = ["OpsPort", "listen_for_operators"]

_log = logging.getLogger("convgrad")

_MOST_CONNECTIONS = 64


def listen_for_operators(settings: Settings) -> socket.socket | None:
    """Listen on the ops port; None when the settings name none. Raises `OSError` when it is in use."""
    if settings.ops_port is None:
        return None
    family = socket.AF_INET6 if ":" in settings.ops_host else socket.AF_INET
    return socket.create_server((settings.ops_host, settings.ops_port), family=family)


class OpsPort:
    """Serve health and metrics on a listener, on the event loop of the service."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        app = Application()
        app.state.service = service
        slow_s, slow_rate = service.settings.slow_s, int(service.settings.slow_rate)
        limits = Limits(0, slow_s=slow_s, slow_rate=slow_rate)  # no page reads a body
        app.stack = Exchanges(Routes([ops_pages.health]), limits)
        config = uvicorn.Config(
            app,
            http=http_protocol(slow_s, slow_rate, _OpsProtocol),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._listener = listener
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start serving."""
        self._serving = asyncio.create_task(self._server.serve([self._listener]))
        host, port = self._listener.getsockname()[:2]
        _log.info("health and metrics at http://%s:%d", f"[{host}]" if ":" in host else host, port)

    async def stop(self) -> None:
        """Close the listener and its connections."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving


class _OpsProtocol(HttpProtocol):
    """At the limit, close the oldest idle connection, or else the oldest, for a new one: probes always get in."""

    _since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in the base class
        """Make room for this connection."""
        self._since = self.loop.time()
        super().connection_made(transport)
        if len(self.connections) > _MOST_CONNECTIONS:
            others: list[Any] = [each for each in self.connections if each is not self]
            oldest = min(others, key=lambda each: (each.is_busy, each._since))
            oldest.transport.abort()

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the main server."""
        yield
