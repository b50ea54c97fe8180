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
from dataclasses import dataclass
from typing import Any

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
_RESPAWN_S = 0.5
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
        self._launcher = Launcher(
            on_loaded=self._fill, on_spawned=self._spawned, on_exited=self._exited, on_died=self._abandoned
        )

    @property
    def ready(self) -> bool:
        """Whether units are computed at once, or as soon as what died is replaced."""
        launcher = self._launcher
        able = launcher.loaded or launcher.recovering or any(worker.ready for worker in self._workers.values())
        return able and self._drain_until is None

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
        while self._launcher.loaded and not self._closing and len(self._workers) < self._wanted:
            try:
                worker = WorkerHandle(
                    next(self._numbers), on_ready=self._welcome, on_done=self._done, on_death=self._died
                )
            except OSError as error:
                _log.error("a worker can't be started: %s", error)
                asyncio.get_running_loop().call_later(_RESPAWN_S, self._fill)
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

    def _abandoned(self) -> None:
        """Let go of workers that a dead fork server may have forked but did not tell of: nobody can watch them."""
        for worker in tuple(self._workers.values()):
            if worker.pid is None:
                worker.hang_up()

    def _welcome(self, worker: WorkerHandle) -> None:
        self._idle.append(worker)
        self._pump()

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
            return
        # One that never got ready may be the first of an endless row: not faster than some a second.
        asyncio.get_running_loop().call_later(_RESPAWN_S, self._fill)

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
