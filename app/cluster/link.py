"""The server's end of the bridge: start it, call it, kill it when it stops responding, and start it again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app.cluster.messages import Away, Nodes, Reply, Request
from app.pool.jobs import uninterrupted
from app.pool.messages import pair, receive, send

__all__ = ["Link"]

_log = logging.getLogger(__name__)

_SILENT_S, _CONNECT_S = 3.0, 30.0
"""Seconds without a report after which a bridge is killed, and seconds that it has to connect to the cluster."""

_RETRY_S, _FULL_S = 2.0, 0.005
"""Seconds until another bridge is started, and until a request is sent again that did not fit the socket."""


class Link:
    """Keep a bridge running, started with `arguments`; `on_nodes` gets each of its reports, and None when it ends."""

    def __init__(self, arguments: Sequence[str], on_nodes: Callable[[Nodes | None], None]) -> None:
        self._arguments, self._on_nodes = arguments, on_nodes
        self._sock: socket.socket | None = None
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._heard = 0.0
        self._task: asyncio.Task[None] | None = None
        self.up = False
        """Whether a bridge is connected to the cluster."""
        self.pid: int | None = None
        self.restarts = 0

    def start(self) -> None:
        """Start the first bridge, in the background."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End the bridge."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def call(self, method: str, *arguments: Any, descriptors: Sequence[int] = ()) -> Any:
        """Call a method of the bridge. A caller that is cancelled waits until the method has ended.

        Raises what the method raises, `Away` if the bridge ends, and `OSError` where too many descriptors are open.
        """
        number = next(self._numbers)
        await self._send(Request(number, method, arguments), descriptors)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.shield(reply)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await self._send(Request(number))
            with contextlib.suppress(Exception):
                await uninterrupted(reply)
            raise
        finally:
            del self._replies[number]

    async def _send(self, request: Request, descriptors: Sequence[int] = ()) -> None:
        while self._sock is not None:
            try:
                send(self._sock, request, descriptors)
            except BlockingIOError:
                await asyncio.sleep(_FULL_S)
            except BrokenPipeError:
                break
            else:
                return
        raise Away("the cluster is not connected")

    async def _run(self) -> None:
        while True:
            try:
                await self._run_bridge()
            except Exception:  # noqa: BLE001 - the next one may do better
                _log.exception("the bridge to the cluster can't be started")
            await asyncio.sleep(_RETRY_S)
            self.restarts += 1

    async def _run_bridge(self) -> None:
        """Start a bridge and return when it has ended."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        sock, theirs = pair()
        sock.setblocking(False)
        starting = asyncio.ensure_future(asyncio.to_thread(_start, theirs.fileno(), self._arguments))
        try:
            await uninterrupted(starting)
            theirs.close()
            loop.add_reader(sock, self._receive, sock, ended)
            self._sock, self.pid, self._heard = sock, starting.result().pid, time.monotonic()
            while not ended.is_set() and time.monotonic() - self._heard < (_SILENT_S if self.up else _CONNECT_S):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), 0.25)
            _log.warning("the cluster bridge %s", "has ended" if ended.is_set() else "stopped responding; killing it")
        finally:
            self.up, self.pid, self._sock = False, None, None
            loop.remove_reader(sock)
            sock.close()
            theirs.close()
            await uninterrupted(asyncio.to_thread(_end, starting.result()))
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_exception(Away("the connection to the cluster was lost"))
            self._on_nodes(None)

    def _receive(self, sock: socket.socket, ended: asyncio.Event) -> None:
        try:
            found = receive(sock)
        except BlockingIOError:
            return
        if found is None:
            asyncio.get_running_loop().remove_reader(sock)
            ended.set()
            return
        self.up, self._heard = True, time.monotonic()
        match found[0]:
            case Nodes() as nodes:
                self._on_nodes(nodes)
            case Reply(number, Exception() as error):
                self._replies[number].set_exception(error)
            case Reply(number, result):
                self._replies[number].set_result(result)


def _start(descriptor: int, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    service = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(dict.fromkeys([service, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
    return subprocess.Popen(  # noqa: S603 - our own module in our own interpreter
        [sys.executable, "-P", "-m", f"{__package__}.bridge", str(descriptor), *arguments],
        pass_fds=[descriptor],
        env={**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a bridge and what it has started; wait until it is gone, and its memory freed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
