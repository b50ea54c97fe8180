"""What every engine is: jobs in, finished units out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from app.pool.buffers import Segment
from app.pool.messages import Unfit
from kernels import Plan, Unit

__all__ = ["Arrival", "Demand", "Engine", "Job", "JobTimes"]


@dataclass(slots=True)
class JobTimes:
    """What an engine measures of one job while it runs, in seconds.

    `queue_s` is None until the first unit is on a worker; `compute_s` adds up all workers.
    """

    queue_s: float | None = None
    compute_s: float = 0.0
    retried_units: int = 0


@dataclass(slots=True)
class Demand:
    """How a job's reader wants its units: each as soon as it is done, or all when the last one is."""

    each: bool = True


class Arrival:
    """Tell how many leading images of a job's inputs are there, while the others are still on their way."""

    def __init__(self, images: int) -> None:
        self.images = images
        self.on_more: Callable[[], object] = lambda: None

    def advance(self, images: int) -> None:
        """Note that so many are there; the engine hears of it when they are more than before."""
        if images > self.images:
            self.images = images
            self.on_more()


@dataclass(frozen=True, eq=False)
class Job:
    """One planned problem with its memory: inputs in the problem's order, C-contiguous in the storage dtype.

    `deadline` is a time of `time.monotonic()`. The jobs of one `owner` share the turns that they get. The engine
    fills `times`. Where there is an `arrival`, a unit runs when the images that it reads are there: all, when it does
    not say which. The reader may change its `demand` at any time.
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
    demand: Demand = field(default_factory=Demand)


class Engine(Protocol):
    """Compute the units of jobs somewhere else than in the server's process."""

    on_change: Callable[[], None]
    """Called when a worker has answered, a try to get one has failed, or the code turns out to be unfit."""

    @property
    def ready(self) -> bool:
        """Whether jobs are computed at once: workers have answered, or their successors are on their way, no stop."""

    @property
    def workers(self) -> tuple[int, int]:
        """How many workers have answered, and how many there should be."""

    @property
    def failure(self) -> str | None:
        """Why there are fewer workers than there should be, in one line; None when no try has failed."""

    @property
    def given_up(self) -> bool:
        """Whether so many tries to get a worker have failed that no other is made."""

    def progress(self) -> float:
        """Give the share of the warm-up that is done, 0 to 1."""

    @property
    def unfit(self) -> Unfit | None:
        """Why the compiled code does not work on this processor, if it does not: then it is never ready."""

    async def start(self) -> None:
        """Begin to warm up, in the background."""

    async def stop(self, drain_s: float) -> None:
        """Refuse new jobs, let running ones finish for `drain_s`, fail the rest, and leave nothing behind.

        A second call, also during the first, shortens the drain to its own time.
        """

    def run(self, job: Job) -> AsyncGenerator[Unit, None]:
        """Compute a job and yield each unit when its work is done, in the order of completion.

        Closing the generator cancels the job. However it ends, it ends only when no worker can write to the
        job's segments any more. Raises DeadlineExceeded, WorkerLost, ShuttingDown, Overloaded and
        InternalError.
        """

    def snapshot(self) -> dict[str, Any]:
        """Describe workers, queue and counters for metrics and for people."""
