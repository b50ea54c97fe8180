"""The engine that computes large jobs on a Ray cluster and the others on this machine's workers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from app.cluster.costs import Costs
from app.cluster.link import Link
from app.cluster.messages import Beat, Begin, Ended, Message, Node, Release, Released, Started, UnitDone
from app.cluster.units import can_travel, rest, scratch_share
from app.pool.engine import Job, JobTimes
from app.pool.local import LocalEngine
from app.pool.messages import Unfit
from convgrad._errors import (
    ConvgradError,
    DeadlineExceeded,
    InternalError,
    Overloaded,
    ShuttingDown,
    WorkerLost,
)
from kernels import Unit, box

__all__ = ["RayEngine"]

_log = logging.getLogger(__name__)

_STALL_S, _STALL_TIMES = 5.0, 20.0
"""A job from which nothing is heard for this time and this many times its estimate is taken back."""


class _Away(Exception):  # noqa: N818 - a state of the cluster, not an error of ours
    """The cluster does not finish a job; the message says why."""


@dataclass(eq=False)
class _Travel:
    """A job on the cluster: what has come back and what has not."""

    job: Job
    number: int
    news: asyncio.Queue[UnitDone | Exception] = field(default_factory=asyncio.Queue)


class RayEngine:
    """Compute on the cluster at `address` what is faster there, and the rest on `local` (see `Engine`).

    With `join` the machine is made a node with that many bytes of memory for tensors; otherwise it has to be one.
    With `fallback`, jobs for a cluster that is away are computed here; without it they are refused. `mixed` says what
    is done with machines of another target: ``refuse`` them, or hold them to the server's, ``common``. `costs` None
    sends every job that can travel.
    """

    def __init__(
        self,
        local: LocalEngine,
        *,
        address: str,
        join: int = 0,
        workers: int,
        fallback: bool = True,
        mixed: Literal["refuse", "common"] = "refuse",
        costs: Costs | None,
    ) -> None:
        self._local = local
        self._workers = workers
        self._fallback = fallback
        self._costs = costs
        self._link = Link(address, mixed, join, self._on_message, self._on_down)
        self._numbers = itertools.count(1)
        self._travels: dict[int, _Travel] = {}
        # The bridge may read inputs for a moment after a job has ended: their memory must not be freed before.
        self._holds: dict[int, tuple[object, ...]] = {}
        self._counters = {"cluster_jobs": 0, "cluster_units": 0, "cluster_retried_units": 0, "cluster_fallbacks": 0}
        self._drain_until: float | None = None
        self._changed = asyncio.Event()
        self.nodes: tuple[Node, ...] = ()
        """The machines of the cluster; none while it is away."""
        self.on_change: Callable[[], None] = lambda: None
        """See `Engine.on_change`."""

    @property
    def ready(self) -> bool:
        """Whether jobs are accepted."""
        return self._local.ready and self._drain_until is None

    @property
    def workers(self) -> tuple[int, int]:
        """Number of this machine's workers that are ready, and the number wanted."""
        return self._local.workers

    @property
    def cluster_workers(self) -> int:
        """Number of workers of the cluster that are ready."""
        return sum(node.ready for node in self.nodes)

    @property
    def failure(self) -> str | None:
        """Why workers are missing."""
        return self._local.failure

    @property
    def given_up(self) -> bool:
        """Whether no more attempts to start a worker are made."""
        return self._local.given_up

    def progress(self) -> float:
        """Return the share of the warm-up that is done, 0 to 1."""
        return self._local.progress()

    @property
    def unfit(self) -> Unfit | None:
        """Why the compiled code does not work on this processor, if so."""
        return self._local.unfit

    async def start(self) -> None:
        """Begin to warm up and to connect, in the background."""
        self._drain_until = None
        self._local.on_change = lambda: self.on_change()
        await self._local.start()
        self._link.start()

    async def stop(self, drain_s: float) -> None:
        """Refuse new jobs, finish or fail the running ones, end every process (see `Engine.stop`)."""
        until = time.monotonic() + drain_s
        self._drain_until = until if self._drain_until is None else min(self._drain_until, until)
        self._changed.set()
        while self._travels and (left := self._drain_until - time.monotonic()) > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        for travel in self._travels.values():
            travel.news.put_nowait(ShuttingDown("the service is shutting down", retry_after=1.0))
        await self._local.stop(max(0.0, self._drain_until - time.monotonic()))
        await self._link.stop()

    async def run(self, job: Job) -> AsyncGenerator[Unit, None]:
        """Compute a job and yield its units as they complete (see `Engine.run`)."""
        if self._drain_until is not None:
            raise ShuttingDown("the service is shutting down", retry_after=1.0)
        done: set[int] = set()
        if nodes := self._nodes_for(job):
            if not self.cluster_workers and not self._fallback:
                raise Overloaded("the cluster is away", retry_after=5.0, data={"reason": "cluster"})
            if self.cluster_workers:
                try:
                    async with contextlib.aclosing(self._travel(job, nodes, done)) as units:
                        async for unit in units:
                            yield unit
                except _Away as reason:
                    if not self._fallback:
                        message = f"the cluster was lost during the call: {reason}"
                        raise Overloaded(message, retry_after=5.0, data={"reason": "cluster"}) from None
                    self._counters["cluster_fallbacks"] += 1
                    _log.warning("job %s goes on without the cluster: %s", job.id, reason)
        if len(done) < len(job.plan.units):
            async with contextlib.aclosing(self._run_here(job, done)) as units:
                async for unit in units:
                    yield unit

    def snapshot(self) -> dict[str, Any]:
        """Describe workers, queue, memory, counters and the cluster."""
        found = self._local.snapshot()
        cluster = {
            "connected": self._link.up,
            "bridge": self._link.pid,
            "bridge_restarts": self._link.restarts,
            "nodes": [node._asdict() for node in self.nodes],
            "jobs": len(self._travels),
        }
        return {**found, "counters": {**found["counters"], **self._counters}, "cluster": cluster}

    def _nodes_for(self, job: Job) -> int:
        """Return on how many machines of the cluster a job is computed; 0 for none."""
        if not can_travel(job.plan):
            return 0
        nodes = max(1, sum(node.ready > 0 for node in self.nodes))
        if self._costs is None:
            return nodes
        there = self.cluster_workers or self._workers  # what it would have if it were not away
        return self._costs.nodes(job.plan, here=self.workers[1], there=there, nodes=nodes)

    async def _run_here(self, job: Job, done: set[int]) -> AsyncGenerator[Unit, None]:
        """Compute the units that are not done on this machine's workers."""
        if not done:
            async with contextlib.aclosing(self._local.run(job)) as whole:
                async for unit in whole:
                    yield unit
            return
        plan, units = rest(job.plan, done)
        remaining = replace(job, plan=plan, times=JobTimes())
        try:
            async with contextlib.aclosing(self._local.run(remaining)) as some:
                async for unit in some:
                    yield units[unit.index]
        finally:
            job.times.compute_s += remaining.times.compute_s
            job.times.retried_units += remaining.times.retried_units

    async def _travel(self, job: Job, nodes: int, done: set[int]) -> AsyncGenerator[Unit, None]:
        """Compute the first stage on the cluster, and add to `done`; raises `_Away` when that has to go on here."""
        since = time.monotonic()
        await self._arrival(job)
        travel = _Travel(job, next(self._numbers))
        self._travels[travel.number] = travel
        self._holds[travel.number] = tuple(segment.hold() for segment in job.inputs)
        self._counters["cluster_jobs"] += 1
        finished: list[Unit] = []
        first = [unit for unit in job.plan.units if unit.stage == 0]
        try:
            self._link.send(Begin(travel.number, job.owner, job.plan, nodes), [segment.fd for segment in job.inputs])
            while len(done) < len(first):
                news = await self._next(travel)
                if isinstance(news, Exception):
                    raise news
                if isinstance(news, Started):
                    job.times.queue_s = time.monotonic() - since
                    continue
                unit = job.plan.units[news.unit]
                _write(job, unit, news.data)
                done.add(unit.index)
                job.times.compute_s += news.seconds
                job.times.retried_units += news.lost
                self._counters["cluster_units"] += 1
                self._counters["cluster_retried_units"] += news.lost
                finished.append(unit)
                if job.demand.each:
                    while finished:
                        yield finished.pop(0)
            while finished:
                yield finished.pop(0)
        finally:
            del self._travels[travel.number]
            self._changed.set()
            self._link.send(Release(travel.number))

    async def _arrival(self, job: Job) -> None:
        """Wait until all inputs have arrived: they travel once, in whole pieces."""
        if job.arrival is None:
            return
        more = asyncio.Event()
        job.arrival.on_more = more.set
        while job.arrival.images < job.plan.problem.n:
            more.clear()
            try:
                async with asyncio.timeout(_left(job)):
                    await more.wait()
            except TimeoutError:
                raise _too_late() from None

    async def _next(self, travel: _Travel) -> Any:
        """Wait for news of a job, until its deadline or until it has been silent for too long."""
        left = _left(travel.job)
        costs = self._costs or Costs()
        patience = max(_STALL_S, _STALL_TIMES * costs.there(travel.job.plan, 1, 2))
        bound = patience if left is None else min(left, patience)
        try:
            async with asyncio.timeout(bound):
                return await travel.news.get()
        except TimeoutError:
            if left is not None and left <= bound:
                raise _too_late() from None
            raise _Away(f"nothing was heard for {patience:.0f} s") from None

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Beat):
            changed, self.nodes = self.nodes != message.nodes, message.nodes
            if changed:
                _log.info("cluster: %d workers on %d machines", self.cluster_workers, len(self.nodes))
            if not self.cluster_workers:
                self._strand("no machine of the cluster is left")
        elif isinstance(message, Released):
            self._holds.pop(message.job, None)
        elif isinstance(message, UnitDone | Ended | Started) and (travel := self._travels.get(message.job)):
            news = _error(message, travel.job) if isinstance(message, Ended) else message
            travel.news.put_nowait(news)  # type: ignore[arg-type]

    def _on_down(self) -> None:
        self.nodes = ()
        self._holds.clear()
        self._strand("the connection to the cluster was lost")

    def _strand(self, reason: str) -> None:
        for travel in self._travels.values():
            travel.news.put_nowait(_Away(reason))


def _left(job: Job) -> float | None:
    """Return the seconds until a job's deadline, None without one."""
    return None if job.deadline is None else max(0.0, job.deadline - time.monotonic())


def _too_late() -> ConvgradError:
    return DeadlineExceeded("the deadline passed before the result was complete")


def _error(ended: Ended, job: Job) -> Exception:
    _log.error("job %s failed on the cluster (%s): %s", job.id, ended.reason, ended.detail)
    if ended.reason == "memory":
        return _Away("a machine of the cluster ran out of memory")
    if ended.reason == "lost":
        return WorkerLost("the same unit of work keeps losing workers of the cluster")
    return InternalError("a kernel failed; the log has the details")


def _write(job: Job, unit: Unit, data: bytes) -> None:
    """Copy what a unit has computed to the job's memory."""
    problem = job.plan.problem
    if unit.offset is None:
        assert job.scratch is not None
        job.scratch.view[scratch_share(job.plan, unit)] = data
        return
    assert unit.shape is not None
    output = np.frombuffer(job.output.view, problem.output_dtype).reshape(problem.output_shape)
    box(output, unit)[...] = np.frombuffer(data, problem.output_dtype).reshape(unit.shape)
