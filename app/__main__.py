"""Run the service: `convgrad serve`, or `python -m app`, with a flag for each setting."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

from app.interrupts import end_in_one_line

if __name__ == "__main__":
    end_in_one_line()
    gc.disable()  # until the service starts: nearly all that imports make stays alive

# This process does not compute, and NumPy's threads would count against a limit on processes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import uvicorn
from fastapi import FastAPI

from engine.container import check_address_space

try:
    check_address_space()
    import kernels  # noqa: F401 -- selects the target, which a setting may name wrongly
except (MemoryError, OSError, ValueError) as error:  # OSError: no folder for compiled code
    print(error, file=sys.stderr)  # noqa: T201
    sys.exit(2)

from app.api.pages import OpsPort
from app.calls.service import Service
from app.http.protocol import HttpProtocol
from app.http.sockets import BACKLOG, address_of, listen
from app.main import UNFIT, create_app
from app.pool.messages import Unfit
from app.settings import Settings, many_workers, read_settings, unknown_variables
from app.telemetry.logs import configure
from kernels.emit.cache import refused_folder
from kernels.target import IMITATE, NAME, REFERENCE

__all__ = ["Server", "main"]

_log = logging.getLogger("convgrad")

# Longer than the keep-alive of clients and most proxies, so that they close idle connections before we do.
_KEEP_ALIVE_S = 75
# How long clients have to read their replies after a second signal.
_LAST_REPLIES_S = 1
# How long connections that were accepted last have for their first request before the drain ends.
_FIRST_REQUEST_S = 1


class Server(uvicorn.Server):
    """Let running calls finish after the first SIGTERM or SIGINT; exit at once after the second."""

    def __init__(self, config: uvicorn.Config, service: Service, ops: OpsPort | None = None) -> None:
        super().__init__(config)
        self._service = service
        self._sockets: list[socket.socket] = []
        self._ops = ops
        self._task: asyncio.Task[object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._began = time.monotonic()
        self._announced = False
        self.unfit: Unfit | None = None
        self.status = 0
        """The exit status, once the service has started."""
        service.engine.on_change = self._on_engine_change
        service.telemetry.connections.set_function(lambda: len(self.server_state.connections))

    def _on_engine_change(self) -> None:
        """Exit if no worker can compute here, listen when the first is ready, and log when all are."""
        engine = self._service.engine
        ready, wanted = engine.workers
        if engine.launcher.unfit is not None:
            if not self._service.draining:
                # The process restarts: everything in it is built for a target that does not work here.
                self.unfit, self.should_exit = engine.launcher.unfit, True
        elif engine.given_up:
            _log.error("no worker can be started, exiting: %s", engine.failure)
            self.status, self.should_exit = 4, True
        elif ready and not self._announced:
            if self._service.settings.listen_when_ready and self._task is None:
                if not self._take_addresses():
                    self.status, self.should_exit = 3, True
                    return
                self._task = asyncio.ensure_future(self._accept())
            if ready == wanted or engine.failure is not None:  # else the others are still starting
                self._announced = True
                where = "".join(f", at {address_of(each, secure=self.config.is_ssl)}" for each in self._sockets)
                count = f"{ready} workers" if ready == wanted else f"{ready} of {wanted} workers"
                _log.info("ready after %.1f s with %s%s", time.monotonic() - self._began, count, where)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - those of the class
        """Start the service, then listen."""
        self._loop = asyncio.get_running_loop()
        # Objects alive now stay alive: scanning them in every full collection would block the event loop for tens of
        # milliseconds.
        gc.collect()
        gc.freeze()
        gc.enable()
        at_once = not self._service.settings.listen_when_ready
        if at_once and not self._take_addresses():  # before any process is started
            sys.exit(3)
        await super().startup(sockets=[])
        if at_once:
            await self._accept()
        if self._ops is not None:
            self._ops.begin()

    def _take_addresses(self) -> bool:
        settings = self._service.settings
        try:
            self._sockets = listen(settings.host, settings.port, settings.uds)
        except OSError as error:
            _log.error("%s", error)
        return bool(self._sockets)

    async def _accept(self) -> None:
        loop, state, tls = asyncio.get_running_loop(), self.lifespan.state, self.config.ssl
        protocol: Any = self.config.http_protocol_class
        make = partial(protocol, config=self.config, server_state=self.server_state, app_state=state)
        for sock in self._sockets:
            create = loop.create_unix_server if sock.family == socket.AF_UNIX else loop.create_server
            self.servers.append(await create(make, sock=sock, ssl=tls, backlog=BACKLOG))
            _log.info("listening on %s", address_of(sock, secure=self.config.is_ssl))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening and computing; the ops port answers until the end."""
        await super().shutdown(sockets)
        if self._ops is not None:
            await self._ops.end()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Start draining, or stop at once if already draining."""
        if self._loop is None:
            self.should_exit = True
            return
        self._loop.call_soon_threadsafe(self._stop_at_once if self._service.draining else self._begin_drain)
        self._service.draining = True

    def _begin_drain(self) -> None:
        _log.info("draining: %d calls are running", len(self._service.calls))
        # Each reply is now the last of its connection; uvicorn copies the first list to the second once a second.
        for headers in (self.config.encoded_headers, self.server_state.default_headers):
            headers.append((b"connection", b"close"))
        self._task = asyncio.ensure_future(self._drain_then_exit())

    def _stop_at_once(self) -> None:
        if self._task is not None and not self.should_exit:
            _log.info("stopping at once: %d calls fail", len(self._service.calls))
            self._task.cancel()
            self.config.timeout_graceful_shutdown = _LAST_REPLIES_S
            self._service.admitting = False
            self._task = asyncio.ensure_future(self._service.engine.stop())  # the calls are answered with 503
            self.should_exit = True

    async def _drain_then_exit(self) -> None:
        service, settings = self._service, self._service.settings
        try:
            if settings.listen_when_ready:
                # Open connections are served: a proxy that has begun to send a body can't send it elsewhere.
                for server in self.servers:
                    server.close()
                await asyncio.sleep(_FIRST_REQUEST_S)
            else:  # the listener stays open, and answers /readyz and new calls with 503
                service.admitting = False
            await service.drain(settings.drain_s)
        finally:
            self.should_exit = True


def main(arguments: Sequence[str] | None = None, *, prepare: Callable[[FastAPI], None] | None = None) -> int:
    """Serve until a signal; returns the exit status. `prepare` is called with the application before it serves."""
    try:
        settings, dry_run = read_settings(sys.argv[1:] if arguments is None else arguments)
        configure(settings.log_format)
        for warning in (*unknown_variables(os.environ), *many_workers(settings), refused_folder(os.environ)):
            if warning:
                _log.warning("%s", warning)
        app = create_app(settings)
        if prepare is not None:
            prepare(app)
        config = _server_config(settings, app)
        config.load()
        if dry_run:
            for name, value in settings:
                print(f"{name} = {value}")  # noqa: T201
            return 0
        listeners = [] if settings.ops_port is None else listen(settings.ops_host, settings.ops_port)
    except (OSError, ValueError) as error:  # a wrong setting, a port that is taken, a file that can't be used
        tls = f"certificate, key and CAs must be PEM files that belong together: {getattr(error, 'reason', '')}"
        print(tls if isinstance(error, ssl.SSLError) else error, file=sys.stderr)  # noqa: T201
        return 2
    service: Service = app.state.service
    server = Server(config, service, OpsPort(service, listeners) if listeners else None)
    try:
        server.run()
    except RuntimeError as error:
        if "new thread" not in str(error):  # the event loop shuts its thread pool down in a new thread
            raise
    if server.unfit is not None:
        _restart(server.unfit)
    return server.status if server.started else 3


def _restart(unfit: Unfit) -> None:
    """Replace this process by a service for a narrower target; no call has been accepted yet."""
    _log.error(
        "the code for %s does not work on this processor: %s; restarting with %s",
        unfit.target, unfit.reason, unfit.narrower,
    )  # fmt: skip
    if unfit.narrower == REFERENCE.name:
        _log.error(
            "no compiled code works here: NumPy computes small calls, slowly. Check that llvmlite and numba have the"
            " versions that this project requires and that this processor has SSE2, or report the reason above"
        )
    known = os.environ.get(UNFIT, "").splitlines()
    environment = {name: value for name, value in os.environ.items() if name != IMITATE}
    environment |= {NAME: unfit.narrower, UNFIT: "\n".join([*known, f"{unfit.target}: {unfit.reason}"])}
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606 - no shell wanted


def _server_config(settings: Settings, app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop" if sys.platform != "win32" else "asyncio",
        http=HttpProtocol,
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        limit_concurrency=settings.connections + 1,  # uvicorn rejects the one that reaches its limit
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        ssl_ca_certs=None if settings.tls_client_ca is None else str(settings.tls_client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if settings.tls_client_ca is None else ssl.CERT_REQUIRED,
    )


if __name__ == "__main__":
    sys.exit(main())
