"""The process that workers are forked from: it loads the kernels from the cache and forks on request.

Run as `python -m app.pool.fork_server DESCRIPTOR`, where the descriptor is its socket to the server. It differs from
multiprocessing's forkserver: no resource tracker, no second import of `__main__`, no blocking start, progress while
kernels compile, and a pidfd for every worker, which the event loop can watch and which can't kill a recycled process
id. It has one thread and never computes.

It ignores the signals of a terminal or a service manager, because the server decides when workers end. When the server
is gone, even by `kill -9`, its socket closes: it kills its workers and ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.pool.causes import explain, is_final
from app.pool.control import ControlPage
from app.pool.messages import (
    Exited,
    Failed,
    Loaded,
    MessageDecoder,
    Spawn,
    Spawned,
    Unfit,
    Warming,
    receive_some,
    send,
)
from engine.container import name_process

if TYPE_CHECKING:
    from kernels.prepare import Verdict

__all__ = ["main"]


def main() -> None:
    """Warm up, then fork workers until the server's socket closes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(RuntimeError, ValueError):  # stderr may be closed
        faulthandler.enable()  # inherited by workers: a crash leaves a traceback in the log
    name_process("convgrad-forker")
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    send(sock, Warming(0, 0))
    try:
        if (unfit := _load_and_prove(sock)) is not None:
            send(sock, unfit)
            sock.recv(1)  # returns when the server ends
            return
    except Exception as error:
        send(sock, Failed(explain("the kernels can't be compiled or loaded", error)))
        if isinstance(error, OSError | MemoryError):
            sys.exit(1)
        raise
    # Everything alive now stays alive: collecting it would only copy the pages that workers share.
    gc.collect()
    gc.freeze()
    if send(sock, Loaded(_speed())):
        _ForkServer(sock).serve()


def _load_and_prove(sock: socket.socket) -> Unfit | None:
    """Load all kernels, which are compiled and checked before unless the cache has them, reporting progress.

    Returns what is wrong if the code does not work on this processor.
    """
    from kernels.emit.cache import is_unpacked
    from kernels.prepare import prove_loaded, read_verdict
    from kernels.target import narrower, target

    if not target().compiles:
        _load(sock)
        return None
    verdict = read_verdict()
    if verdict is None and is_unpacked():
        verdict = prove_loaded(_load(sock))
    else:
        verdict = verdict or _compile(sock)
        if verdict.unfit is None:
            _load(sock)
    return None if verdict.unfit is None else Unfit(str(target()), verdict.unfit, narrower(target()).name)


def _speed() -> float:
    from kernels.speed import tile_gflops
    from kernels.target import target

    return tile_gflops() if target().compiles else 0.0


def _compile(sock: socket.socket) -> Verdict:
    """Compile and check all kernels, reporting progress to the server."""
    from engine.compiling import compile_kernels

    def report(done: int, total: int) -> None:
        if not send(sock, Warming(9 * done, 10 * total)):  # loading everything afterwards takes a tenth of the time
            sys.exit(0)

    return compile_kernels(report)


def _load(sock: socket.socket) -> int:
    """Load every specialisation; return how many had to be compiled because the cache could not store them."""
    from numba.core import event

    _ignore_cache_write_errors()
    from kernels import warmup

    with event.install_recorder("numba:compile") as recorder:
        for done, total in warmup():
            if not send(sock, Warming(9 * total + done, 10 * total)):
                sys.exit(0)
    return sum(1 for _, occurrence in recorder.buffer if occurrence.is_start)


def _ignore_cache_write_errors() -> None:
    """Use kernels that can't be written to the cache, which are then compiled at every start, instead of failing."""
    from numba.core.caching import Cache

    save: Any = Cache.save_overload

    def save_if_possible(cache: Any, signature: Any, data: Any) -> None:
        with contextlib.suppress(OSError):
            save(cache, signature, data)

    Cache.save_overload = save_if_possible  # type: ignore[method-assign]


@dataclass(frozen=True)
class _Child:
    number: int
    pid: int
    pidfd: int


class _ForkServer:
    """Fork workers, reap them, and kill the remaining ones at the end."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = MessageDecoder()
        self._children: dict[int, _Child] = {}  # by pidfd
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def serve(self) -> None:
        """Handle requests until the server is gone."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._children:
                    self._reap(self._children.pop(descriptor))
                elif not self._listen():
                    self._end()
                    return

    def _listen(self) -> bool:
        if not receive_some(self._sock, self._decoder):
            return False
        while (found := self._decoder.next()) is not None:
            message, descriptors = found
            assert isinstance(message, Spawn)
            self._fork(message.number, *descriptors)
        return True

    def _fork(self, number: int, sock: int, page: int) -> None:
        try:
            pid = os.fork()
            if pid == 0:
                self._become_worker(sock, page)
        except OSError as error:  # out of processes or memory; the closed socket tells the server of this worker's end
            send(self._sock, Failed(explain("workers can't be forked", error), is_final(error)))
            return
        finally:
            os.close(sock)
            os.close(page)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            send(self._sock, Failed(explain("workers can't be watched", error), is_final(error)))
            return
        child = _Child(number, pid, pidfd)
        self._children[child.pidfd] = child
        self._poll.register(child.pidfd, select.POLLIN)
        send(self._sock, Spawned(number, pid), [child.pidfd])

    def _become_worker(self, sock: int, page: int) -> None:
        code = 1
        try:
            # Descriptors inherited from the fork server would hide that other processes have ended.
            self._sock.close()
            for pidfd in self._children:
                os.close(pidfd)
            from app.pool.worker import work

            control = ControlPage(page)
            os.close(page)
            work(socket.socket(fileno=sock), control)
            code = 0
        except BaseException:  # noqa: BLE001 - a worker must never return into the fork server's stack
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    def _reap(self, child: _Child) -> None:
        self._poll.unregister(child.pidfd)
        os.close(child.pidfd)
        _, status = os.waitpid(child.pid, 0)
        send(self._sock, Exited(child.number, os.waitstatus_to_exitcode(status)))

    def _end(self) -> None:
        for child in self._children.values():
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        for child in self._children.values():
            os.waitpid(child.pid, 0)


if __name__ == "__main__":
    main()
