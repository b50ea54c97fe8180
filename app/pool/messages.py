"""Messages between the server and its other processes: one packet each, with its file descriptors.

A message is pickled into a packet of a private pair of `SOCK_SEQPACKET` sockets: it arrives whole or not at all, and
unpickling is safe. One that is too large for a packet travels in an anonymous file.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from app.pool.buffers import anonymous_file

__all__ = ["Done", "Failed", "Loaded", "Run", "Spawned", "Unfit", "Warming", "pair", "receive", "send"]

_PACKET = 60 << 10
_MOST_DESCRIPTORS = 64


class Spawned(NamedTuple):
    """Fork server to server: a worker is process `pid`. Descriptors: its socket, its pidfd."""

    pid: int


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
    """Fork server to server: why a worker can't be forked, in one line; `final` when retrying is no use."""

    cause: str
    final: bool = False


class Run(NamedTuple):
    """Server to worker, as a plain tuple, which pickles faster: compute one unit. A bare serial number: stop it.

    `plan` is the number of a plan that is pickled, without its units, in `plan_bytes` of this message or an earlier
    one; `unit` has the fields of a `Unit`. `attach` lists (id, size) of the segments whose descriptors are attached;
    `inputs`, `output` and `scratch` are segment ids. Before that, the worker unmaps the segments `old_segments` and
    drops the plans `old_plans`.
    """

    serial: int
    plan: int
    unit: tuple[Any, ...]
    inputs: tuple[int, ...]
    output: int
    scratch: int | None
    plan_bytes: bytes | None = None
    attach: tuple[tuple[int, int], ...] = ()
    old_segments: tuple[int, ...] = ()
    old_plans: tuple[int, ...] = ()


class Done(NamedTuple):
    """Worker to server, as a plain tuple: the outcome of unit `serial` and its seconds. An empty tuple: ready.

    The outcome is `stopped` after a stop request. With `failed`, `detail` is a traceback for the log.
    """

    serial: int
    outcome: Literal["done", "stopped", "failed", "no_memory"]
    seconds: float
    detail: str = ""


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets for messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, message: object, descriptors: Sequence[int] = ()) -> None:
    """Send a message with copies of `descriptors`.

    Raises `BrokenPipeError` when the peer is gone, and `BlockingIOError` when a non-blocking socket is full.
    """
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    if len(data) > _PACKET:
        with open(anonymous_file(), "wb") as file:  # noqa: PTH123 - it has no path
            file.write(data)
            file.flush()
            socket.send_fds(sock, [b"\0"], [file.fileno(), *descriptors])
    elif descriptors:
        socket.send_fds(sock, [data], descriptors)
    else:
        sock.send(data)


def receive(sock: socket.socket) -> tuple[Any, list[int]] | None:
    """Return the next message with its descriptors, which the caller owns; None when the peer is gone.

    When this process is out of descriptors, the kernel drops some, and fewer are returned. Raises `BlockingIOError`
    when a non-blocking socket has no message.
    """
    try:
        data, descriptors, _, _ = _receive(sock)
    except ConnectionResetError:  # raised once if the peer died with our messages unread; its own are still there
        data, descriptors, _, _ = _receive(sock)
    if data == b"\0":
        if not descriptors:
            raise OSError("too many files are open")
        with open(descriptors.pop(0), "rb") as file:  # noqa: PTH123
            data = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
    return (pickle.loads(data), descriptors) if data else None  # noqa: S301 - from our own process


def _receive(sock: socket.socket) -> tuple[bytes, list[int], int, Any]:
    return socket.recv_fds(sock, _PACKET, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
