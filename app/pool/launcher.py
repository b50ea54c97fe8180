"""The server's side of the fork server: start it, restart it when it dies, ask it for workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import app
from app.pool.causes import explain, how_it_ended, is_final
from app.pool.channel import Channel
from app.pool.messages import Failed, Loaded, Message, Spawn, Unfit, Warming

__all__ = ["Launcher", "fork_server_environment"]

_Started = tuple[subprocess.Popen[bytes], int]

_log = logging.getLogger(__name__)
_EXIT_TIMEOUT_S = 2.0
_PROGRESS_EVERY_S = 3.0
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def fork_server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Build the fork server's environment: our packages first on the path, libraries limited to one thread.

    Forking a process with several threads can break the child, and workers compute in one thread anyway.
    """
    root = str(Path(app.__file__).resolve().parents[1])
    path = [root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **environment,
        **dict.fromkeys(_ONE_THREAD, "1"),
        "PYTHONPATH": os.pathsep.join(path),
    }


class Launcher:
    """Keep one fork server alive.

    `on_message` gets each message of a fork server with its descriptors, which are missing if this process has too many
    open. `on_died` is called with the reason, and whether it is final, when the fork server is gone and its messages
    are delivered; it returns the seconds until the next one starts, or None for none. Workers outlive their fork
    server, which may have died before it reported one: the caller has to close the sockets of those.
    """

    def __init__(
        self,
        *,
        on_message: Callable[[Message, list[int]], None],
        on_died: Callable[[str, bool], float | None],
    ) -> None:
        self.loaded = False
        self.restarts = 0
        self.pid: int | None = None
        self.share = 0.0
        self.unfit: Unfit | None = None
        """Why the compiled code does not work on this processor."""
        self.failed: Failed | None = None
        """Why workers can't be forked."""
        self.tile_gflops = 0.0
        self._began = time.monotonic()
        self._progress_logged = 0.0
        self._on_message = on_message
        self._on_died = on_died
        self._channel: Channel | None = None
        self._pidfd = -1
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the first fork server, in the background."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def seconds_left(self) -> float:
        """Estimate how long the warm-up still takes, by the share that is done; before any is, as long as until now."""
        elapsed = time.monotonic() - self._began
        return elapsed * (1 - self.share) / self.share if self.share else elapsed

    async def stop(self) -> None:
        """End the fork server and every remaining worker."""
        self._stopping.set()
        if self._task is not None:
            await self._task

    def spawn(self, number: int, descriptors: Sequence[int]) -> None:
        """Request a worker; `descriptors` are its socket and its control page."""
        assert self._channel is not None
        self._channel.send(Spawn(number), descriptors)

    def drain(self) -> None:
        """Deliver the messages that the fork server has sent so far."""
        if self._channel is not None:
            self._channel.drain()

    def kill(self) -> None:
        """Kill a fork server that does not respond; another one is started."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def _run(self) -> None:
        while True:
            end = await self._run_fork_server()
            if self._stopping.is_set():
                return
            self.restarts += 1
            self.share, self._began = 0.0, time.monotonic()
            if (delay := self._on_died(*end)) is None:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    async def _run_fork_server(self) -> Failed:
        """Start a fork server, wait for its end, and return why it ended."""
        self.failed = None
        try:
            # Set before the process starts: on a busy loop its first messages may arrive before `Popen` returns.
            channel = self._channel = Channel(self._receive, lambda: None)
            # Popen blocks until the child has called exec: tens of milliseconds on a busy machine.
            process, self._pidfd = await _run_in_thread(_start_fork_server, channel.peer.fileno())
        except OSError as error:
            if self._channel is not None:
                self._channel.close()
                self._channel = None
            return Failed(explain("the fork server can't be started", error), is_final(error))
        channel.hand_over()
        self.pid = process.pid
        dead = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, dead.set)
        try:
            await self._wait_for_end(dead, channel)
            channel.drain()
        finally:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            channel.close()
            status = process.wait()
            self._channel, self.pid, self.loaded = None, None, False
        return self.failed or Failed(f"the fork server {how_it_ended(status)}")

    async def _wait_for_end(self, dead: asyncio.Event, channel: Channel) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (dead, self._stopping)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        waits[1].cancel()
        if not dead.is_set():
            channel.close()
            await asyncio.wait(waits[:1], timeout=_EXIT_TIMEOUT_S)
            self.kill()
        await dead.wait()
        waits[0].cancel()

    def _log_progress(self) -> None:
        """Log the progress of the warm-up every few seconds."""
        now = time.monotonic()
        if not self._progress_logged:
            self._progress_logged = now
        elif now - self._progress_logged >= _PROGRESS_EVERY_S and self.share < 1.0:
            self._progress_logged = now
            _log.info("preparing the kernels for this processor: %.0f %%", 100 * self.share)

    def _receive(self, message: Message, descriptors: list[int]) -> None:
        match message:
            case Warming(done, total):
                self.share = max(self.share, done / total if total else 0.0)
                self._log_progress()
            case Unfit():
                self.unfit = message
            case Failed():
                self.failed = message
            case Loaded(gflops):
                self.loaded, self.share, self.tile_gflops = True, 1.0, gflops
        self._on_message(message, descriptors)


async def _run_in_thread(work: Callable[[int], _Started], descriptor: int) -> _Started:
    """Run blocking work in a thread, or on the event loop when the process limit allows no thread."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Started] = loop.create_future()

    def run() -> None:
        try:
            result = work(descriptor)
        except OSError as error:
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, result)

    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError:
        return work(descriptor)
    return await done


def _start_fork_server(descriptor: int) -> _Started:
    os.close(os.pidfd_open(os.getpid()))  # fail early where the system has no pidfds
    # -P: never import from the working folder. A session of its own: Ctrl-C is for the server.
    process = subprocess.Popen(  # noqa: S603 - our own module in our own interpreter
        [sys.executable, "-P", "-m", f"{app.__name__}.pool.fork_server", str(descriptor)],
        env=fork_server_environment(os.environ),
        stdin=subprocess.DEVNULL,
        pass_fds=[descriptor],
        start_new_session=True,
    )
    try:
        return process, os.pidfd_open(process.pid)
    except OSError:
        process.kill()
        process.wait()
        raise
