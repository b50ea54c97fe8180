"""The process that workers are forked from: it loads the kernels from the cache and forks on request.

Run as `python -m app.pool.fork_server DESCRIPTOR`, where the descriptor is its socket to the server. It differs from
the one of `multiprocessing`: nothing blocks while the kernels load, their progress is reported, each worker has a
pidfd, and none outlives a killed server, not even a stopped one.

It ignores the signals of a terminal or a service manager, because the server decides when workers end. When the server
is gone, even by `kill -9`, its socket closes: it kills its workers and ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    gc.disable()  # until the kernels are loaded: nearly all that imports and loading make stays alive

from app.pool.causes import explain, is_final
from app.pool.messages import Failed, Loaded, Spawned, Unfit, Warming, pair, receive, send
from engine.container import name_process

__all__ = ["main"]


def main() -> None:
    """Warm up, then fork workers until the server's socket closes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(RuntimeError, ValueError):  # stderr may be closed
        faulthandler.enable()  # inherited by workers: a crash leaves a traceback in the log
    name_process("convgrad-forker")
    server = socket.socket(fileno=int(sys.argv[1]))
    server.set_inheritable(False)
    with contextlib.suppress(ConnectionError):  # the server is gone
        send(server, warm := _warm_up(server))
        if not isinstance(warm, Failed):
            _serve(server)


def _warm_up(server: socket.socket) -> Loaded | Unfit | Failed:
    """Load and prove the kernels; return whether workers can be forked."""
    try:
        if (unfit := _load_and_prove(server)) is not None:
            return unfit
        from app.pool import worker  # noqa: F401 -- once, not in every worker
        from kernels.speed import tile_gflops
        from kernels.target import target

        # Everything alive now stays alive: collecting it would only copy the pages that workers share.
        gc.collect()
        gc.freeze()
        gc.enable()
        return Loaded(tile_gflops() if target().compiles else 0.0)
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001 - the server reports it
        if not isinstance(error, OSError | MemoryError):
            traceback.print_exc()
        return Failed(explain("the kernels can't be compiled or loaded", error))


def _load_and_prove(server: socket.socket) -> Unfit | None:
    """Load all kernels, which are compiled and checked before unless the cache has them, reporting progress.

    Returns what is wrong if the code does not work on this processor.
    """
    send(server, Warming(0, 0))
    from engine.compiling import compile_kernels
    from kernels.emit.cache import is_unpacked
    from kernels.prepare import prove_loaded, read_verdict
    from kernels.target import narrower, target

    def report(done: int, total: int) -> None:
        send(server, Warming(done, total))

    def compiled(done: int, total: int) -> None:
        report(9 * done, 10 * total)  # loading takes a tenth of the time
        if done == total:  # all is there, and another process proves it
            with contextlib.suppress(Exception):  # code that can't be loaded is unfit: the proof says why
                _load(report)

    if not target().compiles:
        _load(report)
        return None
    verdict = read_verdict()
    if verdict is None and is_unpacked():
        verdict = prove_loaded(_load(report))
    else:
        if verdict is None:
            gc.enable()  # what can't be stored is compiled here, which leaves much behind
        verdict = verdict or compile_kernels(compiled)
        if verdict.unfit is None:
            _load(report)
    return None if verdict.unfit is None else Unfit(str(target()), verdict.unfit, narrower(target()).name)


def _load(report: Callable[[int, int], None]) -> int:
    """Load every specialisation; return how many had to be compiled because the cache could not store them."""
    from numba.core import event

    _ignore_cache_write_errors()
    from kernels import warmup

    with event.install_recorder("numba:compile") as recorder:
        for done, total in warmup():
            report(9 * total + done, 10 * total)
    return sum(1 for _, occurrence in recorder.buffer if occurrence.is_start)


def _ignore_cache_write_errors() -> None:
    """Use kernels that can't be written to the cache, which are then compiled at every start, instead of failing."""
    from numba.core.caching import Cache

    save: Any = Cache.save_overload

    def save_if_possible(cache: Any, signature: Any, data: Any) -> None:
        with contextlib.suppress(OSError):
            save(cache, signature, data)

    Cache.save_overload = save_if_possible  # type: ignore[method-assign]


def _serve(server: socket.socket) -> None:
    """Fork a worker for each message, which has the ids of dead ones to reap; kill those that are left at the end."""
    workers = set[int]()  # not reaped, so that their process ids are not reused
    try:
        while (found := receive(server)) is not None:
            for pid in workers & set(found[0]):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    workers.remove(pid)
            try:
                _fork(server, workers)
            except ConnectionError:
                raise
            except OSError as error:  # out of processes, memory or descriptors
                send(server, Failed(explain("workers can't be forked", error), is_final(error)))
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        for pid in workers:
            os.waitpid(pid, 0)


def _fork(server: socket.socket, workers: set[int]) -> None:
    """Fork a worker and send its socket and pidfd; without them the worker ends by itself."""
    ours, theirs = pair()
    with ours, theirs:
        pid = os.fork()
        if pid == 0:
            try:
                # An inherited descriptor would hide that another process has ended.
                server.close()
                ours.close()
                from app.pool.worker import work

                work(theirs)
            except BrokenPipeError:  # the server has hung up
                os._exit(0)
            except BaseException:  # noqa: BLE001 - a worker must never return into the fork server's stack
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        workers.add(pid)
        pidfd = os.pidfd_open(pid)
        try:
            send(server, Spawned(pid), [ours.fileno(), pidfd])
        finally:
            os.close(pidfd)


if __name__ == "__main__":
    main()
