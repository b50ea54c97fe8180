"""Tensors in memory shared with a local service: the client writes them once, the service reads them in place.

The size of a result is known once a call with the same operation, shapes and attributes has been made; from then on the
service writes it to shared memory too.

The memory is anonymous: its descriptor is sent over the client's connection to the service, so nothing is left in
/dev/shm, however either of them ends. Regions are reused, because fresh pages cost more than the copy.
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
from collections.abc import Callable
from typing import Any

import numpy as np

from convgrad._errors import TransportError
from convgrad._events import Array
from convgrad._tensors import PIECE, Part

if sys.platform != "win32":  # the client itself works there too
    import fcntl

__all__ = ["Connection", "ServiceEnded", "SharedBuffer", "SharedMemory"]

_MAX_PACKET = 4096
# Idle regions that are kept: enough for several layers of a network in turn.
_MAX_IDLE, _MAX_IDLE_BYTES = 32, 1 << 30
_MAX_CALLS = 1024


class ServiceEnded(Exception):  # noqa: N818 - becomes an error of the tree where the service is known
    """The service has closed the connection."""


class Connection:
    """The connection that makes this process a user of a local service; thread-safe.

    Raises `ServiceEnded` when the service has ended, `OSError` when it refuses.
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
        """Wait for the service's first packet, which has its `pid`. Raises `TimeoutError`."""
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
                raise ServiceEnded from None
            found = self._receive()
        if "region" not in found:
            raise OSError(f"the local service does not take shared memory: {found.get('error')}")
        return str(found["region"])

    def forget(self, name: str) -> None:
        """Take back a region."""
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
        """End the connection, even if a forked child still has it open; in a child, close only its own copy."""
        if self._socket.fileno() >= 0 and os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive(self) -> dict[str, Any]:
        try:
            data = self._socket.recv(_MAX_PACKET)
        except ConnectionError:
            data = b""
        if not data:
            raise ServiceEnded
        found: dict[str, Any] = json.loads(data)
        return found


class _Region:
    """An anonymous file, mapped by the client and by the service, which knows it by its `name`."""

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


class SharedBuffer:
    """A region in use: until the last reference to this object, and to its array, is gone."""

    def __init__(self, region: _Region, size: int, freed: deque[tuple[_Region, bool]]) -> None:
        self.name = region.name
        self.size = size
        self._safe = [True]
        self._bytes = np.frombuffer(region.memory, np.uint8)[:size]
        weakref.finalize(self._bytes, _free, region, self._safe, freed)

    def write(self, part: Part) -> None:
        """Copy the elements of a tensor to the region."""
        target, at = self._view(), 0
        for piece in part.elements() if part.elements is not None else ():
            target[at : at + len(piece)] = piece
            at += len(piece)

    def begin_write(self) -> None:
        """Mark the region as written by the service: it is not reused unless the call succeeds."""
        self._safe[0] = False

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Return what the service has written, without a copy; the region is in use for as long as the array is."""
        self._safe[0] = True
        found: Array = np.frombuffer(self._view(), dtype)
        return found.reshape(shape)

    def _view(self) -> memoryview:
        # Not a slice of the array: NumPy would base it on the whole mapping, and the region would be freed too early.
        return memoryview(self._bytes)  # type: ignore[arg-type] # not a Buffer before 3.12


def _free(region: _Region, safe: list[bool], freed: deque[tuple[_Region, bool]]) -> None:
    freed.append((region, safe[0]))


class SharedMemory:
    """The memory that a client shares with a local service, for tensors and outputs of its calls; thread-safe.

    Raises `TransportError` with `ended_message` when the service has ended.
    """

    def __init__(self, connection: Connection, ended_message: Callable[[], str]) -> None:
        self._connection = connection
        self._ended_message = ended_message
        self._lock = threading.Lock()
        self._idle: list[_Region] = []  # longest idle first
        # Appended to wherever the last reference goes, perhaps in the garbage collector while the lock is held.
        self._freed: deque[tuple[_Region, bool]] = deque()
        self._outputs: dict[bytes, dict[str, int]] = {}

    def put(self, part: Part) -> SharedBuffer | None:
        """Copy a tensor's elements to shared memory; None for one that is small, or when there is no memory for it.

        Raises what reading the tensor raises.
        """
        buffer = None if part.elements is None else self._allocate(part.size)
        if buffer is not None:
            buffer.write(part)
        return buffer

    def output_buffers(self, call: bytes) -> dict[str, SharedBuffer | None]:
        """Return memory for each output of a call that was made before; nothing for a new call.

        None for an output that is small, or when there is no memory for it.
        """
        found = {name: self._allocate(size) for name, size in self._outputs.get(call, {}).items()}
        for buffer in found.values():
            if buffer is not None:
                buffer.begin_write()
        return found

    def remember_outputs(self, call: bytes, sizes: dict[str, int]) -> None:
        """Remember the sizes of the outputs of a call, for `output_buffers`."""
        if len(self._outputs) >= _MAX_CALLS:
            self._outputs.clear()
        self._outputs[call] = sizes

    def check(self, error: TransportError | None = None) -> None:
        """Raise `TransportError` if the service has ended; `error` is its cause."""
        if self._connection.ended:
            raise TransportError(self._ended_message()) from error

    def close(self) -> None:
        """Disconnect from the service."""
        self._connection.close()

    def _allocate(self, size: int) -> SharedBuffer | None:
        if size < PIECE:
            return None
        if (region := self._reuse(size)) is None:
            try:
                region = _Region(_rounded(size), self._connection)
            except OSError:
                return None
            except ServiceEnded:
                raise TransportError(self._ended_message()) from None
        return SharedBuffer(region, size, self._freed)

    def _reuse(self, size: int) -> _Region | None:
        with self._lock:
            while self._freed:
                region, safe = self._freed.popleft()
                if safe:
                    self._idle.append(region)
                else:  # the call failed, and the service may still be writing
                    self._connection.forget(region.name)
            fitting = [region for region in self._idle if size <= region.size <= 2 * size]
            best = min(fitting, key=lambda region: region.size, default=None)
            if best is not None:
                self._idle.remove(best)
            while len(self._idle) > _MAX_IDLE or sum(region.size for region in self._idle) > _MAX_IDLE_BYTES:
                self._connection.forget(self._idle.pop(0).name)
            return best


def _rounded(size: int) -> int:
    """Round up to one of eight sizes between powers of two, so that regions can be reused."""
    step = 1 << max(12, size.bit_length() - 4)
    return -(-size // step) * step
