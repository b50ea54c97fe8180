"""Run the service for the users of `convgrad.local()`: `python -m app.local DESCRIPTOR`.

The descriptor is that of a listening Unix socket. Each user holds a connection to it, and the process ends at once when
the last one has closed; nobody is left to read a reply, and workers end with the process. The kernel closes the
connection of a user that is killed; where a child of that process still has it open, a pidfd tells.

A packet is a JSON object. The service sends `{"pid"}` first. A user lends memory with `{"lend": size}` and the
descriptor of an anonymous file, answered with `{"region": name}` or `{"error": message}`; `{"forget": name}` takes it
back without an answer.

A thread of its own watches the users from the first moment, while the service is imported too, which takes seconds. So
this module imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import selectors
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI

    from app.api.oip.regions import Registry
    from app.pool.buffers import SegmentPool

__all__ = ["Users", "main"]

_LARGEST_PACKET = 4096
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
# How long users have to return when the process has restarted itself.
_RETURN_S = 10.0


class Users:
    """Watch the users that connect to `listener`, and register the memory that they lend.

    `on_last` is called, in the thread that watches, when the last one has left; the socket is closed then.
    """

    def __init__(self, listener: socket.socket, on_last: Callable[[], None]) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._on_last = on_last
        self._selector = selectors.DefaultSelector()
        self._users: set[_User] = set()
        self._service: tuple[SegmentPool, Registry] | None = None
        self._numbers = itertools.count(1)

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._watch, name="users", daemon=True).start()

    def attach(self, segments: SegmentPool, regions: Registry) -> None:
        """Give lent memory to the service, as regions."""
        self._service = segments, regions

    def _watch(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        timeout: float | None = _RETURN_S
        while True:
            ready = self._selector.select(timeout)
            for key, _ in ready:
                key.data()
            if not self._users:
                self._accept()  # one who has connected meanwhile
            if not self._users:
                break
            timeout = None
        path = self._listener.getsockname()
        self._listener.close()  # who connects now is told at once, and starts another service
        self._selector.close()
        with contextlib.suppress(OSError):
            Path(path).unlink()
        self._on_last()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # no connection waits, or no descriptor is left
            connection, _ = self._listener.accept()
            self._users.add(_User(connection, self, self._selector))

    def lend(self, descriptor: int, size: object) -> str:
        """Register lent memory, which has this descriptor of the caller's; return its name.

        Raises `ValueError` for a file that could shrink under the service.
        """
        if self._service is None:
            raise ValueError("the service is starting")
        from app.api.oip.regions import LentRegion
        from app.pool.buffers import LentBlock

        segments, regions = self._service
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if type(size) is int and seals & fcntl.F_SEAL_SHRINK and 0 < size <= os.fstat(descriptor).st_size:
            name = f"lent-{next(self._numbers)}"
            regions.lent[name] = LentRegion(name, LentBlock(segments, os.dup(descriptor), size))
            return name
        raise ValueError("lent memory must be an anonymous file of that size, sealed against shrinking")

    def forget(self, name: str) -> None:
        """Forget lent memory."""
        if self._service is not None:
            self._service[1].lent.pop(name, None)  # running calls keep using theirs

    def left(self, user: _User) -> None:
        """Forget a user."""
        self._users.discard(user)


class _User:
    """The connection of one process."""

    def __init__(self, connection: socket.socket, users: Users, selector: selectors.BaseSelector) -> None:
        self._connection = connection
        self._users = users
        self._selector = selector
        self._lent: set[str] = set()
        self._pidfd = -1
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, self._read)
        with contextlib.suppress(OSError):  # it is gone already, or in a pid namespace that we can't see
            self._pidfd = os.pidfd_open(_peer(connection))
            selector.register(self._pidfd, selectors.EVENT_READ, self._leave)
        self._send({"pid": os.getpid()})

    def _read(self) -> None:
        if self._connection.fileno() < 0:
            return
        try:
            flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            data, descriptors, _, _ = socket.recv_fds(self._connection, _LARGEST_PACKET, 1, flags)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._leave()
            return
        try:
            answer = self._answer(json.loads(data), descriptors)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            answer = {"error": str(error)}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if answer is not None:
            self._send(answer)

    def _answer(self, packet: dict[str, Any], descriptors: list[int]) -> dict[str, str] | None:
        if "forget" in packet:
            self._lent.discard(packet["forget"])
            self._users.forget(packet["forget"])
            return None
        if not descriptors:
            raise ValueError("no descriptor arrived with the packet: the service may have too many open files")
        name = self._users.lend(descriptors[0], packet["lend"])
        self._lent.add(name)
        return {"region": name}

    def _send(self, packet: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # reading will show that it has left
            self._connection.send(json.dumps(packet).encode())

    def _leave(self) -> None:
        if self._connection.fileno() < 0:
            return
        self._selector.unregister(self._connection)
        self._connection.close()
        if self._pidfd >= 0:
            self._selector.unregister(self._pidfd)
            os.close(self._pidfd)
        for name in self._lent:
            self._users.forget(name)
        self._users.left(self)


def _peer(connection: socket.socket) -> int:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(data)[0]
    return pid


def _end() -> None:
    """End the process and those that it has started at once; their memory has no names."""
    with contextlib.suppress(OSError, KeyError):
        Path(os.environ["CONVGRAD_UDS"]).unlink()
    # They would notice by themselves, but not in the middle of compiling.
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):  # gone meanwhile, or a container hides /proc
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_descendants(child)]
    return found


def main() -> int:
    """Serve until the last user has left; returns the exit status if the service ends before."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.set_inheritable(True)  # the process may restart itself
    users = Users(listener, _end)
    users.start()

    # Late, because it takes seconds.
    import logging

    from app.__main__ import main as serve

    def attach(app: FastAPI) -> None:
        users.attach(app.state.service.segments, app.state.oip.regions)
        logging.getLogger("convgrad.request").setLevel(logging.WARNING)  # the log is never rotated

    return serve([], prepare=attach)


if __name__ == "__main__":
    sys.exit(main())
