"""The server's end of the bridge: start it, kill it when it is silent, and start it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app.pool.channel import Channel
from app.pool.local import finish
from app.pool.messages import Foreign, Message

__all__ = ["Link"]

_log = logging.getLogger(__name__)

_SILENT_S = 3.0
"""Seconds without a sign of life after which a bridge is killed."""

_CONNECT_S = 30.0
"""Seconds that a bridge has to connect to the cluster."""

_RETRY_FIRST_S, _RETRY_LAST_S = 0.5, 5.0


class Link:
    """Keep a bridge running that is started with `arguments`; everything is called on the event loop.

    `on_message` gets what the bridge sends; `on_down` is called when a bridge has ended.
    """

    def __init__(
        self, arguments: Sequence[str], on_message: Callable[[Any], None], on_down: Callable[[], None]
    ) -> None:
        self._arguments = arguments
        self._on_message, self._on_down = on_message, on_down
        self._channel: Channel | None = None
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

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a message, if there is a bridge; raises `OSError` where too many descriptors are open."""
        if self._channel is not None:
            self._channel.send(Foreign(message), descriptors)

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
        ended = asyncio.Event()
        channel = Channel(self._receive, ended.set)
        process: subprocess.Popen[bytes] | None = None
        try:
            starting = asyncio.ensure_future(asyncio.to_thread(_start, channel.peer.fileno(), self._arguments))
            try:
                await finish(starting)
            finally:
                process = starting.result()
            channel.hand_over()
            self._channel, self.pid, self._heard = channel, process.pid, time.monotonic()
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), 0.25)
                if time.monotonic() - self._heard > (_SILENT_S if self.up else _CONNECT_S):
                    _log.warning("the bridge to the cluster is silent: killing it")
                    break
        finally:
            self.up, self.pid, self._channel = False, None, None
            channel.close()
            if process is not None:
                await finish(asyncio.to_thread(_end, process))
                self._on_down()

    def _receive(self, message: Message, _: list[int]) -> None:
        assert isinstance(message, Foreign)
        self.up, self._heard = True, time.monotonic()
        self._on_message(message.content)


def _start(descriptor: int, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    service = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(dict.fromkeys([service, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
    return subprocess.Popen(  # noqa: S603 - our own module in our own interpreter
        [sys.executable, "-P", "-m", "app.cluster.bridge", str(descriptor), *arguments],
        pass_fds=[descriptor],
        env={**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a bridge and what it has started; it is gone when it has let go of its memory, which takes a while."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
