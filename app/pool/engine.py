"""The jobs of an engine, their measurements, and how their units are delivered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field

from app.pool.buffers import Segment
from convgrad._errors import Overloaded, ShuttingDown
from kernels import Plan, Unit

__all__ = ["Job", "JobState", "no_workers", "shutting_down", "uninterrupted"]

# By then a service manager may have started another process.
_RETRY_AFTER_S = 5


@dataclass(slots=True)
class JobState:
    """What reader and engine of a job tell each other while it runs.

    The reader sets whether units are delivered one by one, or only the end is; the engine, how many seconds the first
    unit waited for a worker.
    """

    each: bool = True
    queue_s: float | None = None


@dataclass(frozen=True, eq=False)
class Job:
    """One planned problem with its memory: inputs in the problem's order, C-contiguous in the storage dtype.

    `deadline` is a `time.monotonic()` time. Scheduling is fair between owners: the jobs of one `owner` share its time,
    and so do those of one `connection`. Each unit of a `short` job takes some ten milliseconds at most.
    `units` are those to compute, all of the plan's unless they are given. Workers compute on segments.
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
    state: JobState = field(default_factory=JobState)
    units: tuple[Unit, ...] | None = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All memory that its units read or write."""
        return *self.inputs, self.output, *((self.scratch,) if self.scratch else ())


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
