"""Which unit is next: jobs, their stages, their lost units, and turns between jobs. No processes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator

from app.pool.engine import Job
from convgrad._errors import ConvgradError
from kernels import Unit

__all__ = ["FairQueue", "JobRun"]

# A crash counts for more than a kill from outside: that mostly has other reasons than the unit.
_CRASH, _KILL, _BLAMED = 3, 1, 6


class JobRun:
    """One job's way through the pool.

    It is *settled* when it is over and none of its units is on a worker: only then is its memory let go.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.since = time.monotonic()
        self.error: ConvgradError | None = None
        self.settled = asyncio.Event()
        self.on_workers = 0
        segments = (*job.inputs, job.output, *((job.scratch,) if job.scratch else ()))
        # Whatever the owner of the segments does, their memory stays this job's until it is settled.
        self._holds: tuple[object, ...] = tuple(segment.hold() for segment in segments)
        self._stages = [deque[Unit]() for _ in range(job.plan.stages)]
        for unit in job.plan.units:
            self._stages[unit.stage].append(unit)
        self._left = [len(units) for units in self._stages]
        self._stage = 0
        self._finished: deque[Unit] = deque()
        self._undelivered = len(job.plan.units)
        self._deaths: dict[int, int] = {}
        self._reader: asyncio.Future[None] | None = None
        self._advance()

    @property
    def over(self) -> bool:
        """Whether no unit of the job has to be computed any more."""
        return self.error is not None or self._stage == len(self._stages)

    @property
    def waiting(self) -> int:
        """Units of the stage that are not on a worker; none while the first one's inputs are on their way."""
        units = () if self.over else self._stages[self._stage]
        return len(units) if units and self._has_inputs(units[0]) else 0

    @property
    def remaining(self) -> int:
        """Units that are not done."""
        return 0 if self.error else sum(self._left)

    def take(self) -> Unit:
        """Take the next unit to a worker."""
        self.on_workers += 1
        return self._stages[self._stage].popleft()

    def done(self, unit: Unit) -> None:
        """Book a unit that a worker finished."""
        if self.error is None:
            self._left[unit.stage] -= 1
            self._finished.append(unit)
            self._advance()
        self._off_worker()

    def again(self, unit: Unit) -> None:
        """Put a unit back that was not finished, before the others: its stage waits for it."""
        if self.error is None:
            self._stages[unit.stage].appendleft(unit)
        self._off_worker()

    def lost(self, unit: Unit, *, killed: bool) -> bool:
        """Count a worker's death at this unit; tell whether the unit is to blame: for two crashes, or six kills."""
        self.job.times.retried_units += 1
        self._deaths[unit.index] = self._deaths.get(unit.index, 0) + (_KILL if killed else _CRASH)
        return self._deaths[unit.index] >= _BLAMED

    def fail(self, error: ConvgradError) -> None:
        """End the job; units on workers are still to be accounted for. Only the first error counts."""
        if not self.over:
            self.error = error
            self._stages = [deque() for _ in self._stages]
        self._settle()

    async def next(self) -> Unit | None:
        """Wait for the next finished unit; None after the last. Raises the error of a failed job."""
        while True:
            if self.error is not None:
                # Not the error itself: its traceback would hold this job, and the job the error, and the
                # memory that the reader's frames view would wait for the garbage collector.
                raise type(self.error)(self.error.message, data=self.error.data)
            if self._finished:
                self._undelivered -= 1
                return self._finished.popleft()
            if self._undelivered == 0:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def _has_inputs(self, unit: Unit) -> bool:
        arrival = self.job.arrival
        needed = self.job.plan.problem.n if unit.images is None else unit.images
        return arrival is None or needed <= arrival.images

    def _advance(self) -> None:
        while self._stage < len(self._stages) and self._left[self._stage] == 0:
            self._stage += 1

    def _off_worker(self) -> None:
        self.on_workers -= 1
        self._settle()

    def _settle(self) -> None:
        news = self.over or (self.job.demand.each and self._finished)
        if news and self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        if self.over and self.on_workers == 0:
            self._holds = ()
            self.settled.set()


class FairQueue:
    """Take turns: each owner gives one unit to a worker, of its jobs each in turn, then the next owner's turn comes."""

    def __init__(self) -> None:
        self._owners: dict[str, deque[JobRun]] = {}  # whose turn it is comes first

    def add(self, run: JobRun) -> None:
        """Let a job take part."""
        self._owners.setdefault(run.job.owner, deque()).append(run)

    def remove(self, run: JobRun) -> None:
        """Take a job out that is over."""
        runs = self._owners[run.job.owner]
        runs.remove(run)
        if not runs:
            del self._owners[run.job.owner]

    def next(self) -> JobRun | None:
        """Return the job whose turn it is among those with a waiting unit."""
        for owner, runs in self._owners.items():
            for _ in range(len(runs)):
                run = runs[0]
                runs.rotate(-1)
                if run.waiting:
                    # To the end: a dictionary keeps the order of insertion.
                    self._owners[owner] = self._owners.pop(owner)
                    return run
        return None

    def sole(self) -> JobRun | None:
        """Return the job that is here alone."""
        if len(self._owners) == 1:
            (runs,) = self._owners.values()
            if len(runs) == 1:
                return runs[0]
        return None

    def __iter__(self) -> Iterator[JobRun]:
        return iter([run for runs in self._owners.values() for run in runs])

    def __contains__(self, run: JobRun) -> bool:
        return run in self._owners.get(run.job.owner, ())
