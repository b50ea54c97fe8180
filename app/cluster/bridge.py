"""The process between the server and Ray: all that Ray does to its driver, it does here.

Run as `python -m app.cluster.bridge DESCRIPTOR IDENTITY ADDRESS MIXED JOIN`, in a process group of its own. A driver
that has lost its cluster blocks for minutes, and at last Ray ends its process: the server lives on, kills a bridge that
is silent, and starts another. One thread handles everything, in the order in which it arrives on one queue; Ray's calls
that may block are made in other threads.
"""

from __future__ import annotations

import contextlib
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
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recvfds
from pathlib import Path
from typing import NoReturn

from app.cluster.aside import Aside
from app.cluster.dispatch import Dispatch
from app.cluster.fleet import Fleet
from app.cluster.memory import Memory
from app.cluster.messages import Beat, Begin, DoneHere, Ended, Message, Release, Said

__all__ = ["main"]

BEAT_S = 0.1
"""Seconds between two signs of life, and between two looks at what takes too long."""


def main() -> None:
    """Serve one server until it is gone."""
    try:
        _serve(int(sys.argv[1]), *sys.argv[2:])
    except BaseException:  # noqa: BLE001 - whatever it is, the node that was started has to end too
        traceback.print_exc()
    finally:
        _end()


def _serve(descriptor: int, identity: str, address: str, mixed: str, join: str) -> None:
    import ray

    if int(join):
        _join(address, int(join))
    ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR, namespace="convgrad")
    home = ray.get_runtime_context().get_node_id()
    _Bridge(descriptor, Fleet(identity=identity, common=mixed == "common", home=home)).serve()


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


class _Log(logging.Handler):
    """Give what is logged here to the server's log."""

    def __init__(self, say: Callable[[Said], object]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Send a line."""
        self._say(Said(record.levelno, record.getMessage()))


class _Bridge:
    """Both ends: messages with the server, units with the fleet."""

    def __init__(self, descriptor: int, fleet: Fleet) -> None:
        self._descriptor = descriptor
        self._events: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._connection = Connection(os.dup(descriptor))
        self._fleet = fleet
        self._aside = Aside(_end)
        self._dispatch = Dispatch(fleet, self._send, self._events.put, self._aside)
        fleet.post = self._events.put
        fleet.aside = Aside(_end)  # another one: the head may be away while the machines compute
        fleet.on_change = self._dispatch.fill
        logging.getLogger("app").addHandler(_Log(lambda said: self._events.put(partial(self._send, said))))

    def serve(self) -> None:
        """Handle events until the process ends, in the thread that listens; raises `RuntimeError` where Ray blocks."""
        for work in (self._listen, self._fleet.watch):
            threading.Thread(target=work, daemon=True).start()
        beat = 0.0
        while not self._aside.stuck:
            if (left := beat - time.monotonic()) <= 0:
                beat = time.monotonic() + BEAT_S
                self._send(Beat(self._fleet.nodes()))
                self._dispatch.check()
            else:
                with contextlib.suppress(queue.Empty):
                    self._events.get(timeout=left)()
        raise RuntimeError("Ray does not return from a call")

    def _send(self, message: Message) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(message, protocol=5))
        except OSError:
            _end()  # the server is gone

    def _listen(self) -> None:
        sock = socket.socket(fileno=self._descriptor)
        try:
            while True:
                message = pickle.loads(self._connection.recv_bytes())  # noqa: S301 - from our own server
                if isinstance(message, Begin):
                    self._begin(message, recvfds(sock, Memory.count(message.plan)))
                elif isinstance(message, Release):
                    self._events.put(partial(self._dispatch.release, message.job))
                elif isinstance(message, DoneHere):
                    self._events.put(partial(self._dispatch.done_here, message))
        except (EOFError, OSError):  # the server is gone
            pass
        except Exception:  # noqa: BLE001 - without this thread there is no bridge
            traceback.print_exc()
        finally:
            _end()

    def _begin(self, message: Begin, descriptors: list[int]) -> None:
        """Map the job's memory; what units read of it is copied to Ray's when the first of them is given away."""
        import ray

        inputs = len(message.plan.problem.input_shapes)
        try:
            segments = [_mapped(descriptor, writable=i >= inputs) for i, descriptor in enumerate(descriptors)]
        except OSError as error:
            ended = Ended(message.job, "memory", f"its memory can't be mapped: {error}")
            self._events.put(partial(self._send, ended))
            return
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        memory = Memory.of(message.plan, segments)
        self._events.put(lambda: self._dispatch.begin(message, memory, ray.put))


def _mapped(descriptor: int, *, writable: bool) -> mmap.mmap:
    return mmap.mmap(descriptor, 0, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))


if __name__ == "__main__":
    main()
