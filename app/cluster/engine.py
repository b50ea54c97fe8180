"""The engine that computes large jobs on a Ray cluster and this machine's workers, and small ones on these alone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from app.cluster.costs import Costs
from app.cluster.link import Link
from app.cluster.messages import (
    Beat,
    Begin,
    ComputeHere,
    DoneHere,
    Ended,
    Message,
    Node,
    Release,
    Released,
    Said,
    Started,
    UnitDone,
)
from app.cluster.node import identity
from app.cluster.units import can_travel, first_stage
from app.pool.buffers import Segment
from app.pool.engine import Demand, Job
from app.pool.local import LocalEngine, finish
from app.pool.messages import Unfit
from convgrad._errors import (
    DeadlineExceeded,
    InternalError,
    Overloaded,
    ShuttingDown,
    WorkerLost,
)
from kernels import Unit

__all__ = ["RayEngine"]

_log = logging.getLogger(__name__)

_RELEASE_S = 0.5
"""Seconds that the end of a job waits for the bridge to let go of its memory."""


class _Away(Exception):  # noqa: N818 - a state of the cluster, not an error of ours
    """The cluster does not finish a job; the message says why."""


@dataclass(eq=False)
class _Travel:
    """A job on the cluster: what has come back and what has not."""

    job: Job
    number: int
    since: float
    news: asyncio.Queue[int | Exception | None] = field(default_factory=asyncio.Queue)
    """Units that are done; None when more of the inputs has arrived."""
    here: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """Units on this machine's workers."""
    hold: _Hold | None = None


@dataclass(eq=False)
class _Hold:
    """The memory of a job: the bridge may use it for a moment after the end of the job."""

    memory: tuple[object, ...]
    released: asyncio.Event = field(default_factory=asyncio.Event)


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
        self._link = Link([identity(), address, mixed, str(join)], self._on_message, self._on_down)
        self._numbers = itertools.count(1)
        self._travels: dict[int, _Travel] = {}
        self._holds: dict[int, _Hold] = {}
        self._counters = {"cluster_jobs": 0, "cluster_units": 0, "cluster_retried_units": 0, "cluster_fallbacks": 0}
        self._running = 0
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
        while self._running and (left := self._drain_until - time.monotonic()) > 0:
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
        self._running += 1
        try:
            if nodes := self._nodes_for(job):
                async with contextlib.aclosing(self._run_there(job, nodes, done)) as units:
                    async for unit in units:
                        yield unit
            if len(done) < len(job.plan.units):
                async with contextlib.aclosing(self._run_here(job, done)) as units:
                    async for unit in units:
                        yield unit
        finally:
            self._running -= 1
            self._changed.set()

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
        if self._costs.stays(job.plan, self.workers[1]):
            return 0
        there = self.cluster_workers or self._workers  # what it would have if it were not away
        return self._costs.nodes(job.plan, here=self.workers[1], there=there, nodes=nodes)

    async def _run_there(self, job: Job, nodes: int, done: set[int]) -> AsyncGenerator[Unit, None]:
        """Compute what the cluster takes, and add to `done`; raises `Overloaded` if the rest may not be done here."""
        if not self.cluster_workers:
            if not self._fallback:
                raise Overloaded("the cluster is away", retry_after=5.0, data={"reason": "cluster"})
            return
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

    async def _run_here(self, job: Job, done: set[int]) -> AsyncGenerator[Unit, None]:
        """Compute the units that are not done on this machine's workers."""
        left = tuple(unit for unit in job.plan.units if unit.index not in done)
        async with contextlib.aclosing(self._local.run(replace(job, units=left))) as units:
            async for unit in units:
                yield unit

    async def _travel(self, job: Job, nodes: int, done: set[int]) -> AsyncGenerator[Unit, None]:
        """Compute the first stage on the cluster, and add to `done`; raises `_Away` when that has to go on here."""
        since = time.monotonic()
        travel = _Travel(job, next(self._numbers), since)
        self._travels[travel.number] = travel
        finished: list[Unit] = []
        first = first_stage(job.plan)
        try:
            await self._arrival(travel)
            self._begin(travel, nodes)
            while len(done) < first:
                index = await self._next(travel)
                if index is None or index in done:
                    continue
                done.add(index)
                finished.append(job.plan.units[index])
                while finished and (job.demand.each or len(done) == first):
                    yield finished.pop(0)
        finally:
            del self._travels[travel.number]
            await self._leave(travel)

    def _begin(self, travel: _Travel, nodes: int) -> None:
        """Hand a job to the bridge."""
        job, segments = travel.job, _segments(travel.job)
        begin = Begin(travel.number, job.owner, job.plan, nodes, here=self.workers[1])
        try:
            sent = bool(self.cluster_workers) and self._link.send(begin, [segment.fd for segment in segments])
        except OSError as error:
            raise _Away(f"its memory can't be shared: {error}") from None
        if not sent:
            raise _Away("it went away while the inputs arrived")
        self._counters["cluster_jobs"] += 1
        travel.hold = self._holds[travel.number] = _Hold(tuple(segment.hold() for segment in segments))

    async def _leave(self, travel: _Travel) -> None:
        """Stop what is still computed for a job, and wait until its memory is free."""
        self._link.send(Release(travel.number))
        for task in travel.here.values():
            task.cancel()
        await finish(asyncio.gather(*travel.here.values(), return_exceptions=True))
        if travel.hold is not None:
            # The next call may need the memory; a bridge that is busy keeps it a little longer.
            with contextlib.suppress(TimeoutError):
                await finish(asyncio.wait_for(travel.hold.released.wait(), _RELEASE_S))

    async def _compute_here(self, travel: _Travel, index: int) -> None:
        """Compute one unit on this machine's workers; the outcome is news for the job's reader."""
        alone = replace(travel.job, units=(travel.job.plan.units[index],), arrival=None, demand=Demand())
        try:
            async with contextlib.aclosing(self._local.run(alone)) as units:
                async for _ in units:
                    pass
        except Exception as error:  # noqa: BLE001 - the reader raises it
            travel.news.put_nowait(error)
        else:
            travel.news.put_nowait(index)

    async def _arrival(self, travel: _Travel) -> None:
        """Wait until all inputs have arrived: they travel once, in whole pieces."""
        job = travel.job
        if job.arrival is None:
            return
        job.arrival.on_more = lambda: travel.news.put_nowait(None)
        while job.arrival.images < job.plan.problem.n:
            await self._next(travel)

    async def _next(self, travel: _Travel) -> int | None:
        """Wait for news of a job, at most until its deadline, and raise what has gone wrong with it."""
        deadline = travel.job.deadline
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                news = await travel.news.get()
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the result was complete") from None
        if isinstance(news, Exception):
            raise news
        return news

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Beat):
            changed, self.nodes = self.nodes != message.nodes, message.nodes
            if changed:
                _log.info("cluster: %d workers on %d machines", self.cluster_workers, len(self.nodes))
            if not self._fallback and not any(node.wanted and not node.refused for node in self.nodes):
                self._strand("no machine of the cluster is left")
        elif isinstance(message, Said):
            _log.log(message.level, "cluster: %s", message.text)
        elif isinstance(message, Released):
            self._free(message.job)
        elif isinstance(message, ComputeHere):
            self._compute(message)
        elif isinstance(message, UnitDone | Ended | Started) and (travel := self._travels.get(message.job)):
            if isinstance(message, Started):
                if travel.job.times.queue_s is None:
                    travel.job.times.queue_s = time.monotonic() - travel.since
            elif isinstance(message, UnitDone):
                self._counters["cluster_units"] += 1
                self._count_lost(travel, message.lost)
                travel.job.times.compute_s += message.seconds
                travel.news.put_nowait(message.unit)
            else:
                travel.news.put_nowait(_error(message, travel.job))

    def _compute(self, message: ComputeHere) -> None:
        if (travel := self._travels.get(message.job)) is None:
            self._link.send(DoneHere(message.job, message.unit))
            return
        self._count_lost(travel, message.lost)
        work = self._compute_here(travel, message.unit)
        task = travel.here[message.unit] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: self._done_here(travel, message.unit))

    def _count_lost(self, travel: _Travel, lost: int) -> None:
        self._counters["cluster_retried_units"] += lost
        travel.job.times.retried_units += lost

    def _done_here(self, travel: _Travel, unit: int) -> None:
        """Tell the bridge that a worker is free; also of a task that was cancelled before its first step."""
        travel.here.pop(unit, None)
        self._link.send(DoneHere(travel.number, unit))

    def _on_down(self) -> None:
        self.nodes = ()
        for number in tuple(self._holds):
            self._free(number)
        self._strand("the connection to the cluster was lost")

    def _free(self, number: int) -> None:
        if (hold := self._holds.pop(number, None)) is not None:
            hold.memory = ()  # not when the last reference to the hold is gone: an exception may be in a cycle with it
            hold.released.set()

    def _strand(self, reason: str) -> None:
        for travel in self._travels.values():
            travel.news.put_nowait(_Away(reason))


def _error(ended: Ended, job: Job) -> Exception:
    _log.error("job %s failed on the cluster (%s): %s", job.id, ended.reason, ended.detail)
    if ended.reason == "memory":
        return _Away("a machine of the cluster ran out of memory")
    if ended.reason == "ray":
        return _Away("Ray does not take its units")
    if ended.reason == "lost":
        return WorkerLost("the same unit of work keeps losing workers of the cluster")
    return InternalError("a kernel failed; the log has the details")


def _segments(job: Job) -> tuple[Segment, ...]:
    return *job.inputs, job.output, *((job.scratch,) if job.scratch else ())
