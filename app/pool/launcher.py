"""The server's side of the fork server: start it, restart it when it dies, ask it for workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import app
from app.pool.buffers import anonymous_file
from app.pool.causes import explain, how_it_ended, is_final
from app.pool.messages import Failed, Loaded, Spawned, Unfit, Warming, pair, receive, send

__all__ = ["Launcher", "fork_server_environment"]

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
    """Keep one fork server alive; one that does not answer a request within `start_s` is killed.

    `on_loaded` is called when workers can be forked, or the compiled code turns out not to work. A request is answered
    by `on_worker` with the process id, and the socket and pidfd unless this process has too many descriptors open; or
    by `on_failed`. `on_died` is called with the reason, and whether it is final, when the fork server is gone and its
    messages are delivered: `start` starts the next one. Workers outlive their fork server.
    """

    def __init__(
        self,
        *,
        start_s: float,
        on_loaded: Callable[[], None],
        on_worker: Callable[[int, list[int]], None],
        on_failed: Callable[[str, bool], None],
        on_died: Callable[[str, bool], None],
    ) -> None:
        self.loaded = False
        self.restarts = 0
        self.pid: int | None = None
        self.share = 0.0
        """The share of the warm-up that is done, 0 to 1."""
        self.unfit: Unfit | None = None
        """Why the compiled code does not work on this processor, if so; there are no workers then."""
        self.tile_gflops = 0.0
        self._start_s = start_s
        self._on_loaded, self._on_worker, self._on_failed, self._on_died = on_loaded, on_worker, on_failed, on_died
        self._began = self._progress_logged = time.monotonic()
        self._failed: Failed | None = None  # why the kernels can't be loaded
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._pidfd = -1
        self._request: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()
        self._stopping = False

    @property
    def busy(self) -> bool:
        """Whether a request has not been answered yet."""
        return self._request is not None

    def seconds_left(self) -> float:
        """Estimate how long the warm-up still takes, by the share that is done; before any is, as long as until now."""
        elapsed = time.monotonic() - self._began
        return elapsed * (1 - self.share) / self.share if self.share else elapsed

    def start(self) -> None:
        """Start a fork server unless there is one."""
        if self._process is not None or self._stopping:
            return
        self._failed = None
        self._ended.clear()
        try:
            self._process, self._sock = _start_fork_server()
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as error:
            self._failed = Failed(explain("the fork server can't be started", error), is_final(error))
            self._end()
            return
        self.pid = self._process.pid
        loop = asyncio.get_running_loop()
        loop.add_reader(self._sock, self._read)
        loop.add_reader(self._pidfd, self._on_exit)

    async def stop(self) -> None:
        """End the fork server and every remaining worker."""
        self._stopping = True
        if self._process is None:
            return
        self._hang_up()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), _EXIT_TIMEOUT_S)
        self.kill()
        await self._ended.wait()

    def spawn(self, dead: Iterable[int]) -> None:
        """Request a worker, and let the fork server reap those that are `dead`."""
        assert self._sock is not None
        self._request = asyncio.get_running_loop().call_later(self._start_s, self._on_silence)
        with contextlib.suppress(BrokenPipeError):
            send(self._sock, tuple(dead))

    def kill(self) -> None:
        """Kill the fork server."""
        if self._process is not None:
            self._process.kill()

    def _read(self) -> bool:
        if self._sock is None:
            return False
        try:
            found = receive(self._sock)
        except BlockingIOError:
            return False
        if found is None:
            self._hang_up()
            return False
        message, descriptors = found
        match message:
            case Warming(done, total):
                self.share, now = max(self.share, done / total if total else 0.0), time.monotonic()
                if now - self._progress_logged >= _PROGRESS_EVERY_S and self.share < 1.0:
                    self._progress_logged = now
                    _log.info("preparing the kernels for this processor: %.0f %%", 100 * self.share)
            case Loaded(gflops):
                self.loaded, self.share, self.tile_gflops = True, 1.0, gflops
                self._on_loaded()
            case Unfit():
                self.unfit = message
                self._on_loaded()
            case Spawned(pid):
                self._answered()
                self._on_worker(pid, descriptors)
            case Failed():
                if self._answered():
                    self._on_failed(*message)
                else:
                    self._failed = message
        return True

    def _answered(self) -> bool:
        request, self._request = self._request, None
        if request is not None:
            request.cancel()
        return request is not None

    def _on_silence(self) -> None:
        _log.warning("the fork server does not respond: killing it")
        self.kill()

    def _on_exit(self) -> None:
        while self._read():
            pass
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._end()

    def _end(self) -> None:
        """Clean up after a fork server."""
        status = 0
        if self._process is not None:
            self._process.kill()
            status = self._process.wait()
        cause, final = self._failed or (f"the fork server {how_it_ended(status)}", False)
        self._answered()
        self._hang_up()
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._process, self.pid, self._pidfd, self.loaded = None, None, -1, False
        self._ended.set()
        if not self._stopping:
            self.restarts += 1
            self.share, self._began = 0.0, time.monotonic()
            self._on_died(cause, final)

    def _hang_up(self) -> None:
        """Close the socket, after which the fork server ends."""
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()
            self._sock = None


def _start_fork_server() -> tuple[subprocess.Popen[bytes], socket.socket]:
    # Fail early where the system has no pidfds or no shared memory.
    os.close(os.pidfd_open(os.getpid()))
    with open(anonymous_file(), "wb") as file:  # noqa: PTH123 - it has no path
        os.posix_fallocate(file.fileno(), 0, 1)
    ours, theirs = pair()
    ours.setblocking(False)
    with theirs:
        try:
            # -P: never import from the working folder. A session of its own: Ctrl-C is for the server.
            process = subprocess.Popen(  # noqa: S603 - our own module in our own interpreter
                [sys.executable, "-P", "-m", f"{app.__name__}.pool.fork_server", str(theirs.fileno())],
                env=fork_server_environment(os.environ),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
    return process, ours
