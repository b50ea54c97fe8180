"""An engine with real workers under any order of jobs, cancels, kills and pauses: every job ends as it should."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from app.pool.jobs import Job
from convgrad._errors import Cancelled, DeadlineExceeded, WorkerLost
from kernels import compute, plan
from tests.app.pool.fleet import TINY, Array, Fleet, fleet, random_inputs, soon

_FAULTS = st.sampled_from([signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
# Which worker or job to pick: the draw must not depend on how many there are at the time.
_TURNS = st.integers(0, 59)


@dataclass
class Running:
    """A job, its expected result, and the errors that it may end with."""

    job: Job
    task: asyncio.Task[Array]
    expected: Array
    may_fail: tuple[type[Exception], ...] = (WorkerLost,)


class SupervisorMachine(RuleBasedStateMachine):
    """Submit, cancel, let deadlines pass, kill, crash and stop workers, kill the fork server."""

    pool: Fleet

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Running] = []
        self.seed = 0

    @rule(reference=st.booleans(), hurried=st.booleans())
    def submit(self, reference: bool, hurried: bool) -> None:
        """Start a job; a hurried one has almost no time."""
        self.seed += 1
        inputs = random_inputs(TINY, self.seed)
        chosen = plan(TINY, workers=2, reference=reference)

        async def begin() -> None:
            job = self.pool.job(chosen, inputs, deadline=soon(0.002) if hurried else None)
            expected = compute(TINY, *inputs, reference=reference)
            failures = (WorkerLost, DeadlineExceeded) if hurried else (WorkerLost,)
            self.running.append(Running(job, asyncio.create_task(self._result(job)), expected, failures))
            await asyncio.sleep(0)

        self.pool.run(begin())

    async def _result(self, job: Job) -> Array:
        result, _ = await self.pool.finish(job)
        return result

    @precondition(lambda self: self.running)
    @rule(turn=_TURNS)
    def cancel(self, turn: int) -> None:
        """Cancel a job."""
        chosen = self.running[turn % len(self.running)]

        async def give_up() -> None:
            chosen.task.cancel()
            chosen.may_fail = (*chosen.may_fail, Cancelled)
            await asyncio.sleep(0)

        if Cancelled not in chosen.may_fail:  # a second cancel would not wait for the workers: calls shield theirs
            self.pool.run(give_up())

    @rule(turn=_TURNS, number=_FAULTS)
    def hurt(self, turn: int, number: signal.Signals) -> None:
        """Kill, crash or stop a worker."""
        if pids := sorted(self.pool.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[turn % len(pids)], number)

    @rule(odds=st.integers(0, 19))
    def hurt_fork_server(self, odds: int) -> None:
        """Kill the fork server, but rarely: its successor takes a while to start."""
        pid = self.pool.engine.snapshot()["fork_server"]["pid"]
        if odds == 7 and pid is not None:
            os.kill(pid, signal.SIGKILL)

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.02]))
    def pass_time(self, seconds: float) -> None:
        """Let time pass."""
        self.pool.run(asyncio.sleep(seconds))

    @precondition(lambda self: self.running)
    @rule(turn=_TURNS)
    def finish(self, turn: int) -> None:
        """Wait for a job to end and check its outcome."""
        self._end(self.running.pop(turn % len(self.running)))

    def _end(self, each: Running) -> None:
        async def wait() -> Array | BaseException:
            (outcome,) = await asyncio.gather(each.task, return_exceptions=True)
            return outcome

        self._go_on()
        outcome = self.pool.run(wait())
        if isinstance(outcome, asyncio.CancelledError):
            assert Cancelled in each.may_fail
        elif isinstance(outcome, BaseException):
            assert isinstance(outcome, each.may_fail), repr(outcome)
        else:
            np.testing.assert_array_equal(outcome, each.expected)

    @invariant()
    def no_more_workers_than_wanted(self) -> None:
        """The pool never has more workers than it should, and never counts jobs that do not exist."""
        snapshot = self.pool.engine.snapshot()
        assert len(snapshot["workers"]) <= self.pool.count
        assert snapshot["jobs"] <= len(self.running)

    def teardown(self) -> None:
        """Every job ends, no memory is held, and the pool becomes complete again."""
        while self.running:
            self._end(self.running.pop())
        self.pool.run(self._whole())
        gc.collect()  # the tracebacks of errors hold the frames that they passed
        self.pool.run(self.pool.until(lambda: self.pool.segments.stats().used == 0))

    def _go_on(self) -> None:
        """Let stopped workers continue: a job without a deadline waits for them."""
        for pid in self.pool.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def _whole(self) -> None:
        self._go_on()
        await self.pool.whole()


@pytest.fixture(scope="module")
def pool() -> Iterator[Fleet]:
    """Two workers that are killed soon if they don't stop; to start, a slow machine may take as long as a service."""
    with fleet(2, grace_s=0.05) as made:
        yield made


@pytest.mark.heavy
def test_every_job_ends_correctly(pool: Fleet) -> None:
    """In any order of events: right bits or a permitted error, no memory held, and finally a complete pool."""
    SupervisorMachine.pool = pool
    # The first failure ends the test, as it is: to shrink it would repeat its waits for minutes, and neither Hypothesis
    # nor uvloop lets through what pytest-timeout raises.
    chosen = settings(
        max_examples=8, stateful_step_count=20, suppress_health_check=list(HealthCheck), phases=[Phase.generate],
        report_multiple_bugs=False,
    )  # fmt: skip
    run_state_machine_as_test(SupervisorMachine, settings=chosen)
