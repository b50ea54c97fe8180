"""Compile everything for one target in several processes, prove it on this processor, and note the verdict.

    python -m kernels.prepare [--jobs N]                  for this machine: compile what is missing, then prove it
    python -m kernels.prepare --for NAME,... | --for all  only compile, for known targets of this architecture; each
                                                          one's folder becomes an archive that any machine can take

The first form prints a line ``DONE TOTAL``, estimates of work, for each function that is ready, then ``verdict`` and a
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
from functools import cache
from hashlib import sha256
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

import kernels.registry  # noqa: F401 -- importing the kernels registers their compiled functions
from kernels.emit.cache import VERDICT, cache_folder, locked, pack
from kernels.emit.compiler import ENTRIES, needs
from kernels.proof import prove
from kernels.target import BUILD, KNOWN, host_features, host_target, target

__all__ = ["Verdict", "prepare", "prove_loaded", "read_verdict"]

Report = Callable[[int, int], None]

_CONTEXT = multiprocessing.get_context("fork")
_SMALLEST = 400
"""Bytes of code that take as long to compile as the smallest function does."""

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

    `report` hears how much work of how much is done. Raises `OSError` where the machine lacks something
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
    """Make every entry in `jobs` processes, those first on which the longest chains of others wait.

    Gives the number that the cache lacked, and what went wrong, if anything did.
    """
    waits, total = needs(ENTRIES), len(ENTRIES)
    heights, work = _heights(waits), _work()
    order = sorted(range(total), key=lambda place: (-heights[place], ENTRIES[place].function is None, place))
    compilers: list[_Compiler] = []
    for _ in range(max(1, min(jobs, total))):
        try:
            compilers.append(_Compiler([other.pipe for other in compilers]))
        except OSError:  # a limit on processes or memory: fewer do it too
            if not compilers:
                raise
            break
    ready: set[int] = set()
    compiled, wrong = 0, None
    try:
        report(0, sum(work))
        while len(ready) < total and wrong is None:
            for compiler in compilers:
                free = (place for place in order if waits[place] <= ready)
                if compiler.place is None and (place := next(free, None)) is not None:
                    order.remove(place)
                    compiler.begin(place)
            for compiler in _heard(compilers):
                place, answer = compiler.end()
                if isinstance(answer, OSError):
                    raise answer
                if isinstance(answer, str):
                    wrong = f"{ENTRIES[place].name} can't be compiled: {answer}"
                    break
                ready.add(place)
                compiled += answer
                report(sum(work[place] for place in ready), sum(work))
    finally:
        for compiler in compilers:
            compiler.close()
    return compiled, wrong


def _heights(waits: Sequence[set[int]]) -> list[int]:
    """Return the length of the longest chain of entries that wait for each one."""

    @cache
    def height(place: int) -> int:
        return max((1 + height(other) for other, needed in enumerate(waits) if place in needed), default=0)

    return [height(place) for place in range(len(waits))]


def _work() -> list[int]:
    """Estimate how long each entry takes to compile: by the bytes of its code."""
    return [_SMALLEST + (0 if entry.function is None else len(entry.function.__code__.co_code)) for entry in ENTRIES]


class _Compiler:
    """A process that compiles one entry after the other, so that a crash of the compiler ends nothing else.

    It closes the pipes to the `others`, which it inherits: they would not see our end, and keep the folder locked.
    """

    def __init__(self, others: Sequence[Connection]) -> None:
        self.place: int | None = None
        self.pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_compile_for, args=(theirs, [*others, self.pipe]), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, place: int) -> None:
        """Ask for an entry."""
        self.place = place
        self.pipe.send(place)

    def end(self) -> tuple[int, int | str | OSError]:
        """Hear how it went: how many functions were compiled for it, what is wrong with it, or what is missing."""
        place, self.place = self.place, None
        assert place is not None
        try:
            return place, self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return place, f"the compiler crashed ({_how_it_ended(self._process)})"

    def close(self) -> None:
        """End the process."""
        self.pipe.close()
        self._process.terminate()
        self._process.join()


def _heard(compilers: Sequence[_Compiler]) -> list[_Compiler]:
    busy = {compiler.pipe: compiler for compiler in compilers if compiler.place is not None}
    assert busy, "every entry waits for another one"
    return [busy[pipe] for pipe in wait(list(busy)) if isinstance(pipe, Connection)]


def _compile_for(pipe: Connection, inherited: Sequence[Connection]) -> None:
    from numba.core.event import install_recorder

    for other in inherited:
        other.close()
    gc.freeze()
    gc.set_threshold(20_000, 50, 1000)  # a seventh of the time would go to finding little garbage; 50 MB more memory
    _remember_types_of_calls()
    with contextlib.suppress(EOFError, BrokenPipeError):  # whoever asked is gone
        while True:
            place = pipe.recv()
            answer: int | str | OSError
            try:
                with install_recorder("numba:compile") as recorder:
                    ENTRIES[place].make()
                answer = sum(occurrence.is_start for _, occurrence in recorder.buffer)
            except (OSError, MemoryError) as error:
                answer = _missing(error)
            except Exception as error:  # noqa: BLE001 - whatever the compiler raises
                answer = f"{type(error).__name__}: {_first_line(error)}"
            pipe.send(answer)


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
    """Run the proof in a process of its own and say what is wrong."""
    mine, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_prove_for, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    doing = "loading the compiled code"
    try:
        while True:
            kind, text = mine.recv()
            if kind == "wrong":
                return str(text)
            if kind == "missing":
                raise text
            if kind == "proved":
                return None
            doing = text
    except (EOFError, ConnectionResetError):
        return f"{doing} crashes ({_how_it_ended(process)})"
    finally:
        process.kill()
        process.join()
        mine.close()


def _prove_for(pipe: Connection) -> None:
    faulthandler.disable()  # a crash becomes a verdict, not a traceback
    resource.setrlimit(resource.RLIMIT_CPU, (_PROOF_CPU_S, _PROOF_CPU_S + 10))  # then: SIGXCPU
    try:
        for name in prove():
            pipe.send(("doing", name))
        pipe.send(("proved", ""))
    except (OSError, MemoryError) as error:
        pipe.send(("missing", _missing(error)))
    except Exception as error:  # noqa: BLE001 - a wrong path may raise anything
        pipe.send(("wrong", str(error) if isinstance(error, ArithmeticError) else f"{type(error).__name__}: {error}"))


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


def _missing(error: OSError | MemoryError) -> OSError:
    if isinstance(error, MemoryError):
        return OSError(errno.ENOMEM, "there is no memory to compile or to try code")
    return OSError(error.errno or 0, error.strerror or str(error))


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")


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
