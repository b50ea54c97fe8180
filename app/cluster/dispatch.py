"""Give units to workers of the cluster, and give them again where an answer is lost or late.

Units are pure, and workers write to nothing but their answer: so a unit may run twice, and the first answer counts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from app.cluster.fleet import Fleet, Worker
from app.cluster.messages import Begin, Ended, Message, Started, UnitDone
from app.cluster.node import arguments, cut
from app.cluster.units import Portion

__all__ = ["Dispatch"]

_PREFETCH = 2
"""Units that a worker has at a time while others wait: Ray fetches the second one's inputs meanwhile."""

_LATE_FIRST_S, _LATE_TIMES = 0.5, 4.0
"""A unit is given to a second worker after this time and this many times what the slowest one took."""

_MOST_LOSSES = 4
"""Workers that may end during a unit before its job fails."""

_INLINE_BYTES = 64 << 10
"""Inputs up to this size are sent with the unit; Ray would fetch them in a round trip of its own."""

_GRACE_S = 2.0
"""Seconds that a worker may go on with a unit that nobody waits for; then it is ended."""


@dataclass(eq=False)
class _Given:
    """A unit on a worker."""

    job: _Job
    unit: int
    since: float = field(default_factory=time.monotonic)
    unwanted_since: float | None = None


@dataclass(eq=False)
class _Job:
    begin: Begin
    inputs: list[npt.NDArray[Any]]
    waiting: deque[int]
    left: set[int]
    references: dict[tuple[int, Portion], Any] = field(default_factory=dict)
    losses: dict[int, int] = field(default_factory=dict)
    nodes: set[str] = field(default_factory=set)
    running: int = 0
    slowest_s: float = 0.0
    started: bool = False

    def takes(self, node: str) -> bool:
        """Whether a machine gets units: each further one needs the inputs sent."""
        return node in self.nodes or len(self.nodes) < self.begin.nodes


class Dispatch:
    """Share the workers out between jobs, unit by unit, fairly between owners."""

    def __init__(
        self, fleet: Fleet, send: Callable[[Message], None], post: Callable[[Callable[[], object]], object]
    ) -> None:
        self._fleet, self._send, self._post = fleet, send, post
        self._jobs: dict[int, _Job] = {}
        self._put: Callable[[Any], Any] = lambda _: None
        fleet.on_lost = self._lost

    def begin(self, begin: Begin, inputs: list[npt.NDArray[Any]], put: Callable[[Any], Any]) -> None:
        """Take a job; `put` copies an array to Ray's memory and returns the reference."""
        self._put = put
        units = [unit.index for unit in begin.plan.units if unit.stage == 0]
        self._jobs[begin.job] = _Job(begin, inputs, deque(units), set(units))
        self.fill()

    def release(self, number: int) -> None:
        """Forget a job."""
        if (job := self._jobs.pop(number, None)) is not None:
            job.left.clear()
            job.waiting.clear()
            job.references.clear()
            job.inputs.clear()

    def fill(self) -> None:
        """Give waiting units to workers that have too few."""
        for depth in range(_PREFETCH):
            for worker in self._fleet.workers:
                if len(worker.units) == depth and (job := self._next(worker.node)) is not None:
                    if depth and len(job.waiting) <= sum(job.takes(each.node) for each in self._fleet.workers):
                        continue  # the last units go to the workers that are free first
                    self._give(worker, job, job.waiting.popleft())

    def check(self) -> None:
        """Give late units to a second worker, and end workers that go on with what nobody wants."""
        now = time.monotonic()
        for worker in self._fleet.workers:
            if not worker.units:
                continue
            first = worker.units[0]
            if first.unit not in first.job.left:
                first.unwanted_since = first.unwanted_since or now
                if now - first.unwanted_since > _GRACE_S:
                    self._fleet.lose(worker, kill=True)
            elif now - first.since > max(_LATE_FIRST_S, _LATE_TIMES * first.job.slowest_s):
                for given in worker.units:
                    self._give_again(given)

    def _give_again(self, given: _Given) -> None:
        """Give a unit to an idle worker too, unless two have it."""
        idle = next((worker for worker in self._fleet.workers if not worker.units), None)
        key = given.job, given.unit
        having = sum((each.job, each.unit) == key for worker in self._fleet.workers for each in worker.units)
        if having == 1 and idle is not None and given.unit in given.job.left:
            self._give(idle, given.job, given.unit)

    def _next(self, node: str) -> _Job | None:
        waiting = [job for job in self._jobs.values() if job.waiting and job.takes(node)]
        owners: dict[str, int] = {}
        for job in self._jobs.values():
            owners[job.begin.owner] = owners.get(job.begin.owner, 0) + job.running
        return min(waiting, key=lambda job: (owners[job.begin.owner], job.running, job.begin.job), default=None)

    def _give(self, worker: Worker, job: _Job, unit: int) -> None:
        plan, read, share = arguments(job.begin.plan, unit)
        try:
            parts = [self._reference(job, number, portion) for number, portion in enumerate(read)]
        except Exception as error:  # noqa: BLE001 - Ray's memory is full, or Ray has ended
            self._end(job, "memory", str(error))
            return
        given = _Given(job, unit)
        worker.units.append(given)
        job.nodes.add(worker.node)
        job.running += 1
        if not job.started:
            job.started = True
            self._send(Started(job.begin.job))
        future = worker.actor.compute.remote(plan, read, share, *parts).future()
        future.add_done_callback(lambda done: self._post(lambda: self._done(worker, given, done)))

    def _reference(self, job: _Job, number: int, portion: Portion) -> Any:
        key = number, portion
        if key not in job.references:
            # Workers view the memory of contiguous arrays; of others they get a copy.
            part = np.ascontiguousarray(cut(job.inputs[number], portion))
            job.references[key] = part if part.nbytes <= _INLINE_BYTES else self._put(part)
        return job.references[key]

    def _done(self, worker: Worker, given: _Given, done: Any) -> None:
        error = done.exception()
        if error is not None and not _raised(error):
            self._fleet.lose(worker)  # whatever it had is given to others
            return
        if given not in worker.units:
            return
        worker.units.remove(given)
        if worker.units:
            worker.units[0].since = time.monotonic()
        job = given.job
        job.running -= 1
        if given.unit in job.left:
            if error is not None:
                memory = isinstance(error.cause, MemoryError)
                self._end(job, "memory" if memory else "kernel", str(error))
            else:
                self._answer(job, given, *done.result())
        self.fill()

    def _answer(self, job: _Job, given: _Given, result: npt.NDArray[Any], seconds: float) -> None:
        job.left.discard(given.unit)
        if given.unit in job.waiting:
            job.waiting.remove(given.unit)
        job.slowest_s = max(job.slowest_s, time.monotonic() - given.since)
        data = np.ascontiguousarray(result).tobytes()
        self._send(UnitDone(job.begin.job, given.unit, data, seconds, job.losses.get(given.unit, 0)))

    def _lost(self, worker: Worker) -> None:
        """Give the units of a worker that has ended to others; the running one counts towards its job's failure."""
        for job in self._jobs.values():
            if all(each.node != worker.node for each in self._fleet.workers):
                job.nodes.discard(worker.node)
        given, worker.units = worker.units, []
        for place, each in enumerate(given):
            job = each.job
            job.running -= 1
            if each.unit not in job.left:
                continue
            job.losses[each.unit] = job.losses.get(each.unit, 0) + (place == 0)
            if job.losses[each.unit] >= _MOST_LOSSES:
                self._end(job, "lost", f"unit {each.unit} was lost with {_MOST_LOSSES} workers")
            elif each.unit not in job.waiting:
                job.waiting.appendleft(each.unit)
        self.fill()

    def _end(self, job: _Job, reason: str, detail: str) -> None:
        self._send(Ended(job.begin.job, reason, detail))
        self.release(job.begin.job)


def _raised(error: BaseException) -> bool:
    """Whether the worker raised it, and did not end."""
    from ray.exceptions import RayTaskError

    return isinstance(error, RayTaskError)
