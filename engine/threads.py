"""Run the units of planned jobs on threads of this process; they compute without the GIL.

The calling thread computes too. The others are our own, or, once PyTorch is loaded, those of its OpenMP: these spin on
their processors after each of PyTorch's operations, so that threads of our own would compete with them.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, cached_property
from mmap import mmap
from pathlib import Path

import numpy as np

from convgrad._errors import Cancelled, DeadlineExceeded
from kernels import Plan, Unit, run_unit, storage_dtype
from kernels.plan import Storage

__all__ = ["Job", "OnUnit", "Stages", "Stop", "run"]

_MOST_THREADS = 256
_ALONE = 5_000_000
"""Multiply-adds, a tenth of a millisecond: another thread would take as long to begin."""

_PACKAGES = {"convgrad", "engine", "kernels", "schemas", "verify"}
_OPENMP = re.compile(r"/torch(\.libs)?/.*lib(gomp|iomp5|omp)\b[^/]*$")


Buffer = memoryview | mmap


class Stop:
    """Ends running units once it is `set`, or the `deadline` (`time.monotonic()`) has passed."""

    __slots__ = ("deadline", "is_set")

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = deadline
        self.is_set = False

    def set(self) -> None:
        """Stop."""
        self.is_set = True

    def __call__(self) -> bool:
        """Whether to stop: units look every few milliseconds."""
        return self.is_set or (self.deadline is not None and time.monotonic() >= self.deadline)

    def check(self) -> None:
        """Raise `Cancelled` or `DeadlineExceeded` if units are stopped."""
        if self.is_set:
            raise Cancelled("the caller cancelled the call")
        if self():
            raise DeadlineExceeded("the deadline passed before the result was complete")


@dataclass(eq=False, slots=True)
class Job:
    """One planned problem with its memory, as `kernels.run_unit` takes it."""

    plan: Plan
    inputs: Sequence[Storage]
    output: Storage
    scratch: Storage | None = None

    @classmethod
    def over(cls, plan: Plan, inputs: Sequence[Buffer], output: Buffer, scratch: Buffer | None) -> Job:
        """Return the job on memory that holds its tensors from byte 0."""
        problem, stored = plan.problem, storage_dtype(plan.problem.dtype)
        arrays = [np.ndarray(shape, stored, data) for data, shape in zip(inputs, problem.input_shapes, strict=True)]
        result = np.ndarray(problem.output_shape, problem.output_dtype, output)
        return cls(plan, arrays, result, None if scratch is None else np.ndarray(plan.scratch_bytes, np.uint8, scratch))


OnUnit = Callable[[Job, Unit], object]
"""Called after each unit, in the thread that computed it, by one thread at a time."""


def run(jobs: Sequence[Job], threads: int, stop: Stop, on_unit: OnUnit | None = None) -> None:
    """Run all units of the jobs on at most so many threads; the bits of the outputs do not depend on their number.

    Raises what a unit raises, `Cancelled` and `DeadlineExceeded`. After an exception, also `KeyboardInterrupt`, no
    thread works on the jobs any more, and the outputs are undefined.
    """
    if sum([job.plan.macs for job in jobs]) < _ALONE:
        threads = 1
    if threads > 1 and (threads := min(threads, sum([len(job.plan.units) for job in jobs]))) > 1:
        work = _Work(jobs, stop, on_unit)
        _team()(work, threads)
        work.check()
        return
    for job in jobs:
        for unit in job.plan.units:
            if stop() or not run_unit(job.plan, unit, job.inputs, job.output, job.scratch, stop):
                stop.check()
            if on_unit is not None:
                on_unit(job, unit)


class Stages:
    """Units that are not done, each in one of so many stages: those of a stage run when all of the one before are."""

    def __init__(self, units: Sequence[Unit], stages: int) -> None:
        self.running = 0
        """Units that were taken, and are neither done nor put back."""
        self._waiting = [deque[Unit]() for _ in range(stages)]
        for unit in units:
            self._waiting[unit.stage].append(unit)
        self._left = [len(waiting) for waiting in self._waiting]
        self._stage = 0
        self._advance()

    @property
    def over(self) -> bool:
        """Whether no unit is left."""
        return self._stage == len(self._left)

    @property
    def waiting(self) -> int:
        """Number of units that may be taken now."""
        return 0 if self.over else len(self._waiting[self._stage])

    def take(self) -> Unit:
        """Take the next unit; there must be one."""
        self.running += 1
        return self._waiting[self._stage].popleft()

    def done(self, unit: Unit) -> None:
        """Note that a unit is done."""
        self.running -= 1
        self._left[unit.stage] -= 1
        self._advance()

    def requeue(self, unit: Unit) -> None:
        """Put a unit back at the front of its stage."""
        self.running -= 1
        self._waiting[unit.stage].appendleft(unit)

    def _advance(self) -> None:
        while self._stage < len(self._left) and not self._left[self._stage]:
            self._stage += 1


class _Work:
    """What several threads `do`: the units of all jobs."""

    def __init__(self, jobs: Sequence[Job], stop: Stop, on_unit: OnUnit | None) -> None:
        self._open = [(job, Stages(job.plan.units, job.plan.stages)) for job in jobs]
        self._stop = stop
        self._on_unit = on_unit
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._ended = False

    def do(self) -> None:
        """Run units until none is left; called by each thread. Raises nothing."""
        try:
            while (taken := self._take()) is not None:
                job, stages, unit = taken
                finished = run_unit(job.plan, unit, job.inputs, job.output, job.scratch, self._stop)
                with self._changed:
                    stages.done(unit)
                    if finished and self._on_unit is not None and not self._ended:
                        self._on_unit(job, unit)
                    self._ended = self._ended or not finished
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - of whichever thread, the caller raises it
            self.end(error)

    def check(self) -> None:
        """Raise what ended the work early, if anything did."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # it refers to this frame, and the frame to it
        if self._ended:
            self._stop.check()

    def _take(self) -> tuple[Job, Stages, Unit] | None:
        """Wait for a unit that may run; None when there will be none."""
        with self._changed:
            while True:
                if self._ended or self._stop():
                    self._ended = True
                    self._changed.notify_all()
                    return None
                self._open = [(job, stages) for job, stages in self._open if not stages.over]
                if not self._open:
                    return None
                for job, stages in self._open:
                    if stages.waiting:
                        return job, stages, stages.take()
                self._changed.wait()

    def end(self, error: BaseException) -> None:
        """End the work early: `check` raises the first error."""
        self._stop.set()
        with self._changed:
            self._error = self._error or error
            self._ended = True
            self._changed.notify_all()


Team = Callable[[_Work, int], None]
"""Has so many threads, this one among them, do the work, and returns when all of them have."""


@cache
def _own_threads() -> ThreadPoolExecutor:
    """Threads of our own, started as they are needed."""
    return ThreadPoolExecutor(_MOST_THREADS, "convgrad")


def _own_team(work: _Work, threads: int) -> None:
    helpers: list[Future[None]] = []
    try:
        helpers += [_own_threads().submit(work.do) for _ in range(threads - 1)]
        work.do()
    except BaseException as error:  # noqa: BLE001 - an interrupt between two units, which `check` raises
        work.end(error)
    finally:
        wait([helper for helper in helpers if not helper.cancel()])  # one that has not begun finds no work


_CALLED = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _openmp() -> Team | None:
    """The threads of the OpenMP library that PyTorch has loaded; LLVM's and Intel's have GNU's entry too."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        path = next((line.split(None, 5)[-1] for line in lines if _OPENMP.search(line)), None)
        parallel = None if path is None else ctypes.CDLL(path).GOMP_parallel
    except (OSError, AttributeError):
        return None
    if parallel is None:
        return None

    def team(work: _Work, threads: int) -> None:
        parallel(_CALLED(lambda _: work.do()), None, ctypes.c_uint(threads), ctypes.c_uint(0))

    return team


def _team() -> Team:
    return (_openmp() if "torch" in sys.modules else None) or _own_team


_threads = 1
"""Those of this process at its last fork."""


def _before_fork() -> None:
    global _threads
    _threads = threading.active_count()


def _in_child() -> None:
    """Start anew: no thread survives a fork, and OpenMP's can't be started again."""
    _own_threads.cache_clear()
    globals()["_team"] = lambda: _own_team
    if _threads > 1 and sys.version_info < (3, 12):  # without need it would copy pages that processes share
        _unlock_properties()


def _unlock_properties() -> None:
    """Unlock our cached properties: before Python 3.12, one that another thread was computing is locked for ever."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _PACKAGES:
            classes = [each for each in vars(module).values() if isinstance(each, type)]
            for each in [value for kind in classes for value in vars(kind).values()]:
                if isinstance(each, cached_property):
                    each.lock = threading.RLock()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
