"""What happens to connections beyond the limits: the first bytes of a request decide.

Health and metrics are served. Calls that a full queue would reject, and connections beyond the limit of connections,
get a 503 (`app.http.overload`).
"""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

from app.calls.service import Service
from app.http.overload import HEAD_BYTES, RejectedConnection, RequestStart, rejection
from app.telemetry.context import ANYONE, address_of
from convgrad._errors import Overloaded
from engine.container import give_back

__all__ = ["LoadShedder"]

# Connections beyond the limit, for health and metrics.
_RESERVED = 32
# Limit on silent connections, and on rejected ones: this many, or this share of the descriptors. At the limit, the
# oldest is closed for the next, if it is old enough; until then none is accepted.
_MOST, _SHARE, _LEAST_AGE_S = 8192, 4, 2.0
_SWEEP_S = 0.5
_RETRY_AFTER_S = 1
# After this many rejections, free memory is returned to the system when the flood is over.
_FLOOD = 256


class LoadShedder:
    """Serve or reject connections beyond the limits.

    `serve` takes a connection over, to be closed after one request if `once`; `open_connections` returns how many are
    open, and `full` the error that a call would get now.
    """

    def __init__(
        self,
        service: Service,
        serve: Callable[..., None],
        open_connections: Callable[[], int],
        full: Callable[[], Overloaded | None],
    ) -> None:
        self._service, self._serve, self._open, self._full = service, serve, open_connections, full
        self._most = service.settings.connections
        self._loop = asyncio.get_running_loop()
        # By descriptor, the oldest first.
        self._silent: dict[int, _SilentConnection] = {}
        self._rejected: dict[int, RejectedConnection] = {}
        self._limit = min(_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE)
        self._rejections = 0
        self._sweeping: asyncio.TimerHandle | None = None

    def has_room(self) -> bool:
        """Whether another connection can be inspected; closes the oldest one for it if that is old enough."""
        oldest = time.monotonic() - _LEAST_AGE_S
        if len(self._rejected) >= self._limit:
            descriptor, rejected = next(iter(self._rejected.items()))
            if rejected.since > oldest:
                return False
            self._rejected.pop(descriptor).close()
        if (count := len(self._silent)) >= self._limit:
            silent = next(iter(self._silent.values()))
            if silent.since > oldest:
                return False
            self._reject(silent.sock, RequestStart(b""), _too_many(f"{count} connections are waiting", count))
        return True

    def close_one(self) -> bool:
        """Close the oldest connection, such as when no descriptor is left; return whether there was one."""
        queue: dict[int, Any] = self._rejected or self._silent
        if queue:
            queue.pop(next(iter(queue))).close()
            return True
        return False

    def close(self) -> None:
        """Close all connections."""
        while self.close_one():
            pass
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None

    def inspect(self, sock: socket.socket, address: Any) -> None:
        """Decide by the first bytes, now or when they arrive."""
        try:
            data = sock.recv(HEAD_BYTES, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            if sock.fileno() not in self._silent:
                self._loop.add_reader(sock.fileno(), self.inspect, sock, address)
                self._silent[sock.fileno()] = _SilentConnection(self._loop, sock, self._service.settings.slow_s)
                self._sweep_later()
            return
        except OSError:
            data = b""
        if data:
            self._decide(sock, address, RequestStart(data))
        else:
            self._no_longer_silent(sock)
            sock.close()

    def _decide(self, sock: socket.socket, address: Any, head: RequestStart) -> None:
        beyond = self._open() - self._most
        if beyond >= 0 and not (head.is_probe and beyond < _RESERVED):
            self._reject(sock, head, _too_many(f"the limit of {self._most} connections is reached", self._most))
        elif head.is_call and not head.is_proxied and (full := self._full()) is not None:
            self._service.admission.note(address_of(address[0]) if isinstance(address, tuple) else ANYONE)
            self._reject(sock, head, full)
        else:
            self._no_longer_silent(sock)
            self._serve(sock, once=beyond >= 0)

    def _no_longer_silent(self, sock: socket.socket) -> None:
        if self._silent.pop(sock.fileno(), None) is not None:
            self._loop.remove_reader(sock.fileno())

    def _reject(self, sock: socket.socket, head: RequestStart, error: Overloaded) -> None:
        self._service.telemetry.request_rejected(head.api, error)
        self._rejections += 1
        self._no_longer_silent(sock)
        descriptor = sock.fileno()
        connection = RejectedConnection(self._loop, sock, lambda: self._rejected.pop(descriptor).close())
        if connection.begin(rejection(head, error)):
            self._rejected[descriptor] = connection
            self._sweep_later()
        else:
            sock.close()

    def _sweep_later(self) -> None:
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """Close connections whose time is up; when none is left, the flood is over."""
        self._sweeping, now = None, time.monotonic()
        queues: tuple[dict[int, Any], ...] = self._rejected, self._silent
        for queue in queues:
            for descriptor in [key for key, connection in queue.items() if connection.is_over(now)]:
                queue.pop(descriptor).close()
        if any(queues):
            self._sweep_later()
        elif self._rejections >= _FLOOD:
            self._rejections = 0
            give_back()


class _SilentConnection:
    """A connection beyond the limits that has sent nothing yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, timeout: float) -> None:
        self._loop, self.sock = loop, sock
        self.since = time.monotonic()
        self._until = self.since + timeout

    def is_over(self, now: float) -> bool:
        """Whether its time is up."""
        return now > self._until

    def close(self) -> None:
        """Close it."""
        self._loop.remove_reader(self.sock.fileno())
        self.sock.close()


def _too_many(message: str, limit: int) -> Overloaded:
    return Overloaded(message, retry_after=_RETRY_AFTER_S, data={"reason": "connections", "limit": limit})
