"""Compute tiny calls in this process: the way to a worker and back takes several times as long."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from app.pool.jobs import Job
from engine import threads
from kernels import Plan

if TYPE_CHECKING:
    from app.pool.local import LocalEngine

__all__ = ["Here"]

_MOST_PLANS, _MOST_UNSAVED = 256, 32


class Here:
    """Compute jobs on the event loop, and the first of each plan in a thread: loading its code takes milliseconds."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._loaded: dict[int, Plan] = {}  # by id() of the plan, kept alive here

    async def run(self, job: Job) -> None:
        """Compute a job, whose memory need not be shared. Raises `DeadlineExceeded`."""
        plan, begun = job.plan, time.perf_counter()
        if self._loaded.get(id(plan)) is plan:
            _compute(job)
        else:
            await asyncio.to_thread(_load_and_compute, job)
            if len(self._loaded) >= _MOST_PLANS:
                self._loaded.clear()
            self._loaded[id(plan)] = plan
        self._engine.count(len(plan.units), plan.macs, time.perf_counter() - begun)
        if job.on_unit is not None:
            for unit in plan.units:
                job.on_unit(unit)


def _load_and_compute(job: Job) -> None:
    """Compute a job; a function that had to be compiled and can't be saved works the next time."""
    for _ in range(_MOST_UNSAVED):
        with suppress(OSError):
            return _compute(job)
    return _compute(job)


def _compute(job: Job) -> None:
    scratch = None if job.scratch is None else job.scratch.view
    on_memory = threads.Job.over(job.plan, [memory.view for memory in job.inputs], job.output.view, scratch)
    threads.run([on_memory], 1, threads.Stop(job.deadline))
