"""Scheduling without processes: the stages of a job, units to run again, and fair shares of the workers' time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterator

from app.pool.engine import Job
from convgrad._errors import ConvgradError
from kernels import Unit

__all__ = ["FairQueue", "JobRun"]

# A crash counts for more than a kill from outside, whose cause is rarely the unit.
_CRASH_BLAME, _KILL_BLAME, _BLAME_LIMIT = 3, 1, 6


class JobRun:
    """The state of one job in the pool.

    A job is *settled* when it is over and no worker has a unit of it: only then is its memory released.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.since = time.monotonic()
        self.error: ConvgradError | None = None
        self.settled = asyncio.Event()
        self.on_workers = 0
        # Keeps the segments' memory from being reused until the job is settled, even if their owner releases them.
        self._holds: tuple[object, ...] = tuple(segment.view for segment in job.segments)
        self._stages = [deque[Unit]() for _ in range(job.plan.stages)]
        units = job.plan.units if job.units is None else job.units
        for unit in units:
            self._stages[unit.stage].append(unit)
        self._left = [len(units) for units in self._stages]
        self._stage = 0
        self._finished: deque[Unit] = deque()
        self._deaths: dict[int, int] = {}
        self._reader: asyncio.Future[None] | None = None
        self._advance()

    @property
    def over(self) -> bool:
        """Whether no unit is left to compute."""
        return self.error is not None or self._stage == len(self._stages)

    @property
    def waiting(self) -> int:
        """Number of units of the current stage that can run."""
        return 0 if self.over else len(self._stages[self._stage])

    @property
    def remaining(self) -> int:
        """Units that are not done."""
        return 0 if self.error else sum(self._left)

    def take(self) -> Unit:
        """Take the next unit, for a worker."""
        self.on_workers += 1
        return self._stages[self._stage].popleft()

    def done(self, unit: Unit) -> None:
        """Record a unit that a worker finished."""
        if self.error is None:
            self._left[unit.stage] -= 1
            self._finished.append(unit)
            self._advance()
        self._off_worker()

    def requeue(self, unit: Unit) -> None:
        """Put an unfinished unit back at the front of its stage."""
        if self.error is None:
            self._stages[unit.stage].appendleft(unit)
        self._off_worker()

    def lost(self, unit: Unit, *, killed: bool) -> bool:
        """Count a worker's death during this unit; return whether the unit is to blame (two crashes or six kills)."""
        self._deaths[unit.index] = self._deaths.get(unit.index, 0) + (_KILL_BLAME if killed else _CRASH_BLAME)
        return self._deaths[unit.index] >= _BLAME_LIMIT

    def fail(self, error: ConvgradError) -> None:
        """End the job with an error; only the first one counts. Units on workers still have to be returned."""
        if not self.over:
            self.error = error
            self._stages = [deque() for _ in self._stages]
        self._notify()

    async def next(self) -> Unit | None:
        """Wait for the next finished unit, or without `JobState.each` for the end; None at the end.

        Raises the error of a failed job.
        """
        while True:
            if self.error is not None:
                # A copy: the error's traceback would refer to this job and the job to the error, so that the
                # memory viewed from the reader's frames would wait for the garbage collector.
                raise type(self.error)(self.error.message, data=self.error.data)
            if self.job.state.each and self._finished:
                return self._finished.popleft()
            if self.over:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def _advance(self) -> None:
        while self._stage < len(self._stages) and self._left[self._stage] == 0:
            self._stage += 1

    def _off_worker(self) -> None:
        self.on_workers -= 1
        self._notify()

    def _notify(self) -> None:
        due = self.over or (self.job.state.each and self._finished)
        if due and self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        if self.over and self.on_workers == 0:
            self._holds = ()
            self.settled.set()


class FairQueue:
    """Share the workers' time equally between owners, between the connections of one, and between the jobs of those.

    The next unit is that of the owner, connection and job that has had the least time. One that comes counts as if it
    had had as much as the least of the others: it is next, and those who were there first wait for no more than that.
    """

    def __init__(self) -> None:
        self._runs: list[JobRun] = []
        self._used: dict[object, float] = {}  # seconds, of each part of the jobs' paths in the order of their arrival

    def add(self, run: JobRun) -> None:
        """Add a job."""
        path, others = _path(run), [_path(other) for other in self._runs]
        for level, part in enumerate(path):
            beside = [self._used[other[level]] for other in others if other[:level] == path[:level]]
            self._used.setdefault(part, min(beside, default=0.0))
        self._runs.append(run)

    def remove(self, run: JobRun) -> None:
        """Remove a job that is over."""
        self._runs.remove(run)
        left = {part for other in self._runs for part in _path(other)}
        self._used = {part: used for part, used in self._used.items() if part in left}

    def charge(self, run: JobRun, seconds: float) -> None:
        """Count the time of a unit."""
        if run in self._runs:
            for part in _path(run):
                self._used[part] += seconds

    def next(self, *, short: bool = False) -> JobRun | None:
        """Return the next job that has a unit to run, or None; with `short`, of the jobs whose units all are."""
        waiting = [run for run in self._runs if run.waiting and (run.job.short or not short)]
        if len(waiting) < 2:
            return waiting[0] if waiting else None
        running = Counter[object]()  # units whose time is not known yet
        for run in self._runs:
            for part in _path(run):
                running[part] += run.on_workers
        order = {part: (used, running[part], place) for place, (part, used) in enumerate(self._used.items())}
        return min(waiting, key=lambda run: [order[part] for part in _path(run)])

    def sole(self) -> JobRun | None:
        """Return the only job in the queue; None when there is any other number."""
        return self._runs[0] if len(self._runs) == 1 else None

    def __iter__(self) -> Iterator[JobRun]:
        return iter(self._runs)

    def __contains__(self, run: JobRun) -> bool:
        return run in self._runs


def _path(run: JobRun) -> tuple[object, ...]:
    job = run.job
    return job.owner, (job.owner, job.connection), run
