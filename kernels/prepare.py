"""Compile everything for one target in several processes, prove it on this processor, and note the verdict.

    python -m kernels.prepare [--jobs N]                  for this machine: compile what is missing, then prove it
    python -m kernels.prepare --for NAME,... | --for all  only compile, for known targets of this architecture; each
                                                          one's folder becomes an archive that any machine can take

The first form prints a line ``DONE TOTAL`` for each function that is ready, then ``verdict`` and a
`Verdict` as JSON. What can't be compiled, crashes or is wrong makes the target unfit for this machine:
`Verdict.unfit` says why, and a narrower target takes its place. Where the machine lacks memory, processes or room on a
disk for the work there is no verdict, but a last line ``failed ERRNO REASON``.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import faulthandler
import gc
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from math import inf
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

import kernels.registry  # noqa: F401 -- importing the kernels registers their compiled functions
from kernels.cache import CACHE
from kernels.emit.cache import VERDICT, cache_folder, locked, pack
from kernels.emit.compiler import ENTRIES, needs
from kernels.proof import prove
from kernels.target import BUILD, KNOWN, host_features, host_target, target

__all__ = ["Verdict", "prepare", "prove_loaded", "read_verdict"]

Report = Callable[[int, int], None]

_CONTEXT = multiprocessing.get_context("fork")

_PROVERS = 2
"""Processes that share the proof: each loads all code, which takes as long as a quarter of the trials."""

_PROOF_CPU_S = 300
"""Processor time of a proof, which takes a second of it, at the most: code that is wrong may never end."""

_OUT_OF_MEMORY = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS}
"""How a process may end that gets no memory."""


@dataclass(frozen=True)
class Verdict:
    """What is known of a target's code on this processor: why it is `unfit`, or nothing where it is proved."""

    processor: str
    compiled: int = 0
    unfit: str | None = None


def _processor() -> str:
    """Return a text that differs between processors on which the same code may behave differently."""
    text = " ".join([llvm.get_host_cpu_name(), *sorted(host_features()[0])])
    return sha256(text.encode()).hexdigest()[:16]


def _verdict_file() -> Path:
    return Path(cache_folder(), VERDICT)


def read_verdict() -> Verdict | None:
    """Return an earlier verdict on the same code on the same processor, or None."""
    try:
        verdict = Verdict(**json.loads(_verdict_file().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return verdict if verdict.processor == _processor() else None


def _note(verdict: Verdict) -> Verdict:
    file = _verdict_file()
    try:
        spare = file.with_suffix(f".{os.getpid()}")
        spare.write_text(json.dumps(asdict(verdict)), encoding="utf-8")
        spare.replace(file)
    except OSError as error:  # a full disk: the next start proves it again
        sys.stderr.write(f"{file} can't be written: {error.strerror}\n")
    return verdict


def prepare(report: Report, jobs: int) -> Verdict:
    """Compile what is missing and prove all of it, while no other process does so in the same folder.

    `report` hears how many functions of how many are ready. Raises `OSError` where the machine lacks something
    that the work takes.
    """
    if not target().compiles:
        return Verdict(_processor())
    with locked(cache_folder()):
        known = read_verdict()
        if known is not None:  # another process was faster
            return known
        compiled, wrong = compile_all(report, jobs)
        return _note(Verdict(_processor(), compiled, wrong or _proof()))


def prove_loaded(compiled: int) -> Verdict:
    """Prove the code that this process has loaded, in a process forked from it, and note the verdict.

    Raises `OSError` where the machine lacks something that the proof takes.
    """
    return _note(Verdict(_processor(), compiled, _proof()))


def compile_all(report: Report, jobs: int) -> tuple[int, str | None]:
    """Make every entry in `jobs` processes: each as soon as those that it calls are ready.

    Gives the number that the cache lacked, and what went wrong, if anything did.
    """
    waits, order = needs(ENTRIES), list(range(len(ENTRIES)))
    total = len(order)
    workers: list[_Worker] = []
    for _ in range(max(1, min(jobs, total))):
        try:
            workers.append(_Worker(_compiler, [other.pipe for other in workers]))
        except OSError:  # a limit on processes or memory: fewer do it too
            if not workers:
                raise
            break
    idle, busy = list(workers), dict[Any, tuple[_Worker, int]]()
    ready: set[int] = set()
    compiled = 0
    try:
        report(0, total)
        while len(ready) < total:
            for place in [place for place in order if waits[place] <= ready][: len(idle)]:
                order.remove(place)
                worker = idle.pop()
                worker.pipe.send(place)
                busy[worker.pipe] = worker, place
            assert busy, "every entry waits for another one"
            for pipe in wait(list(busy)):
                worker, place = busy.pop(pipe)
                try:
                    compiled += worker.answer("the compiler")
                except ArithmeticError as error:
                    return compiled, f"{ENTRIES[place].name} can't be compiled: {error}"
                idle.append(worker)
                ready.add(place)
                report(len(ready), total)
    finally:
        for worker in workers:
            worker.close()
    return compiled, None


class _Worker:
    """A process that calls what `begin` returns for each message, so that a crash ends nothing else.

    It closes the pipes to the `others`, which it inherits: they would not see our end, and keep the folder locked.
    """

    def __init__(self, begin: Callable[[], Callable[[Any], Any]], others: Sequence[Connection] = ()) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(begin, theirs, [*others, self.pipe]), daemon=True)
        self._process.start()
        theirs.close()

    def answer(self, doing: str) -> Any:
        """Wait for the answer. Raises ArithmeticError where code is wrong or crashes, `OSError` where it lacks room."""
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise ArithmeticError(f"{doing} crashes ({_how_it_ended(self._process)})") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _serve(begin: Callable[[], Callable[[Any], Any]], pipe: Connection, inherited: Sequence[Connection]) -> None:
    for other in inherited:
        other.close()
    faulthandler.disable()  # a crash becomes a verdict, not a traceback
    do = begin()
    with contextlib.suppress(EOFError, BrokenPipeError):  # whoever asked is gone
        while True:
            message = pipe.recv()
            try:
                answer = do(message)
            except ArithmeticError as error:
                answer = error
            except MemoryError:
                answer = OSError(errno.ENOMEM, "there is no memory to compile or to try code")
            except OSError as error:
                answer = OSError(error.errno or 0, error.strerror or str(error))
            except Exception as error:  # noqa: BLE001 - whatever the compiler or a wrong path raises
                lines = [line for line in str(error).splitlines() if line.strip()]
                answer = ArithmeticError(f"{type(error).__name__}: {lines[0] if lines else ''}")
            pipe.send(answer)


def _compiler() -> Callable[[int], int]:
    """Return what makes an entry and counts the functions that were compiled for it."""
    from numba.core.event import install_recorder

    def make(place: int) -> int:
        with install_recorder("numba:compile") as recorder:
            ENTRIES[place].make()
        return sum(occurrence.is_start for _, occurrence in recorder.buffer)

    gc.freeze()
    gc.set_threshold(20_000, 50, 1000)  # a seventh of the time would go to finding little garbage; 50 MB more memory
    _remember_types_of_calls()
    return make


def _remember_types_of_calls() -> None:
    """Have Numba look for the overload of a function of its own once for the same types, not for each call of it.

    It would ask all overloads of `+` whenever two integers are added: a fifteenth of the time to compile everything.
    """
    from numba.core.types import Function

    function: Any = Function
    infer = function.get_call_type

    def remembered(self: Any, context: Any, args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        known, types = vars(self).setdefault("remembered", {}), (args, *kws.items())
        if types not in known:
            known[types] = infer(self, context, args, kws)
        return known[types]

    function.get_call_type = remembered


def _proof() -> str | None:
    """Run the proof in several processes; return what is wrong, or None."""
    workers: list[_Worker] = []
    doing = dict[Any, tuple[_Worker, str]]()
    try:
        for part in range(_PROVERS):
            worker = _Worker(partial(_prover, part), [other.pipe for other in workers])
            workers.append(worker)
            doing[worker.pipe] = worker, "loading the compiled code"
            worker.pipe.send(None)
        while doing:
            for pipe in wait(list(doing)):
                worker, name = doing.pop(pipe)
                if name := worker.answer(name):
                    doing[pipe] = worker, name
                    worker.pipe.send(None)
    except ArithmeticError as error:
        return str(error)
    finally:
        for worker in workers:
            worker.close()
    return None


def _prover(part: int) -> Callable[[None], str]:
    """Return a function that ends the trial at hand and returns the name of the next one, empty after the last."""
    resource.setrlimit(resource.RLIMIT_CPU, (_PROOF_CPU_S, _PROOF_CPU_S + 10))  # then: SIGXCPU
    CACHE.limit = inf  # measuring what few small problems leave would take a third of the time
    trials = prove(part, _PROVERS)
    return lambda _: next(trials, "")


def _how_it_ended(process: multiprocessing.process.BaseProcess) -> str:
    """Name the signal or status; raises `OSError` where memory may have run out, no fault of the code."""
    process.join()
    code = process.exitcode or 0
    if code == -signal.SIGKILL:
        raise OSError(errno.ENOMEM, "a process that compiles or tries code was killed")
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if code in _OUT_OF_MEMORY and limit != resource.RLIM_INFINITY:  # LLVM aborts where it gets no memory
        how = signal.Signals(-code).name
        raise OSError(errno.ENOMEM, f"compiling ends with {how} in the {limit >> 20} MiB that ulimit -v allows")
    return signal.Signals(-code).name if code < 0 else f"status {code}"


def _known(names: str) -> Iterator[str]:
    mine = [known.name for known in KNOWN if known.arch == host_target().arch]
    for name in mine if names == "all" else names.split(","):
        if name not in mine:
            raise SystemExit(f"{name} is not a known target of this architecture: {', '.join(mine)}")
        yield name


def _say(*words: object) -> None:
    """Print a line at once, or end where nobody reads it any more."""
    try:
        print(*words, flush=True)  # noqa: T201
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would try again as it exits
        raise SystemExit(1) from None


def main() -> None:
    """Prepare this machine's target, or compile for others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: processors)"
    )
    parser.add_argument("--for", dest="names", help="known targets to compile for, separated by commas, or all")
    chosen = parser.parse_args()
    if chosen.names:
        for name in _known(chosen.names):
            started = time.monotonic()
            command = [sys.executable, "-m", f"{__package__}.prepare", "--jobs", str(chosen.jobs)]
            environment = {**os.environ, BUILD: name}
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 -- our own
            print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)  # noqa: T201
        with contextlib.suppress(OSError):
            Path(cache_folder()).rmdir()  # this process's own, which nothing was compiled into
    elif os.environ.get(BUILD):
        _, wrong = compile_all(lambda *_: None, chosen.jobs)
        if wrong:
            raise SystemExit(f"{target()}: {wrong}")
        pack(cache_folder())
    else:
        try:
            verdict = prepare(_say, chosen.jobs)
        except OSError as error:
            _say("failed", error.errno or 0, error.strerror or error)
            raise SystemExit(1) from None
        _say("verdict", json.dumps(asdict(verdict)))
        if verdict.unfit:
            raise SystemExit(f"{target()} is unfit for this processor: {verdict.unfit}")


if __name__ == "__main__":
    main()
