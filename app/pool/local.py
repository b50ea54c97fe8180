"""The engine that computes on worker processes of this machine: keep them alive and busy, and enforce cancellations.

Everything runs on the event loop, in callbacks that take microseconds. A unit is on one worker at a time, and a worker
has at most one more unit prefetched. A unit leaves a worker only when the worker reports it or its process is
certainly gone.
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
from dataclasses import replace
from typing import Any

from app.pool.buffers import SegmentPool
from app.pool.causes import how_it_ended
from app.pool.handle import Assignment, PlanCopy, WorkerHandle
from app.pool.jobs import FairQueue, Job, JobRun, no_workers, shutting_down, uninterrupted
from app.pool.launcher import Launcher
from app.pool.messages import Done
from convgrad._errors import (
    Cancelled,
    ConvgradError,
    DeadlineExceeded,
    InternalError,
    Overloaded,
    WorkerLost,
)
from engine import threads
from kernels import Plan

__all__ = ["LocalEngine"]

_log = logging.getLogger(__name__)
_MOST_PLANS, _MOST_UNSAVED = 256, 32
# Failed attempts in a row to start a worker: the delays between them, the number after which calls are refused, and
# the number after which the service gives up, some 13 seconds plus the attempts themselves.
_RETRY_FIRST_S, _RETRY_LAST_S = 0.5, 5.0
_TOLERATED_FAILURES = 3
_MOST_FAILURES = 6
# Units of up to a few milliseconds are prefetched: a prefetched unit makes the next job wait longer.
_SMALL_MACS = 1 << 26
_TRIM_EVERY_S = 5.0


class LocalEngine:
    """Compute jobs on `workers` processes that share the memory of `segments`: jobs in, finished units out.

    With a `spare` one there is one more worker, which computes short units while all others are busy, some of them with
    long ones. A worker that does not stop within `grace_s` is killed, and so is one that is not ready `start_s` after
    it was requested. Unused memory is kept for reuse for `idle_s`. All times are in seconds.
    """

    def __init__(
        self,
        segments: SegmentPool,
        *,
        workers: int,
        spare: bool = False,
        grace_s: float = 0.02,
        start_s: float = 60.0,
        idle_s: float = 60.0,
    ) -> None:
        self._segments = segments
        self._wanted, self._spare = workers, int(spare)
        self._grace_s = grace_s
        self._start_s = start_s
        self._idle_s = idle_s
        self._plan_numbers = itertools.count(1)
        self._workers: list[WorkerHandle] = []
        self._dead: list[int] = []  # process ids that the fork server has not reaped
        self._idle: list[WorkerHandle] = []  # the last one to finish is used first: its caches are warm
        self._queue = FairQueue()
        self._plans: OrderedDict[int, tuple[Plan, PlanCopy]] = OrderedDict()  # by id() of the plan, kept alive here
        self._loaded: dict[int, Plan] = {}  # those that ran here, in the same way
        names = ("units", "macs", "compute_s", "retried_units", "deaths", "enforced_stops")
        self._counters: dict[str, Any] = dict.fromkeys(names, 0)  # since the start
        self._trimming: asyncio.Task[None] | None = None
        self._closing = False
        self._stopping = False
        self._changed = asyncio.Event()
        self._stop_task: asyncio.Task[None] | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called when a worker has become ready, starting one has failed, or the compiled code does not work."""
        self.failure: str | None = None
        """Why workers are missing, in one line; None when none failed to start."""
        self.given_up = False
        """Whether no more attempts to start a worker are made."""
        self._failures = 0  # in a row
        self._ever_answered = False  # whether any worker has become ready
        self._fork_server_proved = False  # whether one of the current fork server has
        self._retry_timer: asyncio.TimerHandle | None = None
        self.launcher = Launcher(
            start_s=start_s,
            on_loaded=self._on_loaded,
            on_worker=self._on_worker,
            on_failed=self._retry_later,
            on_died=self._on_fork_server_died,
        )

    @property
    def ready(self) -> bool:
        """Whether jobs are accepted: workers are ready or being replaced."""
        being_replaced = self._ever_answered and self._failures < _TOLERATED_FAILURES
        able = being_replaced or any(worker.ready for worker in self._workers)
        return able and not self.given_up and not self._stopping

    @property
    def workers(self) -> tuple[int, int]:
        """Number of workers that are ready, and the number wanted, without the spare one."""
        return min(sum(worker.ready for worker in self._workers), self._wanted), self._wanted

    async def start(self) -> None:
        """Start the fork server in the background; workers are forked when it has warmed up."""
        loop = asyncio.get_running_loop()
        # Segments are freed in whichever thread needs the memory.
        self._segments.on_retire = lambda number: loop.call_soon_threadsafe(self._forget_segment, number)
        loop.call_soon(self.launcher.start)
        self._trimming = loop.create_task(self._trim())

    async def stop(self) -> None:
        """Refuse new jobs, fail the running ones, and end every process; may be called again."""
        self._stopping = True
        if self._stop_task is None:
            self._stop_task = asyncio.get_running_loop().create_task(self._shut_down())
        await asyncio.shield(self._stop_task)

    async def run(self, job: Job) -> None:
        """Compute a job. Raises `DeadlineExceeded`, `WorkerLost`, `ShuttingDown`, `Overloaded` and `InternalError`.

        It ends, also if it is cancelled, only when no worker can write to the job's segments any more.
        """
        if self._stopping:
            raise shutting_down()
        if self.given_up:
            raise no_workers()
        run, loop, late = JobRun(job), asyncio.get_running_loop(), None
        self._queue.add(run)
        if job.deadline is not None:
            error = DeadlineExceeded("the deadline passed before the result was complete")
            late = loop.call_later(max(0.0, job.deadline - time.monotonic()), self._fail, run, error)
        self._dispatch()
        try:
            await run.settled.wait()
        except asyncio.CancelledError:
            self._fail(run, Cancelled("the call was cancelled"))
            await uninterrupted(run.settled.wait())
            raise
        finally:
            if late is not None:
                late.cancel()
            self._queue.remove(run)
            self._changed.set()
        if run.error is not None:
            # A copy: the frames of its traceback refer to the run, and that to the error. Memory that they view would
            # wait for the garbage collector.
            raise type(run.error)(run.error.message, data=run.error.data)

    async def run_here(self, job: Job) -> None:
        """Compute a tiny job in this process: the way to a worker and back takes several times as long.

        Its memory need not be shared. The first of each plan runs in a thread: loading its code takes milliseconds.
        Raises `DeadlineExceeded`.
        """
        plan, begun = job.plan, time.perf_counter()
        if self._loaded.get(id(plan)) is plan:
            _compute(job)
        else:
            await asyncio.to_thread(_load_and_compute, job)
            if len(self._loaded) >= _MOST_PLANS:
                self._loaded.clear()
            self._loaded[id(plan)] = plan
        self._counters["units"] += len(plan.units)
        self._counters["macs"] += plan.macs
        self._counters["compute_s"] += time.perf_counter() - begun
        if job.on_unit is not None:
            for unit in plan.units:
                job.on_unit(unit)

    def _fail(self, run: JobRun, error: ConvgradError) -> None:
        """End a job that is not over: waiting units are dropped, running ones stopped, or else their workers killed."""
        if run.over:
            return
        run.fail(error)
        loop = asyncio.get_running_loop()
        for worker in self._workers:
            if worker.assignments and (last := worker.assignments[-1]).run is run:
                worker.stop(last)
                loop.call_later(self._grace_s, self._enforce, worker, last)

    def _forget_segment(self, number: int) -> None:
        """Let workers unmap a segment that no longer exists."""
        for worker in self._workers:
            worker.forget(number)

    def snapshot(self) -> dict[str, Any]:
        """Describe workers, queue, memory and counters."""
        return {
            "workers": [worker.snapshot() for worker in self._workers],
            "workers_wanted": self._wanted,
            "tile_gflops": self.launcher.tile_gflops,
            "fork_server": {"pid": self.launcher.pid, "restarts": self.launcher.restarts},
            "jobs": len(self._queue),
            "units_waiting": sum(run.remaining - run.running for run in self._queue if not run.over),
            "counters": self._counters.copy(),
        }

    # Jobs.

    def _dispatch(self) -> None:
        while self._idle and (run := self._turn()) is not None:
            if run.job.queue_s is None:
                run.job.queue_s = time.monotonic() - run.since
            self._idle.pop().run(run, self._plan_copy(run.job.plan))
        self._prefetch()

    def _turn(self) -> JobRun | None:
        """Return the next job for an idle worker: for the spare one, to go past a long unit."""
        busy = [worker.assignments[0].run.job for worker in self._workers if worker.assignments]
        if len(busy) < self._wanted:
            return self._queue.next()
        return None if all(job.short for job in busy) else self._queue.next(short=True)

    def _prefetch(self) -> None:
        """Give each worker a second small unit of the only job: the round trip takes as long as computing it.

        The last units are left to the workers that are free first.
        """
        if len(self._queue) != 1:
            return
        (run,) = self._queue
        for worker in self._workers:
            running = [each.unit.macs for each in worker.assignments if each.run is run]
            if len(running) == 1 and running[0] <= _SMALL_MACS and run.waiting > self._wanted:
                worker.run(run, self._plan_copy(run.job.plan))

    def _plan_copy(self, plan: Plan) -> PlanCopy:
        # Plans come from a cache: the next call of the same shape finds its plan pickled and known to the workers. Its
        # units, often thousands, travel one by one.
        key = id(plan)
        if key not in self._plans:
            pickled = pickle.dumps(replace(plan, units=()), protocol=pickle.HIGHEST_PROTOCOL)
            self._plans[key] = plan, PlanCopy(next(self._plan_numbers), pickled)
            if len(self._plans) > _MOST_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key][1]

    def _on_done(self, worker: WorkerHandle, assignment: Assignment, done: Done) -> None:
        run, unit = assignment.run, assignment.unit
        self._counters["compute_s"] += done.seconds
        self._queue.charge(run, done.seconds)
        if done.outcome == "done":
            self._counters["units"] += 1
            self._counters["macs"] += unit.macs
            run.done(unit)
        else:
            if done.outcome == "failed":
                _log.error(
                    "unit %d of job %s failed on worker %d:\n%s", unit.index, run.job.id, worker.pid, done.detail
                )
                self._fail(run, InternalError("a kernel failed; the log has the details"))
            elif done.outcome == "no_memory":
                _log.error("worker %d ran out of memory in unit %d of job %s", worker.pid, unit.index, run.job.id)
                self._fail(run, Overloaded("a worker ran out of memory", retry_after=1.0, data={"reason": "memory"}))
            run.requeue(unit)
        if not worker.assignments:
            self._idle.append(worker)
        self._dispatch()

    def _enforce(self, worker: WorkerHandle, assignment: Assignment) -> None:
        if assignment in worker.assignments:
            self._counters["enforced_stops"] += 1
            _log.warning("worker %d did not stop in time: killing it", worker.pid)
            worker.kill()

    # Workers.

    def _fill(self) -> None:
        """Request the next missing worker; `_on_worker` goes on."""
        stopped = self._closing or self.given_up or self.launcher.busy
        if self.launcher.loaded and not stopped and len(self._workers) < self._wanted + self._spare:
            self.launcher.spawn(self._dead)
            self._dead.clear()

    def _on_loaded(self) -> None:
        if self.launcher.unfit is not None:
            self.on_change()
        self._fill()

    def _on_worker(self, pid: int, descriptors: list[int]) -> None:
        if self._closing or len(descriptors) < 2:
            for descriptor in descriptors:  # without its socket the worker ends by itself
                os.close(descriptor)
            self._dead.append(pid)
            if not self._closing:
                self._retry_later("a worker can't be watched: too many files are open", final=False)
            return
        worker = WorkerHandle(
            pid, *descriptors, on_ready=self._on_ready, on_done=self._on_done, on_death=self._on_death
        )
        self._workers.append(worker)
        asyncio.get_running_loop().call_later(self._start_s, self._check_started, worker)
        if self._retry_timer is None:
            self._fill()

    def _on_fork_server_died(self, cause: str, final: bool) -> None:
        self._dead.clear()
        if self._fork_server_proved:
            self._fork_server_proved = False
            _log.warning("%s; starting another one", cause)
            self.launcher.start()
        else:
            self._retry_later(cause, final)

    def _on_ready(self, worker: WorkerHandle) -> None:
        self._failures, self._ever_answered, self._fork_server_proved = 0, True, True
        ready, wanted = self.workers
        if ready >= wanted:
            self.failure = None
        self._idle.append(worker)
        self._dispatch()
        self.on_change()

    def _on_death(self, worker: WorkerHandle, code: int | None) -> None:
        """Replace a worker; queue its unit again, or fail the job if that unit keeps killing workers."""
        self._workers.remove(worker)
        self._dead.append(worker.pid)
        if worker in self._idle:
            self._idle.remove(worker)
        self._changed.set()
        if not self._closing:
            _log.warning("worker %d %s", worker.pid, how_it_ended(code))
            self._counters["deaths"] += 1
            if worker.ready:
                self._fill()
            elif self.launcher.loaded:  # otherwise the fork server's own failure is counted
                self._retry_later("a worker exited before it was ready", final=False)
        while worker.assignments:
            assignment = worker.assignments.pop()
            run, unit = assignment.run, assignment.unit
            if not worker.assignments and not run.over:
                self._counters["retried_units"] += 1
                if run.lost(unit, killed=code in {None, 0, -signal.SIGKILL}):
                    message = "the same unit of work keeps crashing worker processes"
                    self._fail(run, WorkerLost(message, data={"unit": unit.index}))
            run.requeue(unit)
        self._dispatch()

    def _retry_later(self, cause: str, final: bool) -> None:
        """Count a failed attempt to start a worker, and start the missing ones after a delay, or give up.

        Further failures before that belong to the same attempt.
        """
        if self._retry_timer is not None or self.given_up:
            return
        self._failures += 1
        ready, wanted = self.workers
        known, self.failure = self.failure, cause
        if not ready and (final or self._failures >= _MOST_FAILURES):
            self.given_up = True
            for run in self._queue:
                self._fail(run, no_workers())
        else:
            delay = min(_RETRY_FIRST_S * (1 << min(self._failures - 1, 10)), _RETRY_LAST_S)
            self._retry_timer = asyncio.get_running_loop().call_later(delay, self._retry)
            if not ready:
                _log.error("%s (attempt %d of %d; retrying in %.1f s)", cause, self._failures, _MOST_FAILURES, delay)
            elif cause != known:
                _log.warning("only %d of %d workers are running: %s", ready, wanted, cause)
        self.on_change()

    def _retry(self) -> None:
        self._retry_timer = None
        self.launcher.start()
        self._fill()

    async def _trim(self) -> None:
        while True:
            await asyncio.sleep(_TRIM_EVERY_S)
            with contextlib.suppress(RuntimeError):  # no thread can be started
                await asyncio.to_thread(self._segments.trim, self._idle_s)

    def _check_started(self, worker: WorkerHandle) -> None:
        if not worker.ready and worker in self._workers:
            _log.warning("worker %d does not start: killing it", worker.pid)
            worker.kill()

    # Shutdown.

    async def _shut_down(self) -> None:
        for run in self._queue:
            self._fail(run, shutting_down())
        while len(self._queue):
            await self._wait_for_change()
        self._closing = True
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        if self._trimming is not None:
            self._trimming.cancel()
        for worker in self._workers:
            worker.kill()
        while self._workers:
            await self._wait_for_change()
        await self.launcher.stop()
        self._segments.on_retire = None

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _load_and_compute(job: Job) -> None:
    """Compute a job; a function that had to be compiled and can't be saved works the next time."""
    for _ in range(_MOST_UNSAVED):
        with contextlib.suppress(OSError):
            return _compute(job)
    return _compute(job)


def _compute(job: Job) -> None:
    scratch = None if job.scratch is None else job.scratch.view
    on_memory = threads.Job.over(job.plan, [memory.view for memory in job.inputs], job.output.view, scratch)
    threads.run([on_memory], 1, threads.Stop(job.deadline))
