"""What crosses the boundary between the server, the nursery and the workers, and how it is framed.

Frozen dataclasses, pickled: both ends are our own processes on a private socket pair, no other process can
write to it. A frame is its length and its number of descriptors, then the pickle; descriptors travel beside
it (SCM_RIGHTS). Imports nothing heavy, because the nursery and every worker carry it.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Decoder",
    "Done",
    "Exited",
    "Forget",
    "Hello",
    "Loaded",
    "Message",
    "Run",
    "Spawn",
    "Spawned",
    "Warming",
    "encode",
    "receive",
    "receive_some",
    "send",
]

_HEADER = struct.Struct("<IB")
_CHUNK = 64 << 10
_MOST_DESCRIPTORS = 64


@dataclass(frozen=True)
class Spawn:
    """Server to nursery: fork worker `number`. Descriptors: its socket, its control page."""

    number: int


@dataclass(frozen=True)
class Spawned:
    """Nursery to server: worker `number` is process `pid`. Descriptor: its pidfd."""

    number: int
    pid: int


@dataclass(frozen=True)
class Exited:
    """Nursery to server: worker `number` ended with this exit code, negative for a signal."""

    number: int
    code: int


@dataclass(frozen=True)
class Warming:
    """Nursery to server: so many of the kernels' specialisations are ready."""

    done: int
    total: int


@dataclass(frozen=True)
class Loaded:
    """Nursery to server: workers can be forked. `compiled` counts the kernels that the cache lacked."""

    compiled: int


@dataclass(frozen=True)
class Hello:
    """Worker to server: ready for units."""


@dataclass(frozen=True)
class Run:
    """Server to worker: compute one unit.

    `plan` names a plan that came pickled in `plan_bytes` of this message or of an earlier one. `attach` lists
    (id, size) of the segments whose descriptors come along; `inputs`, `output` and `scratch` are segment ids.
    """

    serial: int
    plan: int
    unit: int
    inputs: tuple[int, ...]
    output: int
    scratch: int | None
    plan_bytes: bytes | None = None
    attach: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Forget:
    """Server to worker: these segments and plans are not needed again."""

    segments: tuple[int, ...] = ()
    plans: tuple[int, ...] = ()


@dataclass(frozen=True)
class Done:
    """Worker to server: how the unit of `serial` ended, its seconds, and the bytes of segments it has mapped.

    `stopped` is the answer to the stop flag. `detail` of `failed` is a traceback for the log.
    """

    serial: int
    outcome: Literal["done", "stopped", "failed", "no_memory"]
    seconds: float
    mapped: int
    detail: str = ""


Message = Spawn | Spawned | Exited | Warming | Loaded | Hello | Run | Forget | Done


def encode(message: Message, descriptors: int = 0) -> bytes:
    """Frame a message that travels with so many descriptors."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(payload), descriptors) + payload


class Decoder:
    """Cut a byte stream and the descriptors that came with it into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._descriptors: deque[int] = deque()

    def feed(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Take what one `recvmsg` gave."""
        self._bytes += data
        self._descriptors.extend(descriptors)

    def next(self) -> tuple[Message, list[int]] | None:
        """Return the next message with its descriptors, now the caller's; None while it isn't whole."""
        if len(self._bytes) < _HEADER.size:
            return None
        length, count = _HEADER.unpack_from(self._bytes)
        end = _HEADER.size + length
        if len(self._bytes) < end:
            return None
        message: Message = pickle.loads(memoryview(self._bytes)[_HEADER.size : end])  # noqa: S301 - our own process
        del self._bytes[:end]
        # The kernel keeps bytes and descriptors in step, so the oldest ones belong to the oldest message.
        return message, [self._descriptors.popleft() for _ in range(count)]


def receive_some(sock: socket.socket, decoder: Decoder) -> bool:
    """Read once into the decoder; False at the end of the stream. May raise BlockingIOError."""
    try:
        data, descriptors, _, _ = socket.recv_fds(sock, _CHUNK, _MOST_DESCRIPTORS)
    except ConnectionResetError:  # the peer died with our bytes unread
        return False
    decoder.feed(data, descriptors)
    return bool(data)


def receive(sock: socket.socket, decoder: Decoder) -> tuple[Message, list[int]] | None:
    """Wait for the next message on a blocking socket; None when the peer is gone."""
    while (found := decoder.next()) is None:
        if not receive_some(sock, decoder):
            return None
    return found


def send(sock: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> bool:
    """Send on a blocking socket; False when the peer is gone."""
    data = encode(message, len(descriptors))
    try:
        sent = socket.send_fds(sock, [data], descriptors) if descriptors else sock.send(data)
        sock.sendall(data[sent:])
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True
