"""The engine that computes large jobs on a Ray cluster and this machine's workers, and small ones on these alone."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from app.cluster.costs import Costs
from app.cluster.link import Link
from app.cluster.messages import Away, KernelFailed, Lost, Node, Nodes
from app.cluster.node import identity
from app.cluster.split import Split, processors
from app.cluster.units import can_travel, first_stage
from app.pool.buffers import SegmentPool
from app.pool.jobs import Job, shutting_down, uninterrupted
from app.pool.local import LocalEngine
from convgrad._errors import DeadlineExceeded, InternalError

__all__ = ["RayEngine"]

_log = logging.getLogger(__name__)

_RELEASE_S = 0.5
"""Seconds that the end of a job waits for the bridge to release its memory."""


@dataclass(eq=False)
class _Shared:
    """A job that is shared with the cluster, on at most `nodes` machines."""

    job: Job
    number: int
    split: Split
    nodes: int
    memory: tuple[object, ...]
    """Held until the bridge has released it."""
    news: asyncio.Queue[int | BaseException | None] = field(default_factory=asyncio.Queue)
    """Units that are done, what went wrong, or None when units may be given."""
    tasks: set[asyncio.Task[int | None]] = field(default_factory=set)
    """One for each unit that is with a worker."""


class RayEngine(LocalEngine):
    """Run jobs on the cluster at `address` when that is faster, and the others on `workers` processes.

    With `join` this machine becomes a node with that many bytes of memory for tensors; otherwise it must be one.
    Jobs for a cluster that is away are computed here. It usually has `expected` workers. Without `costs` every job that
    can travel is sent.
    """

    def __init__(
        self,
        segments: SegmentPool,
        *,
        workers: int,
        address: str,
        join: int = 0,
        expected: int,
        costs: Costs | None,
    ) -> None:
        super().__init__(segments, workers=workers, spare=True)
        self._expected, self._costs = expected, costs
        self._link = Link([identity(), address, str(join)], self._on_nodes)
        self._share_numbers = itertools.count(1)
        self._shared: dict[int, _Shared] = {}
        names = ("cluster_jobs", "cluster_units", "cluster_retried_units", "cluster_fallbacks")
        self._counters |= dict.fromkeys(names, 0)
        self._abandoned = 0
        self.nodes: tuple[Node, ...] = ()
        """The machines of the cluster; none while it is away."""

    @property
    def cluster_workers(self) -> int:
        """Number of workers of the cluster that are ready."""
        return sum(node.ready for node in self.nodes)

    async def start(self) -> None:
        """Begin to warm up and to connect, in the background."""
        await super().start()
        self._link.start()

    async def stop(self) -> None:
        """Refuse new jobs, fail the running ones, end every process."""
        self._stopping = True
        self._tell(shutting_down())
        await super().stop()
        await self._link.stop()

    async def run(self, job: Job) -> None:
        """Compute a job."""
        if self._stopping:
            raise shutting_down()
        done = set[int]()
        if nodes := self._nodes_for(job):
            try:
                await self._share(job, nodes, done)
            except (Away, OSError) as reason:
                self._counters["cluster_fallbacks"] += 1
                _log.warning("job %s continues on this machine: %s", job.id, reason)
        job.units = tuple(unit for unit in job.plan.units if unit.index not in done)
        if job.units:
            await super().run(job)

    def snapshot(self) -> dict[str, Any]:
        """Describe workers, queue, memory, counters and the cluster."""
        cluster = {
            "connected": self._link.up,
            "bridge": self._link.pid,
            "bridge_restarts": self._link.restarts,
            "nodes": [node._asdict() for node in self.nodes],
            "jobs": len(self._shared),
        }
        return {**super().snapshot(), "cluster": cluster}

    def _nodes_for(self, job: Job) -> int:
        """Return on how many machines of the cluster a job is computed; 0 for none."""
        plan, here, nodes = job.plan, self.workers[1], max(1, sum(node.ready > 0 for node in self.nodes))
        if not can_travel(plan) or (self._costs is not None and self._costs.stays(plan, here)):
            return 0
        if self._costs is not None:
            nodes = self._costs.nodes(plan, here=here, there=self.cluster_workers or self._expected, nodes=nodes)
        return nodes if self.cluster_workers else 0

    async def _share(self, job: Job, nodes: int, finished: set[int]) -> None:
        """Compute the first stage here and on the cluster, and note the units that are `finished`.

        Raises `Away` if this machine has to compute the rest.
        """
        since, left = time.monotonic(), first_stage(job.plan)
        split = Split(left, nbytes=sum(segment.size for segment in job.inputs), workers=self.workers[1])
        # Only `shared` may have the holds: this frame may outlive the job, in the traceback of its error.
        shared = _Shared(
            job, next(self._share_numbers), split, nodes, memory=tuple(segment.view for segment in job.segments)
        )
        self._shared[shared.number] = shared
        try:
            descriptors = [segment.fd for segment in job.segments]
            self._begin(shared, self._link.call("begin", shared.number, job.plan, nodes, descriptors=descriptors))
            self._counters["cluster_jobs"] += 1
            job.queue_s = time.monotonic() - since
            while left:
                self._give(shared)
                if (index := await self._next(shared)) is not None:
                    split.done(index)
                    left -= 1
                    finished.add(index)
                    if job.on_unit is not None:
                        job.on_unit(job.plan.units[index])
        finally:
            await self._leave(shared)

    def _give(self, shared: _Shared) -> None:
        """Give units to whichever side is free."""
        while (unit := shared.split.next_here()) is not None:
            self._begin(shared, self._compute_here(shared, unit))
        free, ready = self.cluster_workers - self._abandoned, sum(node.ready > 0 for node in self.nodes)
        jobs = sum(other.job.owner == shared.job.owner for other in self._shared.values())
        count = processors(free, ready, most=shared.nodes, jobs=jobs)
        while (unit := shared.split.next_there(count)) is not None:
            self._begin(shared, self._compute_there(shared, unit))

    def _begin(self, shared: _Shared, work: Coroutine[Any, Any, int | None]) -> None:
        def tell(task: asyncio.Task[int | None]) -> None:
            shared.tasks.discard(task)
            if not task.cancelled():
                shared.news.put_nowait(task.exception() or task.result())

        shared.tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(tell)

    async def _compute_here(self, shared: _Shared, index: int) -> int:
        """Compute one unit on this machine's workers."""
        await super().run(replace(shared.job, units=(shared.job.plan.units[index],), on_unit=None))
        return index

    async def _compute_there(self, shared: _Shared, index: int) -> int | None:
        """Compute one unit on the cluster, or return it."""
        try:
            async with asyncio.timeout(shared.split.patience):
                await self._link.call("compute", shared.number, index)
        except KernelFailed as error:
            _log.error("job %s failed on the cluster: %s", shared.job.id, error)
            raise InternalError("a kernel failed; the log has the details") from None
        except (TimeoutError, Lost) as error:
            shared.split.returned(index, lost=(lost := isinstance(error, Lost)))
            self._counters["cluster_retried_units"] += lost
            return None
        self._counters["cluster_units"] += 1
        return index

    async def _next(self, shared: _Shared) -> int | None:
        """Wait for news of a job, until its deadline at most; raises its errors."""
        deadline = shared.job.deadline
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                news = await shared.news.get()
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the result was complete") from None
        if isinstance(news, BaseException):
            raise news
        return news

    async def _leave(self, shared: _Shared) -> None:
        """Stop what is still computed for a job, and wait until its memory is free."""
        for task in shared.tasks:
            task.cancel()
        await uninterrupted(asyncio.gather(*shared.tasks, return_exceptions=True))
        release = asyncio.create_task(self._link.call("release", shared.number))
        release.add_done_callback(partial(self._released, shared))
        # The next call may need the memory; a bridge that is busy keeps it a little longer.
        await uninterrupted(asyncio.wait({release}, timeout=_RELEASE_S))

    def _released(self, shared: _Shared, release: asyncio.Task[Any]) -> None:
        release.exception()  # the cluster may be away
        shared.memory = ()  # not when the last reference is gone: an exception may be in a cycle with it
        del self._shared[shared.number]

    def _on_nodes(self, message: Nodes | None) -> None:
        before = self.nodes
        self.nodes, self._abandoned = message or ((), 0)
        if self.nodes != before:
            _log.info("cluster: %d workers on %d machines", self.cluster_workers, len(self.nodes))
        for node in set(self.nodes) - set(before):
            if node.refused:
                _log.warning("cluster: %s gets no work: %s", node.name, node.refused)
        self._tell(Away("the connection to the cluster was lost") if message is None else None)

    def _tell(self, news: Exception | None) -> None:
        for shared in self._shared.values():
            shared.news.put_nowait(news)
