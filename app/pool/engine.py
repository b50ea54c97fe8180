"""The interface of an engine: jobs in, finished units out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from app.pool.buffers import Segment
from app.pool.messages import Unfit
from kernels import Plan, Unit

__all__ = ["Arrival", "Delivery", "Engine", "Job", "JobTimes", "uninterrupted"]


@dataclass(slots=True)
class JobTimes:
    """Times that an engine measures for one job while it runs, in seconds.

    `queue_s` is None until the first unit is on a worker; `compute_s` adds up all workers.
    """

    queue_s: float | None = None
    compute_s: float = 0.0
    retried_units: int = 0


@dataclass(slots=True)
class Delivery:
    """Whether units are delivered one by one, or only the end is."""

    each: bool = True


class Arrival:
    """Count the leading images of a job's inputs that have arrived, while the others are still being received."""

    def __init__(self, images: int) -> None:
        self.images = images
        self.on_more: Callable[[], object] = lambda: None

    def advance(self, images: int) -> None:
        """Set the number of images that have arrived; `on_more` is called when it has grown."""
        if images > self.images:
            self.images = images
            self.on_more()


@dataclass(frozen=True, eq=False)
class Job:
    """One planned problem with its memory: inputs in the problem's order, C-contiguous in the storage dtype.

    `deadline` is a `time.monotonic()` time. Scheduling is fair between owners: the jobs of one `owner` share its turns.
    The engine fills in `times`. With an `arrival`, a unit runs once the images it reads have arrived, or all images if
    it does not name any. The reader may change `delivery` at any time. `units` are those to compute, all of the plan's
    unless they are given.
    """

    id: str
    plan: Plan
    inputs: tuple[Segment, ...]
    output: Segment
    scratch: Segment | None = None
    deadline: float | None = None
    owner: str = ""
    arrival: Arrival | None = None
    times: JobTimes = field(default_factory=JobTimes)
    delivery: Delivery = field(default_factory=Delivery)
    units: tuple[Unit, ...] | None = None


class Engine(Protocol):
    """Compute the units of jobs outside the server process."""

    on_change: Callable[[], None]
    """Called when a worker has become ready, starting one has failed, or the compiled code turns out not to work."""

    @property
    def ready(self) -> bool:
        """Whether jobs are accepted: workers are ready or being replaced, and `stop` was not called."""

    @property
    def workers(self) -> tuple[int, int]:
        """Number of workers that are ready, and the number wanted."""

    @property
    def failure(self) -> str | None:
        """Why workers are missing, in one line; None when none failed to start."""

    @property
    def given_up(self) -> bool:
        """Whether so many attempts to start a worker have failed that no more are made."""

    def progress(self) -> float:
        """Return the share of the warm-up that is done, 0 to 1."""

    @property
    def unfit(self) -> Unfit | None:
        """Why the compiled code does not work on this processor, if so; such an engine never becomes ready."""

    async def start(self) -> None:
        """Begin to warm up, in the background."""

    async def stop(self, drain_s: float) -> None:
        """Refuse new jobs, give running ones `drain_s` seconds to finish, fail the rest, and end every process.

        A second call, even during the first, may shorten the drain.
        """

    def run(self, job: Job) -> AsyncGenerator[Unit, None]:
        """Compute a job and yield its units in the order in which they complete, or none without `Delivery.each`.

        Closing the generator cancels the job. The generator ends only when no worker can write to the job's
        segments any more. Raises `DeadlineExceeded`, `WorkerLost`, `ShuttingDown`, `Overloaded` and `InternalError`.
        """

    def snapshot(self) -> dict[str, Any]:
        """Describe workers, queue and counters."""


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
