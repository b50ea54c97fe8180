"""The process between the server and Ray: all that Ray does to its driver, it does here.

Run as `python -m app.cluster.bridge DESCRIPTOR ADDRESS MIXED JOIN`, in a process group of its own. A driver that has
lost its cluster blocks for minutes, and at last Ray ends its process: the server lives on, kills a bridge that is
silent, and starts another. One thread handles everything, in the order in which it arrives on one queue; Ray's calls
that may block are made in other threads.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recvfds
from pathlib import Path
from typing import Any, NoReturn

from app.cluster.dispatch import Dispatch
from app.cluster.fleet import Fleet
from app.cluster.messages import Beat, Begin, Message, Release, Released
from app.cluster.node import view

__all__ = ["main"]

BEAT_S = 0.1
"""Seconds between two signs of life, and between two looks at what takes too long."""


def main() -> None:
    """Serve one server until it is gone."""
    import ray

    descriptor, address, mixed, join = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    if join:
        _join(address, join)
    ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR, namespace="convgrad")
    _Bridge(descriptor, Fleet(common=mixed == "common")).serve()


def _join(address: str, memory: int) -> None:
    """Make this machine a node that only sends tensors; it ends with this process's group.

    Raises `RuntimeError` with what Ray says when that does not succeed.
    """
    node = subprocess.Popen(  # noqa: S603 - Ray's own command beside our interpreter
        [
            Path(sys.executable).with_name("ray"),
            *("start", f"--address={address}", "--num-cpus=0", f"--object-store-memory={memory}", "--block"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert node.stdout is not None
    said: list[str] = []
    for line in node.stdout:
        said.append(line)
        if "runtime started" in line:
            # Nobody reads on, and it must not wait for a full pipe.
            threading.Thread(target=node.stdout.read, daemon=True).start()
            return
    raise RuntimeError("this machine can't join the cluster: " + "".join(said[-5:]).strip())


def _end() -> NoReturn:
    """End this process and the node that it may have started."""
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


class _Bridge:
    """Both ends: messages with the server, units with the fleet."""

    def __init__(self, descriptor: int, fleet: Fleet) -> None:
        self._descriptor = descriptor
        self._events: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._connection = Connection(os.dup(descriptor))
        self._fleet = fleet
        self._dispatch = Dispatch(fleet, self._send, self._events.put)
        fleet.post = self._events.put
        fleet.on_change = self._dispatch.fill

    def serve(self) -> None:
        """Handle events for ever; the process ends in the thread that listens to the server."""
        for work in (self._listen, self._fleet.watch):
            threading.Thread(target=work, daemon=True).start()
        beat = time.monotonic()
        while True:
            try:
                self._events.get(timeout=max(0.0, beat - time.monotonic()))()
            except queue.Empty:
                beat = time.monotonic() + BEAT_S
                self._send(Beat(self._fleet.nodes()))
                self._dispatch.check()

    def _send(self, message: Message) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(message, protocol=5))
        except OSError:
            _end()  # the server is gone

    def _listen(self) -> None:
        sock = socket.socket(fileno=self._descriptor)
        while True:
            try:
                message = pickle.loads(self._connection.recv_bytes())  # noqa: S301 - from our own server
                if isinstance(message, Begin):
                    self._begin(message, recvfds(sock, len(message.plan.problem.input_shapes)))
                elif isinstance(message, Release):
                    self._events.put(partial(self._release, message.job))
            except (EOFError, OSError):
                _end()

    def _release(self, number: int) -> None:
        self._dispatch.release(number)
        self._send(Released(number))

    def _begin(self, message: Begin, descriptors: list[int]) -> None:
        """Map the inputs; what units read of them is copied to Ray's memory when the first of them is given away."""
        import ray

        memory: list[Any] = []
        for descriptor in descriptors:
            memory.append(memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)))
            os.close(descriptor)
        tensors = [view(each, message.plan, number) for number, each in enumerate(memory)]
        self._events.put(lambda: self._dispatch.begin(message, tensors, ray.put))


if __name__ == "__main__":
    main()
