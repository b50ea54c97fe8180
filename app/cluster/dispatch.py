"""Give units to workers of the cluster and of the server, and give them again where an answer is lost or late.

Units are pure: one may run twice, and the first answer counts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from app.cluster.fleet import Fleet, Worker
from app.cluster.memory import Memory
from app.cluster.messages import Begin, ComputeHere, DoneHere, Ended, Message, Released, Started, UnitDone
from app.cluster.node import arguments, cut
from app.cluster.units import Portion, first_stage

__all__ = ["Dispatch"]

_HERE = ""
"""The node of the server's own workers: they read and write the job's memory themselves."""

_PREFETCH = 2
"""Units that a worker has at a time while others wait: its next one is there when it is free."""

_PREFETCH_MACS, _PREFETCH_MACS_HERE = 30_000_000_000, 3_000_000_000
"""Size of the units up to which that is done: a second's, or a tenth's where nothing has to be sent."""

_LATE_S, _LATE_TIMES = 1.0, 4.0
"""An answer is late after this time and this many times what the job's slowest unit took, or should take."""

_SLOW_MACS, _SLOW_BYTES = 30e9, 100e6
"""What a machine computes and receives in a second until it is known: a slower one is late, which costs little."""

_SHUN_S = 2.0
"""Seconds for which a unit is not given to the machine that lost it: its other workers may be about to end too."""

_MOST_LOSSES = 4
"""Workers that may end during a unit before its job fails."""

_INLINE_BYTES = 64 << 10
"""Inputs up to this size are sent with the unit; Ray would fetch them in a round trip of its own."""

_GRACE_S = 5.0
"""Seconds that a worker may go on with a unit that nobody waits for; to start another one takes as long."""


@dataclass(eq=False)
class _Given:
    """A unit on a worker: `since` it is the first one there, or was sent; `late` if nobody counts on it any more."""

    job: _Job
    unit: int
    since: float
    late: bool = False
    unwanted_since: float | None = None


@dataclass(eq=False)
class _Job:
    begin: Begin
    memory: Memory | None
    waiting: deque[int]
    left: set[int]
    references: dict[tuple[int, Portion], Any] = field(default_factory=dict)
    losses: dict[int, int] = field(default_factory=dict)
    shunned: dict[int, tuple[str, float]] = field(default_factory=dict)
    repeats: dict[int, int] = field(default_factory=dict)
    nodes: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    running: int = 0
    takers: int = 0
    """Workers that may have its units."""
    slowest_s: float = 0.0
    here_s: float = 0.0
    there_s: float = 0.0
    """What the last units took here and on other machines."""
    started: bool = False

    def takes(self, node: str) -> bool:
        """Whether a machine gets units: each further one needs the inputs sent."""
        return node == _HERE or node in self.nodes or len(self.nodes) < self.begin.nodes

    def next(self, node: str) -> int | None:
        """Return the first waiting unit that a machine may have, None if there is none."""
        if not self.waiting or not self.takes(node):
            return None
        if not self.shunned:
            return self.waiting[0]
        now = time.monotonic()
        may = (unit for unit in self.waiting if not (unit in self.shunned and self._shuns(unit, node, now)))
        return next(may, None)

    def _shuns(self, unit: int, node: str, now: float) -> bool:
        shunned, until = self.shunned[unit]
        return shunned == node and now < until

    def prefetches(self, worker: Worker) -> bool:
        """Whether a worker gets a second unit: a small one, and none of the last, which go to whoever is free first."""
        most = _PREFETCH_MACS_HERE if worker.node == _HERE else _PREFETCH_MACS
        return self.unit_macs() <= most and len(self.waiting) > self.takers

    @property
    def nbytes(self) -> int:
        """Size of the inputs."""
        return sum(tensor.nbytes for tensor in self.memory.inputs) if self.memory is not None else 0

    def unit_macs(self) -> float:
        """Return the multiply-adds of a unit."""
        return self.begin.plan.macs / len(self.begin.plan.units)


class Dispatch:
    """Share the workers out between jobs, unit by unit, fairly between owners.

    `send` sends a message to the server. Ray copies inputs and takes units in the thread of `aside`, which reports with
    `post` to the thread that calls the methods.
    """

    def __init__(
        self,
        fleet: Fleet,
        send: Callable[[Message], None],
        post: Callable[[Callable[[], object]], object],
        aside: Callable[..., object],
    ) -> None:
        self._fleet, self._send, self._post, self._aside = fleet, send, post, aside
        self._jobs: dict[int, _Job] = {}
        self._closing: set[int] = set()
        self._own: list[Worker] = []
        self._put: Callable[[Any], Any] = lambda _: None
        fleet.on_lost = self._lost

    def begin(self, begin: Begin, memory: Memory, put: Callable[[Any], Any]) -> None:
        """Take a job; `put` copies an array to Ray's memory and returns the reference."""
        self._put = put
        while len(self._own) < begin.here:
            self._own.append(Worker(-len(self._own), _HERE, ready=True))
        units = range(first_stage(begin.plan))
        self._jobs[begin.job] = _Job(begin, memory, deque(units), set(units))
        self.fill()

    def done_here(self, done: DoneHere) -> None:
        """Take a unit from the server's worker that had it: it is in the job's memory, or the job is over."""
        for worker in self._own:
            for given in worker.units:
                if (given.job.begin.job, given.unit) == done:
                    given.job.here_s = _mean(given.job.here_s, time.monotonic() - given.since)
                    self._take(worker, given)
                    self._settle(given)
                    self.fill()
                    return

    def release(self, number: int) -> None:
        """Forget a job; `Released` is sent when nothing reads its memory any more."""
        if (job := self._jobs.pop(number, None)) is not None:
            job.left.clear()
            job.waiting.clear()
            self._closing.add(number)
            self._aside(partial(self._close, job))
        elif number not in self._closing:
            self._send(Released(number))

    def fill(self) -> None:
        """Give waiting units to workers that have too few; the server's come first, as nothing has to be sent."""
        workers = [*self._own, *self._fleet.workers]
        for depth in range(_PREFETCH):
            jobs = [job for job in self._jobs.values() if job.waiting]
            for each in jobs if depth else ():
                each.takers = sum(each.takes(worker.node) for worker in workers)
            for worker in workers if jobs else ():
                if len(worker.units) == depth and not (depth and worker.units[0].late):
                    job, unit = self._next(worker.node, [each for each in jobs if not depth or each.prefetches(worker)])
                    if job is not None:
                        job.waiting.remove(unit)
                        self._give(worker, job, unit)

    def check(self) -> None:
        """Give late units to other workers, and end workers that go on with what nobody wants."""
        now = time.monotonic()
        for worker in self._fleet.workers:  # the server watches over its own
            if not worker.units:
                continue
            first = worker.units[0]
            if first.unit not in first.job.left:
                first.unwanted_since = first.unwanted_since or now
                if now - first.unwanted_since > _GRACE_S:
                    self._fleet.lose(worker, kill=True)
            elif not first.late and now - first.since > self._patience(first, worker.node):
                for given in reversed(worker.units):  # so that the first one is first in the queue too
                    self._is_late(worker, given)
        self.fill()

    # What to give.

    def _next(self, node: str, jobs: Sequence[_Job]) -> tuple[_Job, int] | tuple[None, int]:
        """Choose the job and the unit that a worker on a machine gets."""
        owners: dict[str, int] = {}
        for job in self._jobs.values():
            owners[job.begin.owner] = owners.get(job.begin.owner, 0) + job.running
        waiting = [
            (job, unit)
            for job in jobs
            if (unit := job.next(node)) is not None and (node == _HERE or not self._is_sooner_here(job))
        ]

        def turn(each: tuple[_Job, int]) -> tuple[int, int, int]:
            job, _ = each
            return owners[job.begin.owner], job.running, job.begin.job

        return min(waiting, key=turn, default=(None, 0))

    def _is_sooner_here(self, job: _Job) -> bool:
        """Whether the server's workers, which have no other job, finish what waits before a machine would one unit."""
        given = [each.job for worker in self._own for each in worker.units]
        if not (given and job.here_s and job.there_s) or any(each is not job for each in given):
            return False
        rounds = -(-(len(given) + len(job.waiting)) // len(self._own))
        return (rounds - 0.5) * job.here_s < job.there_s

    def _having(self, job: _Job, unit: int, *, here: bool = False) -> bool:
        """Whether a worker has a unit and is not late with it; with `here`, one of the server's."""
        workers = self._own if here else (*self._own, *self._fleet.workers)
        return any(
            given.job is job and given.unit == unit and not given.late for worker in workers for given in worker.units
        )

    # Giving.

    def _give(self, worker: Worker, job: _Job, unit: int) -> None:
        given = _Given(job, unit, since=time.monotonic())
        worker.units.append(given)
        job.running += 1
        if not job.started:
            job.started = True
            self._send(Started(job.begin.job))
        if worker.node == _HERE:
            self._send(ComputeHere(job.begin.job, unit, job.losses.get(unit, 0)))
        else:
            job.nodes.add(worker.node)
            self._aside(partial(self._call, worker, given), job.nbytes)

    def _call(self, worker: Worker, given: _Given) -> None:
        """Send a unit to a worker of the cluster."""
        job = given.job
        if given.unit not in job.left:
            self._post(partial(self._unsent, worker, given, None))
            return
        plan, read, share = arguments(job.begin.plan, given.unit)
        try:
            parts = [self._reference(job, number, portion) for number, portion in enumerate(read)]
            future = worker.actor.compute.remote(plan, read, share, *parts).future()
        except Exception as error:  # noqa: BLE001 - Ray's memory is full, or Ray has ended
            self._post(partial(self._unsent, worker, given, error))
        else:
            self._post(partial(setattr, given, "since", time.monotonic()))
            future.add_done_callback(lambda done: self._post(lambda: self._done(worker, given, done)))

    def _reference(self, job: _Job, number: int, portion: Portion) -> Any:
        key = number, portion
        if key not in job.references:
            assert job.memory is not None
            # Workers view the memory of contiguous arrays; of others they get a copy.
            part = np.ascontiguousarray(cut(job.memory.inputs[number], portion))
            job.references[key] = part if part.nbytes <= _INLINE_BYTES else self._put(part)
        return job.references[key]

    def _close(self, job: _Job) -> None:
        job.references.clear()
        job.memory = None
        self._post(partial(self._closed, job.begin.job))

    def _closed(self, number: int) -> None:
        self._closing.discard(number)
        self._send(Released(number))

    # Answers.

    def _unsent(self, worker: Worker, given: _Given, error: Exception | None) -> None:
        if given in worker.units:
            self._take(worker, given)
        if error is not None and given.unit in given.job.left:
            self._end(given.job, _reason(error, "ray"), str(error))
        self.fill()

    def _done(self, worker: Worker, given: _Given, done: Any) -> None:
        error = done.exception()
        if error is not None and not _is_raised(error):
            self._fleet.lose(worker)  # whatever it had is given to others
            return
        if given not in worker.units:
            return
        self._take(worker, given)
        job = given.job
        job.answered.add(worker.node)
        if given.unit in job.left:
            if error is not None:
                self._end(job, _reason(error.cause), str(error))
            elif not self._having(job, given.unit, here=True):  # else that one writes the same bytes, and is not done
                self._answer(given, *done.result())
        self.fill()

    def _answer(self, given: _Given, result: npt.NDArray[Any], seconds: float) -> None:
        job = given.job
        assert job.memory is not None
        job.memory.write(job.begin.plan, job.begin.plan.units[given.unit], result)
        self._settle(given)
        if not given.late:
            job.there_s = _mean(job.there_s, time.monotonic() - given.since)
            job.slowest_s = max(job.slowest_s, time.monotonic() - given.since)
        self._send(UnitDone(job.begin.job, given.unit, seconds, job.losses.get(given.unit, 0)))

    def _take(self, worker: Worker, given: _Given) -> None:
        """Take a unit from a worker, which goes on with its next one."""
        worker.units.remove(given)
        if not given.late:
            given.job.running -= 1
        if worker.units:
            worker.units[0].since = time.monotonic()

    def _settle(self, given: _Given) -> None:
        """Count a unit as done."""
        job = given.job
        job.left.discard(given.unit)
        if (given.unit in job.repeats or given.unit in job.losses) and given.unit in job.waiting:
            job.waiting.remove(given.unit)

    # What goes wrong.

    def _patience(self, given: _Given, node: str) -> float:
        """Return the seconds after which an answer is late; each further time that it is, twice as many."""
        job = given.job
        seconds = _LATE_S + _LATE_TIMES * max(job.slowest_s, job.unit_macs() / _SLOW_MACS)
        if node not in job.answered:
            seconds += job.nbytes / _SLOW_BYTES
        return seconds * float(1 << job.repeats.get(given.unit, 0))

    def _is_late(self, worker: Worker, given: _Given) -> None:
        """Let a unit be given to another worker too, and another machine take the place of a silent one."""
        job = given.job
        given.late = True
        job.running -= 1
        job.nodes.discard(worker.node)
        if self._give_again(job, given.unit):
            job.repeats[given.unit] = job.repeats.get(given.unit, 0) + 1

    def _give_again(self, job: _Job, unit: int) -> bool:
        """Put a unit first in the queue, unless it is done, waits already, or another worker has it."""
        if unit not in job.left or unit in job.waiting or self._having(job, unit):
            return False
        job.waiting.appendleft(unit)
        return True

    def _lost(self, worker: Worker) -> None:
        """Give the units of a worker that has ended to others; the running one counts towards its job's failure."""
        for job in self._jobs.values():
            if all(each.node != worker.node for each in self._fleet.workers):
                job.nodes.discard(worker.node)
        given, worker.units = worker.units, []
        for place, each in enumerate(given):
            job = each.job
            if not each.late:
                job.running -= 1
            if each.unit not in job.left:
                continue
            job.losses[each.unit] = job.losses.get(each.unit, 0) + (place == 0 and not each.late)
            if job.losses[each.unit] >= _MOST_LOSSES:
                self._end(job, "lost", f"unit {each.unit} was lost with {_MOST_LOSSES} workers")
            elif self._give_again(job, each.unit):
                job.shunned[each.unit] = worker.node, time.monotonic() + _SHUN_S
        self.fill()

    def _end(self, job: _Job, reason: str, detail: str) -> None:
        self._send(Ended(job.begin.job, reason, detail))
        self.release(job.begin.job)


def _mean(before: float, now: float) -> float:
    return (before + now) / 2 if before else now


def _is_raised(error: BaseException) -> bool:
    """Whether the worker raised it, and did not end."""
    from ray.exceptions import RayTaskError

    return isinstance(error, RayTaskError)


def _reason(error: BaseException, other: str = "kernel") -> str:
    """Name what ends a job: there is no memory, Ray has lost what it keeps, or the `other` reason."""
    from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError

    if isinstance(error, (ObjectStoreFullError, OutOfDiskError, MemoryError)):
        return "memory"
    return "ray" if isinstance(error, RayError) else other
