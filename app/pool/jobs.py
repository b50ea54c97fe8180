"""Jobs: what is computed on which memory, units to run again, and fair shares of the workers' time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from app.pool.buffers import Segment
from convgrad._errors import ConvgradError, Overloaded, ShuttingDown
from engine.threads import Stages
from kernels import Plan, Unit

__all__ = ["FairQueue", "Job", "JobRun", "no_workers", "shutting_down", "uninterrupted"]

# By then a service manager may have started another process.
_RETRY_AFTER_S = 5
# A crash counts for more than a kill from outside, whose cause is rarely the unit.
_CRASH_BLAME, _KILL_BLAME, _BLAME_LIMIT = 3, 1, 6


@dataclass(eq=False, slots=True)
class Job:
    """One planned problem with its memory: inputs in the problem's order, C-contiguous in the storage dtype.

    `deadline` is a `time.monotonic()` time. Scheduling is fair between owners: the jobs of one `owner` share its time,
    and so do those of one `connection`. Each unit of a `short` job takes some ten milliseconds at most.
    `units` are those to compute, all of the plan's unless they are given; `on_unit` is called with each that is done.
    Workers compute on segments.
    """

    id: str
    plan: Plan
    inputs: tuple[Segment, ...]
    output: Segment
    scratch: Segment | None = None
    deadline: float | None = None
    owner: str = ""
    connection: int = 0
    short: bool = False
    units: tuple[Unit, ...] | None = None
    on_unit: Callable[[Unit], object] | None = None
    queue_s: float | None = None
    """Seconds that the first unit waited for a worker, once it has one."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All memory that its units read or write."""
        return *self.inputs, self.output, *((self.scratch,) if self.scratch else ())


class JobRun(Stages):
    """The state of one job in the pool.

    A job is *settled* when it is over and no worker has a unit of it: only then is its memory released.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.since = time.monotonic()
        self.error: ConvgradError | None = None
        self.settled = asyncio.Event()
        # Keeps the segments' memory from being reused until the job is settled, even if their owner releases them.
        self._holds: tuple[object, ...] = tuple(segment.view for segment in job.segments)
        self._deaths: dict[int, int] = {}
        super().__init__(job.plan.units if job.units is None else job.units, job.plan.stages)

    @property
    def over(self) -> bool:
        """Whether no unit is left to compute."""
        return self.error is not None or super().over

    @property
    def remaining(self) -> int:
        """Units that are not done."""
        return 0 if self.error else sum(self._left)

    def done(self, unit: Unit) -> None:
        """Record a unit that a worker finished."""
        super().done(unit)
        if self.error is None and self.job.on_unit is not None:
            self.job.on_unit(unit)
        self._settle()

    def requeue(self, unit: Unit) -> None:
        """Put an unfinished unit back at the front of its stage."""
        super().requeue(unit)
        self._settle()

    def lost(self, unit: Unit, *, killed: bool) -> bool:
        """Count a worker's death during this unit; return whether the unit is to blame (two crashes or six kills)."""
        self._deaths[unit.index] = self._deaths.get(unit.index, 0) + (_KILL_BLAME if killed else _CRASH_BLAME)
        return self._deaths[unit.index] >= _BLAME_LIMIT

    def fail(self, error: ConvgradError) -> None:
        """End the job with an error; only the first one counts. Units on workers still have to be returned."""
        if not self.over:
            self.error = error
        self._settle()

    def _settle(self) -> None:
        if self.over and not self.running:
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
        """Remove a job that is settled."""
        self._runs.remove(run)
        left = {part for other in self._runs for part in _path(other)}
        self._used = {part: used for part, used in self._used.items() if part in left}

    def charge(self, run: JobRun, seconds: float) -> None:
        """Count the time of a unit."""
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
                running[part] += run.running
        order = {part: (used, running[part], place) for place, (part, used) in enumerate(self._used.items())}
        return min(waiting, key=lambda run: [order[part] for part in _path(run)])

    def __iter__(self) -> Iterator[JobRun]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)


def _path(run: JobRun) -> tuple[object, ...]:
    job = run.job
    return job.owner, (job.owner, job.connection), run


def shutting_down() -> ShuttingDown:
    """Return the error of requests and jobs when the service ends."""
    return ShuttingDown("the service is shutting down", retry_after=_RETRY_AFTER_S)


def no_workers() -> Overloaded:
    """Return the error of requests and jobs when no worker can be started."""
    message = "the service has no workers; /readyz has the cause"
    return Overloaded(message, retry_after=_RETRY_AFTER_S, data={"reason": "failed"})


async def uninterrupted(work: Awaitable[object]) -> None:
    """Wait for `work` to the end, delaying a cancellation until then."""
    waiting, cancelled = asyncio.ensure_future(work), False
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
