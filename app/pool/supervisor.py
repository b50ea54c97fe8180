"""Keep N workers alive and at work: units out, results in, deaths and hangs noticed, cancels enforced.

Everything happens on the event loop, in callbacks that take microseconds. A unit is on one worker at a time, which
has no more than one other ready; it leaves the worker when the worker says so or when its process is gone for
certain, never earlier.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import signal
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.pool.causes import explain, is_final
from app.pool.engine import Job
from app.pool.handle import Assignment, PlanCopy, WorkerHandle
from app.pool.jobs import FairQueue, JobRun
from app.pool.launcher import Launcher
from app.pool.messages import Done, Unfit
from convgrad._errors import (
    ConvgradError,
    DeadlineExceeded,
    InternalError,
    Overloaded,
    ShuttingDown,
    WorkerLost,
)
from kernels import Plan

__all__ = ["Supervisor"]

_log = logging.getLogger(__name__)
_CHECKS = 8
_MOST_PLANS = 256
_GOODBYE_S = 1.0
# Tries in a row without a worker that answers: how far apart, after how many calls are refused, after how many it is
# given up, some 13 seconds and the tries themselves after the first.
_RETRY_FIRST_S, _RETRY_LAST_S = 0.5, 5.0
_FORGIVEN = 3
_MOST_TRIES = 6
# Some milliseconds of work at most: a unit that a worker has ready makes the next job wait longer.
_SMALL_MACS = 1 << 26
# So long the fork server may take to say how a worker ended.
_VERDICT_S = 1.0


@dataclass(slots=True)
class _Counters:
    """What happened since the start."""

    jobs: int = 0
    units: int = 0
    macs: int = 0
    compute_s: float = 0.0
    retried_units: int = 0
    deaths: int = 0
    hangs: int = 0
    enforced_stops: int = 0


class Supervisor:
    """Run jobs on `workers` processes.

    `grace_s` is what a worker gets to notice a stop before it is killed; `hang_s` how long it may show no
    sign of life during a unit.
    """

    def __init__(self, workers: int, *, grace_s: float = 0.02, hang_s: float = 5.0) -> None:
        self._wanted = workers
        self._grace_s = grace_s
        self._hang_s = hang_s
        self._numbers = itertools.count(1)
        self._plan_numbers = itertools.count(1)
        self._workers: dict[int, WorkerHandle] = {}
        self._unjudged: dict[int, Assignment] = {}  # of dead workers, by number, until it is known how they ended
        self._idle: list[WorkerHandle] = []  # the last one to finish is used first: its caches are warm
        self._queue = FairQueue()
        self._open: set[JobRun] = set()  # until they are settled
        self._timers: dict[JobRun, asyncio.TimerHandle] = {}
        self._plans: OrderedDict[int, tuple[Plan, PlanCopy]] = OrderedDict()  # by id() of the plan, kept alive here
        self._counters = _Counters()
        self._monitor: asyncio.Task[None] | None = None
        self._closing = False
        self._drain_until: float | None = None
        self._changed = asyncio.Event()
        self._stop_task: asyncio.Task[None] | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called when a worker has answered, a try has failed, or the code turns out to be unfit."""
        self.failure: str | None = None
        """Why there is no worker, or not as many as there should be, in one line; None when nothing failed."""
        self.given_up = False
        """Whether no further try is made to get a worker."""
        self._tries = 0  # that failed in a row
        self._proven = False  # some worker has answered
        self._answered = False  # the same since the last fork server started
        self._said: tuple[str, bool] | None = None  # by the fork server, of the workers that it was asked for last
        self._next_try: asyncio.TimerHandle | None = None
        self._launcher = Launcher(
            on_loaded=self._fill,
            on_spawned=self._spawned,
            on_exited=self._exited,
            on_unfit=lambda: self.on_change(),
            on_failed=self._cannot_fork,
            on_died=self._abandoned,
        )

    @property
    def ready(self) -> bool:
        """Whether units are computed at once, or as soon as what died is replaced."""
        able = any(worker.ready for worker in self._workers.values()) or (self._proven and self._tries < _FORGIVEN)
        return able and not self.given_up and self._drain_until is None

    @property
    def workers(self) -> tuple[int, int]:
        """How many workers have answered, and how many there should be."""
        return sum(worker.ready for worker in self._workers.values()), self._wanted

    def progress(self) -> float:
        """Give the share of the warm-up that is done."""
        return self._launcher.share

    @property
    def unfit(self) -> Unfit | None:
        """Why the compiled code does not work on this processor, if it does not; there are no workers then."""
        return self._launcher.unfit

    def start(self) -> None:
        """Start the fork server in the background; workers follow when it has warmed up."""
        self._launcher.start()
        self._monitor = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self, drain_s: float) -> None:
        """Finish, or fail with ShuttingDown after `drain_s`, what runs; then end every process."""
        until = time.monotonic() + drain_s
        self._drain_until = until if self._drain_until is None else min(self._drain_until, until)
        self._changed.set()
        if self._stop_task is None:
            self._stop_task = asyncio.get_running_loop().create_task(self._shut_down())
        await asyncio.shield(self._stop_task)

    def submit(self, job: Job) -> JobRun:
        """Queue a job."""
        if self._drain_until is not None:
            raise ShuttingDown("the service is shutting down", retry_after=1.0)
        if self.given_up:
            raise _no_workers()
        run = JobRun(job)
        self._open.add(run)
        self._counters.jobs += 1
        self._queue.add(run)
        if job.arrival is not None:
            job.arrival.on_more = self._pump
        if job.deadline is not None:
            loop = asyncio.get_running_loop()
            self._timers[run] = loop.call_later(max(0.0, job.deadline - time.monotonic()), self._too_late, run)
        self._pump()
        return run

    def fail(self, run: JobRun, error: ConvgradError) -> None:
        """End a job: what waits is dropped, what is on workers is stopped, and killed if it does not stop."""
        if run.over:
            return
        run.fail(error)
        loop = asyncio.get_running_loop()
        for worker in self._workers.values():
            if worker.assignments and (last := worker.assignments[-1]).run is run:
                worker.stop(last)
                loop.call_later(self._grace_s, self._enforce, worker, last)
        self._book(run)

    def forget_segment(self, number: int) -> None:
        """Let workers unmap a segment that ceased to exist."""
        for worker in self._workers.values():
            worker.forget(number)

    def snapshot(self) -> dict[str, Any]:
        """Describe workers, queue and counters."""
        counters = {name: getattr(self._counters, name) for name in self._counters.__slots__}
        return {
            "ready": self.ready,
            "progress": self.progress(),
            "failure": self.failure,
            "workers": [worker.snapshot() for worker in self._workers.values()],
            "workers_wanted": self._wanted,
            "fork_server": {"pid": self._launcher.pid, "restarts": self._launcher.restarts},
            "jobs": len(self._open),
            "units_waiting": sum(run.remaining - run.on_workers for run in self._queue),
            "counters": counters,
        }

    # --- what happens to jobs

    def _pump(self) -> None:
        while self._idle and (run := self._queue.next()) is not None:
            if run.job.times.queue_s is None:
                run.job.times.queue_s = time.monotonic() - run.since
            self._idle.pop().run(run, self._copy(run.job.plan))
        self._run_ahead()

    def _run_ahead(self) -> None:
        """Have each worker with one small unit of the only job know the next: the way here and back takes as long.

        The last units are left to whoever is free first.
        """
        if (run := self._queue.sole()) is None:
            return
        for worker in self._workers.values():
            running = [each.unit.macs for each in worker.assignments if each.run is run]
            if len(running) == 1 and running[0] <= _SMALL_MACS and run.waiting > self._wanted:
                worker.run(run, self._copy(run.job.plan))

    def _copy(self, plan: Plan) -> PlanCopy:
        # Plans come from a cache, so the same call again finds the same object, pickled and known to the
        # workers.
        key = id(plan)
        if key not in self._plans:
            pickled = pickle.dumps(plan, protocol=pickle.HIGHEST_PROTOCOL)
            self._plans[key] = plan, PlanCopy(next(self._plan_numbers), pickled)
            if len(self._plans) > _MOST_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key][1]

    def _done(self, worker: WorkerHandle, assignment: Assignment, done: Done) -> None:
        run, unit = assignment.run, assignment.unit
        run.job.times.compute_s += done.seconds
        self._counters.compute_s += done.seconds
        if done.outcome == "done":
            self._counters.units += 1
            self._counters.macs += unit.macs
            run.done(unit)
        else:
            if done.outcome == "failed":
                _log.error(
                    "unit %d of job %s failed on worker %d:\n%s",
                    unit.index,
                    run.job.id,
                    worker.number,
                    done.detail,
                )
                self.fail(run, InternalError("a kernel failed; the log has the details"))
            elif done.outcome == "no_memory":
                _log.error("worker %d has no memory for unit %d of job %s", worker.number, unit.index, run.job.id)
                self.fail(run, Overloaded("a worker ran out of memory", retry_after=1.0, data={"reason": "memory"}))
            run.again(unit)
        if not worker.assignments:
            self._idle.append(worker)
        self._book(run)
        self._pump()

    def _too_late(self, run: JobRun) -> None:
        self.fail(run, DeadlineExceeded("the deadline was over before the result was complete"))

    def _book(self, run: JobRun) -> None:
        """Let go of a job that is over."""
        if run.over and run in self._queue:
            self._queue.remove(run)
            if (timer := self._timers.pop(run, None)) is not None:
                timer.cancel()
        if run.settled.is_set():
            self._open.discard(run)
            self._changed.set()

    def _enforce(self, worker: WorkerHandle, assignment: Assignment) -> None:
        if assignment in worker.assignments:
            self._counters.enforced_stops += 1
            _log.warning("worker %d (process %s) did not stop in time", worker.number, worker.pid)
            worker.kill()

    # --- what happens to workers

    def _fill(self) -> None:
        stopped = self._closing or self.given_up
        while self._launcher.loaded and not stopped and len(self._workers) < self._wanted:
            try:
                worker = WorkerHandle(
                    next(self._numbers), on_ready=self._welcome, on_done=self._done, on_death=self._died
                )
            except OSError as error:
                self._try_later(explain("a worker's socket or shared memory can't be made", error), is_final(error))
                return
            self._workers[worker.number] = worker
            self._launcher.spawn(worker.number, worker.descriptors)
            worker.handed_over()

    def _spawned(self, number: int, pid: int, pidfd: int | None) -> None:
        worker = self._workers.get(number)
        if pidfd is None:
            _log.error("worker %d can't be watched: there are too many open files", number)
            if worker is not None:
                worker.hang_up()
        elif worker is None:
            os.close(pidfd)  # given up meanwhile; its socket is closed, so it ends by itself
        else:
            worker.parent = self._launcher.pid
            worker.spawned(pid, pidfd)

    def _abandoned(self, cause: str, final: bool) -> float | None:
        """Let go of workers that a dead fork server may have forked but did not tell of: nobody can watch them."""
        for worker in tuple(self._workers.values()):
            if worker.pid is None:
                worker.hang_up()
        if self._answered:  # it did what it is for
            self._answered = False
            _log.warning("%s; the next one starts", cause)
            return 0.0
        return self._count(cause, final)

    def _cannot_fork(self, cause: str, final: bool) -> None:
        self._said = cause, final

    def _welcome(self, worker: WorkerHandle) -> None:
        self._tries, self._proven, self._answered = 0, True, True
        ready, wanted = self.workers
        if ready >= wanted:
            self.failure = None
        self._idle.append(worker)
        self._pump()
        self.on_change()

    def _exited(self, number: int, code: int) -> None:
        if code:
            reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            _log.log(logging.DEBUG if self._closing else logging.WARNING, "worker %d ended: %s", number, reason)
        worker = self._workers.get(number)
        if worker is not None and worker.exit_code is None:
            worker.exit_code = code
        self._judge(number, code)

    def _died(self, worker: WorkerHandle) -> None:
        del self._workers[worker.number]
        if worker in self._idle:
            self._idle.remove(worker)
        self._changed.set()
        if not self._closing:
            self._counters.deaths += 1
            self._replace(worker)
        if not worker.assignments:
            return
        assignment, *ahead = worker.assignments
        worker.assignments.clear()
        for never_begun in ahead:
            never_begun.run.again(never_begun.unit)
        self._unjudged[worker.number] = assignment
        if worker.exit_code is not None or assignment.run.over:
            self._judge(worker.number, worker.exit_code or 0)
        else:  # nobody will say how an orphan ended
            wait = _VERDICT_S if worker.parent == self._launcher.pid else 0.0
            asyncio.get_running_loop().call_later(wait, self._judge, worker.number, -signal.SIGKILL)

    def _judge(self, number: int, code: int) -> None:
        """Let the unit of a dead worker run again, or fail its job: it may be the unit that worker died of."""
        if (assignment := self._unjudged.pop(number, None)) is None:
            return
        run, unit = assignment.run, assignment.unit
        if not run.over:
            self._counters.retried_units += 1
            if run.lost(unit, killed=code in {0, -signal.SIGKILL}):
                message = "the same piece of work keeps taking worker processes down"
                self.fail(run, WorkerLost(message, data={"unit": unit.index}))
        run.again(unit)
        self._book(run)
        self._pump()

    def _replace(self, worker: WorkerHandle) -> None:
        if worker.ready:
            self._fill()
        elif self._launcher.loaded:  # else the fork server's death counts
            self._launcher.listen()
            cause, final = self._said or ("a worker ended before it answered", False)
            self._try_later(cause, final)

    def _try_later(self, cause: str, final: bool) -> None:
        """Start the missing workers again after a while; what fails before then is the same try."""
        if self._next_try is None and (delay := self._count(cause, final)) is not None:
            self._next_try = asyncio.get_running_loop().call_later(delay, self._try_again)

    def _try_again(self) -> None:
        self._next_try = self._said = None
        self._fill()

    def _count(self, cause: str, final: bool) -> float | None:
        """Count a try that failed; give the seconds until the next one, or None when it is given up."""
        self._tries += 1
        ready, wanted = self.workers
        known, self.failure = self.failure, cause
        if not ready and (final or self._tries >= _MOST_TRIES):
            self._give_up()
            return None
        delay = min(_RETRY_FIRST_S * (1 << min(self._tries - 1, 10)), _RETRY_LAST_S)
        if not ready:
            _log.error("%s (try %d of %d; the next one in %.1f s)", cause, self._tries, _MOST_TRIES, delay)
        elif cause != known:
            _log.warning("only %d of %d workers are there: %s", ready, wanted, cause)
        self.on_change()
        return delay

    def _give_up(self) -> None:
        self.given_up = True
        for run in tuple(self._open):
            self.fail(run, _no_workers())
        self.on_change()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._hang_s / _CHECKS)
            for worker in tuple(self._workers.values()):
                if worker.stalled(_CHECKS):
                    self._hung(worker)

    def _hung(self, worker: WorkerHandle) -> None:
        self._counters.hangs += 1
        if worker.pid is None:
            _log.warning("the fork server does not answer")
            self._launcher.kill()
        else:
            _log.warning("worker %d (process %d) hangs", worker.number, worker.pid)
            worker.exit_code = -signal.SIGABRT  # our own kill tells nothing: what it does is as bad as a crash
            worker.kill()

    # --- the end

    async def _shut_down(self) -> None:
        assert self._drain_until is not None
        while self._open and (left := self._drain_until - time.monotonic()) > 0:
            await self._change(left)
        for run in tuple(self._open):
            self.fail(run, ShuttingDown("the service is shutting down", retry_after=1.0))
        while self._open:
            await self._change()
        self._closing = True
        if self._next_try is not None:
            self._next_try.cancel()
        if self._monitor is not None:
            self._monitor.cancel()
        for worker in tuple(self._workers.values()):
            worker.hang_up()
        goodbye = time.monotonic() + _GOODBYE_S
        while self._workers and (left := goodbye - time.monotonic()) > 0:
            await self._change(left)
        for worker in tuple(self._workers.values()):
            worker.kill()
        while self._workers:
            await self._change()
        await self._launcher.stop()

    async def _change(self, within_s: float | None = None) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), within_s)


def _no_workers() -> Overloaded:
    return Overloaded("the service has no workers; /readyz says why", retry_after=5.0, data={"reason": "failed"})
