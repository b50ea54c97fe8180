"""Tensors in memory that is shared with a local service: written once by the client, read in place by the service.

The memory is anonymous: its descriptor travels over the connection that a user holds to the service, so nothing is left
in /dev/shm, however either of them ends. Blocks are reused, because fresh pages cost more than the copy.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import sys
import threading
import weakref
from collections import deque
from typing import Any

from convgrad._tensors import PIECE, Bytes, Part

if sys.platform != "win32":  # the client itself works there too
    import fcntl

__all__ = ["Connection", "Gone", "Loan", "SharedMemory"]

_LARGEST_PACKET = 4096
# Idle blocks that are kept: for some layers of a network in turn.
_MOST_IDLE, _MOST_IDLE_BYTES = 32, 1 << 30


class Gone(Exception):  # noqa: N818 - becomes an error of the tree where the service is known
    """The service has closed the connection."""


class Connection:
    """The connection that makes this process a user of a local service; thread-safe.

    Raises `Gone` when the service has ended, `OSError` when it refuses.
    """

    def __init__(self, path: str, timeout: float | None = None) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise

    def hello(self, timeout: float) -> dict[str, Any]:
        """Wait for the service's first packet: its `pid`. Raises `TimeoutError`."""
        self._socket.settimeout(timeout)
        found = self._receive()
        self._socket.settimeout(None)
        return found

    def lend(self, descriptor: int, size: int) -> str:
        """Lend an anonymous file to the service; return the name of its region."""
        with self._lock:
            try:
                socket.send_fds(self._socket, [json.dumps({"lend": size}).encode()], [descriptor])
            except (BrokenPipeError, ConnectionError):
                raise Gone from None
            found = self._receive()
        if "region" not in found:
            raise OSError(f"the local service does not take shared memory: {found.get('error')}")
        return str(found["region"])

    def forget(self, name: str) -> None:
        """Let the service forget lent memory."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps({"forget": name}).encode())

    @property
    def ended(self) -> bool:
        """Whether the service has closed the connection."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """End the connection, also where a forked child still has it; in the child itself, only there."""
        if self._socket.fileno() >= 0 and os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive(self) -> dict[str, Any]:
        try:
            data = self._socket.recv(_LARGEST_PACKET)
        except ConnectionError:
            data = b""
        if not data:
            raise Gone
        found: dict[str, Any] = json.loads(data)
        return found


class _Block:
    """An anonymous file that is lent to the service under a name."""

    def __init__(self, size: int, connection: Connection) -> None:
        descriptor = os.memfd_create("convgrad-tensor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Allocate the pages now: no memory is an error here instead of a SIGBUS at a later write.
            os.posix_fallocate(descriptor, 0, size)
            # The service maps it only if it can't shrink.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.memory = mmap.mmap(descriptor, size)
            self.size = size
            self.name = connection.lend(descriptor, size)
        finally:
            os.close(descriptor)


class Loan:
    """A tensor in shared memory: the first bytes of the region `name`, until the last reference to this is gone."""

    def __init__(self, name: str) -> None:
        self.name = name


class SharedMemory:
    """Put tensors in blocks that the service reads in place; thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._idle: list[_Block] = []  # longest idle first
        # A loan ends wherever its last reference goes, perhaps in the garbage collector while the lock is held.
        self._returned: deque[_Block] = deque()

    def lend(self, part: Part) -> Loan | None:
        """Copy a tensor's elements to shared memory; None for one that is small, or when there is no memory for it.

        Raises `Gone` when the service has ended, and what reading the tensor raises.
        """
        if part.size < PIECE or part.elements is None:
            return None
        if (block := self._take_idle(part.size)) is None:
            try:
                block = _Block(_rounded(part.size), self._connection)
            except OSError:
                return None
        loan = Loan(block.name)
        weakref.finalize(loan, self._returned.append, block)
        at = 0
        for piece in part.elements():
            at = _put(block.memory, at, piece)
        return loan

    def _take_idle(self, size: int) -> _Block | None:
        with self._lock:
            while self._returned:
                self._idle.append(self._returned.popleft())
            fitting = [block for block in self._idle if size <= block.size <= 2 * size]
            best = min(fitting, key=lambda block: block.size, default=None)
            if best is not None:
                self._idle.remove(best)
            while len(self._idle) > _MOST_IDLE or sum(block.size for block in self._idle) > _MOST_IDLE_BYTES:
                self._connection.forget(self._idle.pop(0).name)
            return best


def _put(memory: mmap.mmap, at: int, piece: Bytes) -> int:
    end = at + len(piece)
    memory[at:end] = piece
    return end


def _rounded(size: int) -> int:
    """Round up to one of eight sizes between powers of two, so that blocks fit again."""
    step = 1 << max(12, size.bit_length() - 4)
    return -(-size // step) * step
