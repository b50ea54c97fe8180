"""The listener: accept connections, a bounded number at a time, and shed load before it costs anything.

uvicorn accepts every connection, creates a protocol for it and leaves the rejection to the application; in a flood of
requests that is most of the work, and whatever has arrived is kept in memory. This listener accepts a bounded number of
connections in one turn of the event loop. Below the limits each is served at once. Beyond them the first bytes of the
request decide: health and metrics are answered, calls that a full queue would reject get a 503 (`app.http.overload`).
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import resource
import socket
import ssl
import stat
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from app.calls.service import Service
from app.http.overload import HEAD_BYTES, RejectedConnection, RequestStart, rejection
from app.pool.container import give_back
from app.telemetry.context import ANYONE, address_of
from convgrad._errors import Overloaded

__all__ = ["Listener", "bind"]

_log = logging.getLogger("convgrad")

# As many pending connections as the system allows (`net.core.somaxconn`); it resets those beyond.
_BACKLOG = 65535
# Connections accepted in one turn of the event loop: a few milliseconds, then accepted ones get their turn.
_AT_ONCE = 16
# Connections beyond the limit, for health and metrics.
_RESERVED = 32
# Limits on silent connections, on rejected ones, and the share of the descriptors for each. At the limit, the oldest is
# closed for the next, if it is old enough; until then none is accepted.
_WAITING, _LEAVING, _SHARE, _LEAST_AGE_S = 8192, 8192, 4, 2.0
# Idle connections that are closed at a time when the limit is near.
_CLEARED, _CLEAR_S = 32, 0.1
_SWEEP_S = 0.5
_RETRY_AFTER_S = 1
# A new connection counts as a call for this long, until its first request is counted itself.
_FRESH_S = 0.25
# How long the drain waits for the first request of a new connection.
_FIRST_REQUEST_S = 2.0
# After this many rejections, free memory is returned to the system when the flood is over.
_FLOOD = 256


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
    mode = 0o666
    if path.is_socket():
        _check_nobody_listens(path)
        mode = stat.S_IMODE(path.stat().st_mode)
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(mode)
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


class _Waiting:
    """A connection beyond the limits that has sent nothing yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, timeouts: float) -> None:
        self._loop, self.sock = loop, sock
        self.since = time.monotonic()
        self._until = self.since + timeouts

    def is_over(self, now: float) -> bool:
        """Whether its time is up."""
        return now > self._until

    def close(self) -> None:
        """Close it."""
        self._loop.remove_reader(self.sock.fileno())
        self.sock.close()


_Queue = MutableMapping[int, Any]
"""Connections that are a `_Waiting` or a `RejectedConnection`."""


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
        self._coming: dict[int, asyncio.Task[None]] = {}  # not connections of the server yet
        self._fresh: dict[int, float] = {}  # arrival times of connections whose first request is not counted yet
        self._numbers = itertools.count()
        # By descriptor, the oldest first.
        self._waiting: dict[int, _Waiting] = {}
        self._leaving: dict[int, RejectedConnection] = {}
        share = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE
        self._queues: tuple[tuple[_Queue, int], ...] = (
            (self._leaving, min(_LEAVING, share)),
            (self._waiting, min(_WAITING, share)),
        )
        self._refused = 0
        self._draining = False
        self._sweeping: asyncio.TimerHandle | None = None
        self._last_cleared = 0.0
        # Closed for a moment when no descriptor is left, to accept and close a connection that can't be served.
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        service.connections = lambda: self.open

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
        for queue, _ in self._queues:
            for each in queue.values():
                each.close()
            queue.clear()
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None

    async def wait_closed(self) -> None:
        """Wait for the connections that are being set up."""
        await asyncio.gather(*self._coming.values(), return_exceptions=True)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            if any(len(queue) >= most and not self._evict_oldest(queue) for queue, most in self._queues):
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
        if self.open >= self._most or self._full() is not None:
            self._inspect(sock, address)
        else:
            self._serve(sock)
        return True

    def _full(self) -> Overloaded | None:
        if not self._service.admitting:  # the service says that it is shutting down, full or not
            return None
        while self._fresh and (first := next(iter(self._fresh.items())))[1] < time.monotonic() - _FRESH_S:
            del self._fresh[first[0]]
        return self._service.admission.full(len(self._fresh))

    def _inspect(self, sock: socket.socket, address: Any) -> None:
        """Decide by the first bytes, now or when they arrive."""
        if self._tls is not None:
            self._serve(sock) if self.open < self._most else sock.close()
            return
        try:
            data = sock.recv(HEAD_BYTES, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            if sock.fileno() not in self._waiting:
                self._loop.add_reader(sock.fileno(), self._on_first_bytes, sock, address)
                self._waiting[sock.fileno()] = _Waiting(self._loop, sock, self._service.settings.slow_s)
                self._sweep_later()
            return
        except OSError:
            data = b""
        if data:
            self._decide(sock, address, RequestStart(data))
        else:
            self._close(sock)

    def _on_first_bytes(self, sock: socket.socket, address: Any) -> None:
        self._inspect(sock, address)

    def _decide(self, sock: socket.socket, address: Any, head: RequestStart) -> None:
        over = self.open >= self._most
        if head.is_probe and self.open < self._most + _RESERVED:
            self._serve(sock, once=over)
        elif over:
            self._reject(sock, head, _too_many(f"the limit of {self._most} connections is reached", self._most))
        elif head.is_call and not head.is_proxied and (full := self._full()) is not None:
            self._service.admission.note(address_of(address[0]) if isinstance(address, tuple) else ANYONE)
            self._reject(sock, head, full)
        else:
            self._serve(sock)

    def _close(self, sock: socket.socket) -> None:
        self._stop_waiting(sock)
        sock.close()

    def _stop_waiting(self, sock: socket.socket) -> None:
        if self._waiting.pop(sock.fileno(), None) is not None:
            self._loop.remove_reader(sock.fileno())

    def _serve(self, sock: socket.socket, *, once: bool = False) -> None:
        self._stop_waiting(sock)
        number = next(self._numbers)
        self._fresh[number] = time.monotonic()
        self._coming[number] = self._loop.create_task(self._connect(sock, number, once=once))

    async def _connect(self, sock: socket.socket, number: int, *, once: bool) -> None:
        def counted() -> None:
            self._fresh.pop(number, None)

        def make() -> Any:
            protocol = self._make()
            protocol.once, protocol.release_reservation = once or self._draining, counted
            protocol.entered = lambda: self._coming.pop(number, None)
            return protocol

        try:
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(make, sock, ssl=self._tls)
        except (OSError, asyncio.CancelledError):  # the client disconnected, or does not speak TLS
            counted()
            sock.close()
        finally:
            self._coming.pop(number, None)

    def _reject(self, sock: socket.socket, head: RequestStart, error: Overloaded) -> None:
        self._service.telemetry.request_rejected(head.api, error)
        self._refused += 1
        descriptor = sock.fileno()
        each = RejectedConnection(self._loop, sock, lambda: self._leaving.pop(descriptor).close())
        if each.begin(rejection(head, error)):
            self._waiting.pop(descriptor, None)
            self._leaving[descriptor] = each
            self._sweep_later()
        else:
            self._close(sock)

    def _sweep_later(self) -> None:
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """Close connections whose time is up; when none is left, the flood is over."""
        now = time.monotonic()
        for queue, _ in self._queues:
            for descriptor in [key for key, each in queue.items() if each.is_over(now)]:
                queue.pop(descriptor).close()
        waiting = self._waiting or self._leaving
        self._sweeping = self._loop.call_later(_SWEEP_S, self._sweep) if waiting else None
        if self._sweeping is None and self._refused >= _FLOOD:
            self._refused = 0
            give_back()

    def _make_room(self) -> None:
        """Close idle connections: those that were answered and wait for another request."""
        now = time.monotonic()
        if now < self._last_cleared + _CLEAR_S:
            return
        self._last_cleared = now
        idle = [each for each in self._state.connections if each.cycle is not None and each.cycle.response_complete]  # type: ignore[union-attr]
        for each in idle[:_CLEARED]:
            each.shutdown()

    def _evict_oldest(self, queue: _Queue) -> bool:
        """Close the oldest connection of a queue, if it is old enough; one that still waits gets a 503 first."""
        descriptor, oldest = next(iter(queue.items()))
        if oldest.since > time.monotonic() - _LEAST_AGE_S:
            return False
        if queue is self._waiting:
            count = len(queue)
            self._reject(oldest.sock, RequestStart(b""), _too_many(f"{count} connections are waiting", count))
        else:
            queue.pop(descriptor).close()
        return True

    def _no_descriptor(self, listener: socket.socket, error: OSError) -> None:
        """Close the oldest waiting connection, or else the new one, so that none waits forever."""
        _log.warning("a connection can't be accepted: %s", error.strerror)
        for queue, _ in self._queues:
            if queue:
                queue.pop(next(iter(queue))).close()
                return
        os.close(self._spare)
        with suppress(OSError):
            listener.accept()[0].close()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def _too_many(message: str, limit: int) -> Overloaded:
    return Overloaded(message, retry_after=_RETRY_AFTER_S, data={"reason": "connections", "limit": limit})
