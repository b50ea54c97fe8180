"""The server's end of the bridge: start it, listen to it, kill it when it is silent, and start it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import sendfds
from pathlib import Path

from app.cluster.messages import Beat, Message
from app.pool.local import finish

__all__ = ["Link"]

_log = logging.getLogger(__name__)

_SILENT_S = 3.0
"""Seconds without a sign of life after which a bridge is killed."""

_CONNECT_S = 30.0
"""Seconds that a bridge has to connect to the cluster."""

_RETRY_FIRST_S, _RETRY_LAST_S = 0.5, 5.0

_Item = tuple[Message, list[int]]


class Link:
    """Keep a bridge running that is started with `arguments`; everything is called on the event loop.

    `on_message` gets what the bridge sends; `on_down` is called when a bridge has ended.
    """

    def __init__(
        self, arguments: Sequence[str], on_message: Callable[[Message], None], on_down: Callable[[], None]
    ) -> None:
        self._command = [sys.executable, "-P", "-m", "app.cluster.bridge"]
        self._arguments = arguments
        self._on_message, self._on_down = on_message, on_down
        self._outbox: queue.SimpleQueue[_Item | None] | None = None
        self._heard = 0.0
        self._task: asyncio.Task[None] | None = None
        self.up = False
        """Whether a bridge is connected to the cluster."""
        self.pid: int | None = None
        self.restarts = 0

    def start(self) -> None:
        """Start the first bridge, in the background."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End the bridge."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> bool:
        """Send a message, and say whether there is a bridge; the descriptors are duplicated, so they may be closed.

        Raises `OSError` where too many are open.
        """
        if self._outbox is None:
            return False
        copies: list[int] = []
        try:
            copies.extend(map(os.dup, descriptors))
        except OSError:
            _close(copies)
            raise
        self._outbox.put((message, copies))
        return True

    async def _run(self) -> None:
        delay = _RETRY_FIRST_S
        while True:
            started = time.monotonic()
            try:
                await self._run_bridge()
            except OSError as error:
                _log.warning("the bridge to the cluster can't be started: %s", error)
            except Exception:  # noqa: BLE001 - the next one may do better
                _log.exception("the bridge to the cluster has failed")
            if time.monotonic() - started > _CONNECT_S:
                delay = _RETRY_FIRST_S
            await asyncio.sleep(delay)
            delay = min(2 * delay, _RETRY_LAST_S)
            self.restarts += 1

    async def _run_bridge(self) -> None:
        """Start a bridge and return when it has ended."""
        mine, theirs = socket.socketpair()
        command = [*self._command, str(theirs.fileno()), *self._arguments]
        starting = asyncio.ensure_future(asyncio.to_thread(_start, command, theirs))
        try:
            await finish(starting)
        except asyncio.CancelledError:
            mine.close()
            await _end(starting.result())
            raise
        except OSError:
            mine.close()
            raise
        finally:
            theirs.close()
        process = starting.result()
        self.pid, self._heard = process.pid, time.monotonic()
        outbox = self._outbox = queue.SimpleQueue()
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def deliver(message: Message | None) -> None:
            if outbox is not self._outbox:
                return
            if message is None:
                ended.set()
            else:
                self._heard = time.monotonic()
                self.up = self.up or isinstance(message, Beat)
                self._on_message(message)

        def tell(message: Message | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(deliver, message)

        try:
            for work in (lambda: _listen(mine, tell), lambda: _write(mine, outbox)):
                threading.Thread(target=work, daemon=True).start()
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), 0.25)
                if time.monotonic() - self._heard > (_SILENT_S if self.up else _CONNECT_S):
                    _log.warning("the bridge to the cluster is silent: killing it")
                    break
        finally:
            self.up, self.pid, self._outbox = False, None, None
            outbox.put(None)
            with contextlib.suppress(OSError):
                mine.shutdown(socket.SHUT_RDWR)
            await finish(_end(process))
            self._on_down()


def _start(command: list[str], theirs: socket.socket) -> subprocess.Popen[bytes]:
    service = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(dict.fromkeys([service, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
    return subprocess.Popen(  # noqa: S603 - our own module in our own interpreter
        command,
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


async def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a bridge and what it has started; it is gone when it has let go of its memory, which takes a while."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.to_thread(process.wait)


def _listen(sock: socket.socket, tell: Callable[[Message | None], None]) -> None:
    connection = Connection(os.dup(sock.fileno()))
    try:
        while True:
            tell(pickle.loads(connection.recv_bytes()))  # noqa: S301 - from our own process
    except (EOFError, OSError):
        tell(None)
    finally:
        connection.close()


def _write(sock: socket.socket, outbox: queue.SimpleQueue[_Item | None]) -> None:
    """Write what is in the outbox: the bridge may read slowly, and the event loop does not wait for it."""
    connection = Connection(os.dup(sock.fileno()))
    reads = True
    while (item := outbox.get()) is not None:
        message, descriptors = item
        try:
            if reads:
                connection.send_bytes(pickle.dumps(message, protocol=5))
                if descriptors:
                    sendfds(sock, descriptors)
        except OSError:  # the bridge has ended, which the other thread reports
            reads = False
        finally:
            _close(descriptors)
    connection.close()
    sock.close()


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
