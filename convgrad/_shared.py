"""Tensors in memory that is shared with a local service: written once by the client, read in place by the service.

A call that was made before, by operation, shapes and attributes, also has its result written there: its size is known.

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

import numpy as np

from convgrad._events import Array
from convgrad._tensors import PIECE, Part

if sys.platform != "win32":  # the client itself works there too
    import fcntl

__all__ = ["Connection", "Gone", "Loan", "SharedMemory"]

_LARGEST_PACKET = 4096
# Idle blocks that are kept: for some layers of a network in turn.
_MOST_IDLE, _MOST_IDLE_BYTES = 32, 1 << 30
_MOST_CALLS = 1024


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
    """A block while it is in use: until the last reference to this, and to its array, is gone."""

    def __init__(self, block: _Block, size: int, returned: deque[tuple[_Block, bool]]) -> None:
        self.name = block.name
        self.size = size
        self._safe = [True]
        self._lease = np.frombuffer(block.memory, np.uint8)[:size]
        weakref.finalize(self._lease, _give_back, block, self._safe, returned)

    def put(self, part: Part) -> None:
        """Copy the elements of a tensor to the block."""
        room, at = self._view(), 0
        for piece in part.elements() if part.elements is not None else ():
            room[at : at + len(piece)] = piece
            at += len(piece)

    def expect(self) -> None:
        """The service will write to the block: it can't be used again until that has ended."""
        self._safe[0] = False

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Return what the service has written, without a copy; the block is in use for as long as the array is."""
        self._safe[0] = True
        found: Array = np.frombuffer(self._view(), dtype)
        return found.reshape(shape)

    def _view(self) -> memoryview:
        # Not an array made of the lease: NumPy would base it on the whole mapping, and the lease would end too early.
        return memoryview(self._lease)  # type: ignore[arg-type] # not a Buffer before 3.12


def _give_back(block: _Block, safe: list[bool], returned: deque[tuple[_Block, bool]]) -> None:
    returned.append((block, safe[0]))


class SharedMemory:
    """Put tensors in blocks that the service reads in place, and have results written to blocks; thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._idle: list[_Block] = []  # longest idle first
        # A loan ends wherever its last reference goes, perhaps in the garbage collector while the lock is held.
        self._returned: deque[tuple[_Block, bool]] = deque()
        self._results: dict[bytes, tuple[str, int]] = {}

    def lend(self, part: Part) -> Loan | None:
        """Copy a tensor's elements to shared memory; None for one that is small, or when there is no memory for it.

        Raises `Gone` when the service has ended, and what reading the tensor raises.
        """
        loan = None if part.elements is None else self._borrow(part.size)
        if loan is not None:
            loan.put(part)
        return loan

    def room(self, call: bytes) -> tuple[str, Loan] | None:
        """Return the name of the output of a call that was made before, and a block for it.

        None for a new or a small one, or when there is no memory for it. Raises `Gone` when the service has ended.
        """
        name, size = self._results.get(call, ("", 0))
        if (loan := self._borrow(size)) is None:
            return None
        loan.expect()
        return name, loan

    def learn(self, call: bytes, name: str, size: int) -> None:
        """Remember name and size of the output of a call, for `room`."""
        if len(self._results) >= _MOST_CALLS:
            self._results.clear()
        self._results[call] = name, size

    def _borrow(self, size: int) -> Loan | None:
        if size < PIECE:
            return None
        if (block := self._take_idle(size)) is None:
            try:
                block = _Block(_rounded(size), self._connection)
            except OSError:
                return None
        return Loan(block, size, self._returned)

    def _take_idle(self, size: int) -> _Block | None:
        with self._lock:
            while self._returned:
                block, safe = self._returned.popleft()
                if safe:
                    self._idle.append(block)
                else:  # the call failed, and the service may be writing still
                    self._connection.forget(block.name)
            fitting = [block for block in self._idle if size <= block.size <= 2 * size]
            best = min(fitting, key=lambda block: block.size, default=None)
            if best is not None:
                self._idle.remove(best)
            while len(self._idle) > _MOST_IDLE or sum(block.size for block in self._idle) > _MOST_IDLE_BYTES:
                self._connection.forget(self._idle.pop(0).name)
            return best


def _rounded(size: int) -> int:
    """Round up to one of eight sizes between powers of two, so that blocks fit again."""
    step = 1 << max(12, size.bit_length() - 4)
    return -(-size // step) * step
