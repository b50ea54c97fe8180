"""The engine that computes on worker processes of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from app.pool.buffers import SegmentPool
from app.pool.engine import Job
from app.pool.messages import Unfit
from app.pool.supervisor import Supervisor
from convgrad._errors import Cancelled
from kernels import Unit

__all__ = ["LocalEngine", "uninterrupted"]

_TRIM_EVERY_S = 5.0


class LocalEngine:
    """Compute jobs on `workers` processes that share the memory of `segments` (see `Engine`).

    A worker that does not stop within `grace_s` is killed, and so is one without a heartbeat for `hang_s` during a
    unit. Unused memory is kept for reuse for `idle_s`. All times are in seconds.
    """

    def __init__(
        self,
        segments: SegmentPool,
        *,
        workers: int,
        grace_s: float = 0.02,
        hang_s: float = 5.0,
        idle_s: float = 60.0,
    ) -> None:
        self._segments = segments
        self._make = partial(Supervisor, workers, grace_s=grace_s, hang_s=hang_s)
        self._supervisor = self._make()
        self._idle_s = idle_s
        self.on_change: Callable[[], None] = lambda: None
        """See `Engine.on_change`."""
        self._trimmer: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether jobs are accepted."""
        return self._supervisor.ready

    @property
    def workers(self) -> tuple[int, int]:
        """Number of workers that are ready, and the number wanted."""
        return self._supervisor.workers

    @property
    def failure(self) -> str | None:
        """Why workers are missing."""
        return self._supervisor.failure

    @property
    def given_up(self) -> bool:
        """Whether no more attempts to start a worker are made."""
        return self._supervisor.given_up

    def progress(self) -> float:
        """Return the share of the warm-up that is done, 0 to 1."""
        return self._supervisor.progress()

    @property
    def unfit(self) -> Unfit | None:
        """Why the compiled code does not work on this processor, if so."""
        return self._supervisor.unfit

    async def start(self) -> None:
        """Begin to warm up, in the background; possible again after `stop`."""
        self._supervisor = self._make()
        loop = asyncio.get_running_loop()
        forget = self._supervisor.forget_segment
        # Segments are freed in whichever thread needs the memory.
        self._segments.on_retire = lambda number: loop.call_soon_threadsafe(forget, number)
        self._supervisor.on_change = lambda: self.on_change()
        self._supervisor.start()
        self._trimmer = loop.create_task(self._trim())

    async def stop(self, drain_s: float) -> None:
        """Refuse new jobs, finish or fail the running ones, end every process (see `Engine.stop`)."""
        await self._supervisor.stop(drain_s)
        self._segments.on_retire = None
        if self._trimmer is not None:
            self._trimmer.cancel()

    async def run(self, job: Job) -> AsyncGenerator[Unit, None]:
        """Compute a job and yield its units as they complete (see `Engine.run`)."""
        run = self._supervisor.submit(job)
        try:
            while (unit := await run.next()) is not None:
                yield unit
        finally:
            if not run.over:
                self._supervisor.fail(run, Cancelled("the call was cancelled"))
            if not run.settled.is_set():
                await uninterrupted(run.settled.wait())

    def snapshot(self) -> dict[str, Any]:
        """Describe workers, queue, memory and counters."""
        return {**self._supervisor.snapshot(), "segments": self._segments.stats()}

    async def _trim(self) -> None:
        while True:
            await asyncio.sleep(_TRIM_EVERY_S)
            with suppress(RuntimeError):  # no thread can be started
                await asyncio.to_thread(self._segments.trim, self._idle_s)


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
