"""Messages between the server, the fork server and the workers, and their framing.

A message is a named tuple, pickled as its kind and bare fields, which takes a tenth of the time of pickling a class.
Unpickling is safe: both ends are our own processes on a private socket pair. A frame is its length and number of
descriptors, then the pickle; the descriptors travel beside it (SCM_RIGHTS). This module imports nothing heavy, because
the fork server and every worker load it.
"""

from __future__ import annotations

import pickle
import socket
import struct
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

__all__ = [
    "Done",
    "Exited",
    "Failed",
    "Foreign",
    "Forget",
    "Hello",
    "Loaded",
    "Message",
    "MessageDecoder",
    "Probe",
    "Run",
    "Spawn",
    "Spawned",
    "Unfit",
    "Warming",
    "encode",
    "receive",
    "receive_some",
    "send",
]

_HEADER = struct.Struct("<IB")
_CHUNK = 16 << 10
_ANCILLARY = socket.CMSG_SPACE(64 * struct.calcsize("i"))


class Spawn(NamedTuple):
    """Server to fork server: fork worker `number`. Descriptors: its socket, its control page."""

    number: int


class Spawned(NamedTuple):
    """Fork server to server: worker `number` is process `pid`. Descriptor: its pidfd."""

    number: int
    pid: int


class Exited(NamedTuple):
    """Fork server to server: worker `number` ended with this exit code, negative for a signal."""

    number: int
    code: int


class Warming(NamedTuple):
    """Fork server to server: `done` of `total` kernel specialisations are ready."""

    done: int
    total: int


class Unfit(NamedTuple):
    """Fork server to server: code for `target` does not work on this processor; start with `narrower` instead."""

    target: str
    reason: str
    narrower: str


class Loaded(NamedTuple):
    """Fork server to server: workers can be forked; `gflops` is the speed of the f32 register tile, 0 without one."""

    gflops: float


class Failed(NamedTuple):
    """Fork server to server: why workers can't be forked, in one line; `final` when retrying is no use."""

    cause: str
    final: bool = False


class Probe(NamedTuple):
    """Server to worker: write `token` to the control page, and reply with `Hello`."""

    token: int


class Hello(NamedTuple):
    """Worker to server, the answer to `Probe`: ready for units."""


class Run(NamedTuple):
    """Server to worker: compute one unit.

    `plan` is the number of a plan that is pickled, without its units, in `plan_bytes` of this message or an earlier
    one; `unit` has the fields of a `Unit`. `attach` lists (id, size) of the segments whose descriptors are attached;
    `inputs`, `output` and `scratch` are segment ids.
    """

    serial: int
    plan: int
    unit: tuple[Any, ...]
    inputs: tuple[int, ...]
    output: int
    scratch: int | None
    plan_bytes: bytes | None = None
    attach: tuple[tuple[int, int], ...] = ()


class Forget(NamedTuple):
    """Server to worker: these segments and plans are not needed again."""

    segments: tuple[int, ...] = ()
    plans: tuple[int, ...] = ()


class Done(NamedTuple):
    """Worker to server: the outcome of unit `serial` and its seconds.

    The outcome is `stopped` after a stop request. With `failed`, `detail` is a traceback for the log.
    """

    serial: int
    outcome: Literal["done", "stopped", "failed", "no_memory"]
    seconds: float
    detail: str = ""


class Foreign(NamedTuple):
    """Either way: a message of another protocol, such as that of `app.cluster`."""

    content: Any


Message = Spawn | Spawned | Exited | Warming | Unfit | Loaded | Failed | Probe | Hello | Run | Forget | Done | Foreign
_KINDS: tuple[type[Message], ...] = get_args(Message)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}


def encode(message: Message, descriptors: int = 0) -> bytes:
    """Frame a message that travels with this number of descriptors."""
    payload = pickle.dumps((_CODES[type(message)], *message), protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(payload), descriptors) + payload


class MessageDecoder:
    """Decode messages from a byte stream and its descriptors."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._descriptors: deque[int] = deque()

    def feed(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Add what one `recvmsg` returned."""
        self._bytes += data
        self._descriptors.extend(descriptors)

    def next(self) -> tuple[Message, list[int]] | None:
        """Return the next message with its descriptors, which the caller owns; None while it is incomplete.

        When the process is out of descriptors the kernel drops some, and fewer are returned.
        """
        if len(self._bytes) < _HEADER.size:
            return None
        length, count = _HEADER.unpack_from(self._bytes)
        end = _HEADER.size + length
        if len(self._bytes) < end:
            return None
        code, *fields = pickle.loads(memoryview(self._bytes)[_HEADER.size : end])  # noqa: S301 - our own process
        message: Message = _KINDS[code](*fields)
        del self._bytes[:end]
        # The kernel keeps bytes and descriptors in order, so the oldest belong to the oldest message.
        return message, [self._descriptors.popleft() for _ in range(min(count, len(self._descriptors)))]


def receive_some(sock: socket.socket, decoder: MessageDecoder) -> bool:
    """Read once into the decoder; False at the end of the stream. May raise BlockingIOError."""
    try:
        data, ancillary, _, _ = sock.recvmsg(_CHUNK, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # the peer died with our bytes unread
        return False
    descriptors = array("i")
    for _, _, block in ancillary:
        descriptors.frombytes(block)
    decoder.feed(data, descriptors)
    return bool(data)


def receive(sock: socket.socket, decoder: MessageDecoder) -> tuple[Message, list[int]] | None:
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
        if sent < len(data):
            sock.sendall(data[sent:])
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True
