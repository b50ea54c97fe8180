"""The listener: accept connections, a bounded number at a time.

uvicorn accepts every connection, creates a protocol for it and leaves the rejection to the application; in a flood of
requests that is most of the work, and whatever has arrived is kept in memory. This listener accepts a bounded number of
connections in one turn of the event loop. Below the limits each is served at once; those beyond them go to the
`LoadShedder`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from app.calls.service import Service
from app.http.shedding import LoadShedder
from convgrad._errors import Overloaded

__all__ = ["Listener", "bind"]

_log = logging.getLogger("convgrad")

# As many pending connections as the system allows (`net.core.somaxconn`); it resets those beyond.
_BACKLOG = 65535
# Owner and group may connect, as far as the umask lets them.
_SOCKET_MODE = 0o660
# Connections accepted in one turn of the event loop: a few milliseconds, then accepted ones get their turn.
_AT_ONCE = 16
# Idle connections that are closed at a time when the limit is near.
_CLEARED, _CLEAR_S = 32, 0.1
# A new connection counts as a call for this long, until its first request is counted itself.
_FRESH_S = 0.25
# How long the drain waits for the first request of a new connection.
_FIRST_REQUEST_S = 2.0


async def bind(config: uvicorn.Config, *, listening: bool) -> list[socket.socket]:
    """Bind the addresses or the path that `config` names; raises `OSError` if one can't be bound.

    Connections wait, or with `listening` false are refused, until `Listener.start`.
    """
    listeners = [_bind_path(Path(config.uds))] if config.uds is not None else await _bind_addresses(config)
    if listening:
        for listener in listeners:
            listener.listen(_BACKLOG)
    return listeners


async def _bind_addresses(config: uvicorn.Config) -> list[socket.socket]:
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(config.host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(infos):
            listeners.append(listener := socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address[:2])
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise OSError(error.errno, f"{error.strerror}: {config.host}, {config.port}") from None
    return listeners


def _bind_path(path: Path) -> socket.socket:
    if path.is_socket():
        _check_nobody_listens(path)
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Linux creates the file with the mode of the socket, less the umask: nobody else can open it, not for a moment.
        os.fchmod(listener.fileno(), _SOCKET_MODE)
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    return listener


def _check_nobody_listens(path: Path) -> None:
    """Raise `OSError` unless the socket was left behind by a process that has exited."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)  # a full backlog is an answer too
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return
        except BlockingIOError:
            pass
    raise OSError(errno.EADDRINUSE, f"another process listens on the Unix socket {path}: stop it, or set another uds")


class Listener:
    """Accept connections on bound sockets until closed; uvicorn uses it in place of the event loop's server."""

    def __init__(
        self,
        service: Service,
        listeners: Sequence[socket.socket],
        make: Callable[[], Any],
        state: ServerState,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.sockets = tuple(listeners)
        self._service, self._make, self._state, self._tls = service, make, state, tls
        self._most = service.settings.connections
        self._loop = asyncio.get_running_loop()
        self._coming: set[asyncio.Task[None]] = set()  # they make connections of the server
        self._fresh: dict[socket.socket, float] = {}  # arrival times of those whose first request is not counted yet
        self._shedder = LoadShedder(service, self._serve, lambda: self.open, self._full)
        self._draining = False
        self._last_cleared = 0.0
        # Closed for a moment when no descriptor is left, to accept and close a connection that can't be served.
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        service.telemetry.connections.set_function(lambda: self.open)

    @property
    def open(self) -> int:
        """The number of open connections."""
        return len(self._state.connections) + len(self._coming)

    def start(self) -> None:
        """Start accepting; raises `OSError` when another process listens on an address."""
        for listener in self.sockets:
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def drain(self) -> None:
        """Close each connection after its next reply, or the one that is being made."""
        self._draining = True
        for connection in self._state.connections:
            connection.once = True  # type: ignore[union-attr] # of our own class
            if connection.cycle is not None and not connection.cycle.response_complete:  # type: ignore[union-attr]
                connection.shutdown()

    def stop_accepting(self) -> None:
        """Refuse new connections; those that the kernel has accepted already are served."""
        for listener in self.sockets:
            if listener.fileno() >= 0:
                self._loop.remove_reader(listener.fileno())
                # Closing it resets connections that were not accepted, with whatever their clients have sent.
                with suppress(OSError):
                    while self._accept_one(listener):
                        pass
                listener.close()

    async def wait_for_first_requests(self) -> None:
        """Wait, for two seconds at most, until each new connection has sent its first request or is closed."""
        until = time.monotonic() + _FIRST_REQUEST_S
        while (self._fresh or self._coming) and time.monotonic() < until:  # noqa: ASYNC110 - once, and soon over
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """Stop accepting, and close the connections that wait."""
        for listener in self.sockets:
            if listener.fileno() >= 0:
                self._loop.remove_reader(listener.fileno())
                listener.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        self._shedder.close()

    async def wait_closed(self) -> None:
        """Wait for the connections that are being set up."""
        await asyncio.gather(*self._coming, return_exceptions=True)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            if not self._shedder.has_room():
                return
            try:
                if not self._accept_one(listener):
                    return
            except OSError as error:
                self._no_descriptor(listener, error)
                return

    def _accept_one(self, listener: socket.socket) -> bool:
        """Accept a connection; return whether there was one."""
        try:
            sock, address = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        sock.setblocking(False)
        if self.open >= self._most - min(_CLEARED, self._most // 8):
            self._make_room()
        has_room = self.open < self._most
        if has_room and (self._tls is not None or self._full() is None):
            self._serve(sock)
        elif self._tls is None:
            self._shedder.inspect(sock, address)
        else:
            sock.close()
        return True

    def _full(self) -> Overloaded | None:
        if not self._service.admitting:  # the service says that it is shutting down, full or not
            return None
        while self._fresh and (first := next(iter(self._fresh.items())))[1] < time.monotonic() - _FRESH_S:
            del self._fresh[first[0]]
        return self._service.admission.full(len(self._fresh))

    def _serve(self, sock: socket.socket, *, once: bool = False) -> None:
        self._fresh[sock] = time.monotonic()
        task = self._loop.create_task(self._connect(sock, once=once))
        self._coming.add(task)
        task.add_done_callback(self._coming.discard)

    async def _connect(self, sock: socket.socket, *, once: bool) -> None:
        counted, entered = partial(self._fresh.pop, sock, None), partial(self._coming.discard, asyncio.current_task())

        def make() -> Any:
            protocol = self._make()
            protocol.once, protocol.release_reservation = once or self._draining, counted
            protocol.entered = entered
            return protocol

        try:
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(make, sock, ssl=self._tls)
        except (OSError, asyncio.CancelledError):  # the client disconnected, or does not speak TLS
            counted()
            sock.close()

    def _make_room(self) -> None:
        """Close idle connections: those that were answered and wait for another request."""
        now = time.monotonic()
        if now < self._last_cleared + _CLEAR_S:
            return
        self._last_cleared = now
        idle = [http for http in self._state.connections if http.cycle is not None and http.cycle.response_complete]  # type: ignore[union-attr]
        for http in idle[:_CLEARED]:
            http.shutdown()

    def _no_descriptor(self, listener: socket.socket, error: OSError) -> None:
        """Close the oldest waiting connection, or else the new one, so that none waits forever."""
        _log.warning("a connection can't be accepted: %s", error.strerror)
        if self._shedder.close_one():
            return
        os.close(self._spare)
        with suppress(OSError):
            listener.accept()[0].close()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
