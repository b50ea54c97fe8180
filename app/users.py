"""The users of a service that `convgrad.local()` has started: it ends with the last of them.

Each user holds a connection to a Unix socket that the service has inherited, and lends memory over it. A packet is a
JSON object. The service sends `{"pid", "version"}` first. `{"lend": size}`, with the descriptor of an anonymous file,
is answered with `{"region": name}` or `{"error": message}`; `{"forget": name}` is not answered. The kernel closes the
connection of a user that is killed; where a child of that process still has the connection open, its pidfd tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.api.oip.regions import LentRegion, Registry
from app.pool.buffers import LentBlock, SegmentPool
from convgrad import __version__

__all__ = ["Users"]

_log = logging.getLogger("convgrad")

_LARGEST_PACKET = 4096
_RETURN_S = 10.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Users:
    """Accept users, register the memory that they lend, and call `on_last` when the last one has left.

    The listening socket is that of descriptor `listener`. Raises `OSError` when it is none.
    """

    def __init__(self, listener: int, segments: SegmentPool, regions: Registry, on_last: Callable[[], None]) -> None:
        self._listener = socket.socket(fileno=listener)
        self._listener.setblocking(False)
        self._listener.set_inheritable(True)  # the process may restart itself
        self._segments = segments
        self._regions = regions
        self._on_last = on_last
        self._users: set[_User] = set()
        self._names = 0

    def start(self) -> None:
        """Accept users; the first one connected before this process began."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener, self._accept)
        # Unless the process has restarted itself, and nobody came back.
        loop.call_later(_RETURN_S, self._check_last)

    def _accept(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                break
            except OSError as error:
                _log.warning("a user can't connect: %s", error.strerror)
                break
            self._users.add(_User(connection, self))
        self._check_last()

    def left(self, user: _User) -> None:
        """Forget a user."""
        self._users.discard(user)
        asyncio.get_running_loop().call_soon(self._accept)  # one more may be waiting to be accepted

    def lend(self, descriptor: int, size: object) -> str:
        """Register lent memory, which has this descriptor of the caller's; return its name.

        Raises `ValueError` for a file that could shrink under the service.
        """
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        fits = type(size) is int and 0 < size <= os.fstat(descriptor).st_size
        if not (seals & fcntl.F_SEAL_SHRINK and fits):
            raise ValueError("lent memory must be an anonymous file of that size, sealed against shrinking")
        assert isinstance(size, int)
        block = LentBlock(self._segments, os.dup(descriptor), size)
        self._names += 1
        name = f"lent-{self._names}"
        self._regions.lent[name] = LentRegion(name, block)
        return name

    def take_back(self, name: str) -> None:
        """Forget lent memory. Running calls keep using theirs."""
        self._regions.lent.pop(name, None)

    def _check_last(self) -> None:
        if self._users or self._listener.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._listener)
        path = self._listener.getsockname()
        self._listener.close()  # who connects now is told at once, and starts another service
        with contextlib.suppress(OSError):
            Path(path).unlink()
        self._on_last()


class _User:
    """The connection of one process."""

    def __init__(self, connection: socket.socket, users: Users) -> None:
        self._connection = connection
        self._users = users
        self._lent: set[str] = set()
        self._pidfd = -1
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(connection, self._read)
        with contextlib.suppress(OSError):  # it is gone already, or in a pid namespace that we can't see
            self._pidfd = os.pidfd_open(_peer(connection))
            loop.add_reader(self._pidfd, self._leave)
        self._send({"pid": os.getpid(), "version": __version__})

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._connection, _LARGEST_PACKET, 1, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._leave()
            return
        try:
            self._answer(json.loads(data), descriptors)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._send({"error": str(error)})
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _answer(self, packet: dict[str, Any], descriptors: list[int]) -> None:
        if "forget" in packet:
            self._lent.discard(packet["forget"])
            self._users.take_back(packet["forget"])
            return
        if not descriptors:
            raise ValueError("no descriptor arrived with the packet: the service may have too many open files")
        name = self._users.lend(descriptors[0], packet["lend"])
        self._lent.add(name)
        self._send({"region": name})

    def _send(self, packet: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the reader will see the end
            self._connection.send(json.dumps(packet).encode())

    def _leave(self) -> None:
        if self._connection.fileno() < 0:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._connection)
        self._connection.close()
        if self._pidfd >= 0:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        for name in self._lent:
            self._users.take_back(name)
        self._users.left(self)


def _peer(connection: socket.socket) -> int:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(data)[0]
    return pid
