"""The jobs of a service: its spool, used without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from app.calls.jobs.spool import Job, NewJob, Spool, SpoolLimits
from app.settings import Settings
from convgrad._frames import Bytes

__all__ = ["Jobs"]

P = ParamSpec("P")
T = TypeVar("T")


class Jobs:
    """Run the methods of a spool in a separate thread."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self.changed = asyncio.Event()
        """Set when a job was added or cancelled here."""
        self.counts: dict[str, int] = {}
        """Jobs by state, seconds ago."""
        self.size = 0
        """Bytes of all jobs, seconds ago."""
        self.taken_over = 0
        """Jobs that this process has taken over from another one."""
        self._thread = ThreadPoolExecutor(1, "convgrad-spool")

    @classmethod
    def of(cls, settings: Settings) -> Jobs | None:
        """Open the spool that the settings name; None if they name none."""
        if settings.spool is None:
            return None
        key_bytes, key_jobs = int(settings.spool_key_limit), settings.spool_key_jobs
        return cls(
            Spool(settings.spool, SpoolLimits(int(settings.spool_limit), key_bytes, key_jobs, settings.spool_keep_s))
        )

    async def call(self, method: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Call a method of the spool."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: method(*args, **named))

    async def add(self, new: NewJob, pieces: Iterable[Bytes]) -> Job:
        """Add a job, or return the one with its idempotency key; raises what `Spool.repeated` raises."""
        spool = self.spool
        if (found := await self.call(spool.repeated, new)) is not None:
            return found
        await asyncio.to_thread(spool.write_request, new, pieces)
        job = await self.call(spool.add, new)
        self.changed.set()
        return job

    async def describe(self, *jobs: Job) -> list[dict[str, Any]]:
        """Return what their owner may see of jobs."""
        queued = next((job.owner for job in jobs if job.state == "queued"), None)
        places = {} if queued is None else await self.call(self.spool.places, queued)
        return [job.describe(places.get(job.id), self.spool.limits.keep_s) for job in jobs]

    async def cancel(self, job: str, owner: str) -> Job:
        """Cancel or forget a job; raises `NotFound`."""
        found = await self.call(self.spool.cancel, job, owner)
        self.changed.set()
        return found

    async def count(self) -> None:
        """Set `counts` and `size`."""
        self.counts, self.size = await self.call(self.spool.counts)

    async def close(self) -> None:
        """Close the spool."""
        await self.call(self.spool.close)
        self._thread.shutdown(wait=False)
