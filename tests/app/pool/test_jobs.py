"""Turns, stages and settlement, without any processes."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.pool.buffers import SegmentPool
from app.pool.jobs import FairQueue, Job, JobRun
from convgrad._errors import Cancelled, DeadlineExceeded
from kernels import Plan, Unit
from tests.app.pool.fleet import TINY


def plan_of(units_of_stages: Sequence[int]) -> Plan:
    """Return a plan with this many units in each stage."""
    stages = [stage for stage, count in enumerate(units_of_stages) for _ in range(count)]
    units = tuple(Unit(index, stage, None, None, 1) for index, stage in enumerate(stages))
    return Plan(TINY, "none", units, len(units_of_stages), 0, ())


def job_of(pool: SegmentPool, *units_of_stages: int) -> Job:
    """Return a job with memory from `pool`."""
    return Job("job", plan_of(units_of_stages), (pool.acquire(4), pool.acquire(4)), pool.acquire(4))


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    """A memory pool."""
    pool = SegmentPool(1 << 24)
    yield pool
    pool.close()


def test_jobs_take_turns(pool: SegmentPool) -> None:
    """A job with few units does not wait until one with many units is done."""
    queue, many, few = FairQueue(), JobRun(job_of(pool, 5)), JobRun(job_of(pool, 2))
    queue.add(many)
    queue.add(few)
    order = []
    while (run := queue.next()) is not None:
        run.take()
        order.append(run)
    assert order == [many, few, many, few, many, many, many]


def plenty(pool: SegmentPool, **named: Any) -> JobRun:
    """Return a job of many units, with these properties."""
    return JobRun(dataclasses.replace(job_of(pool, 100), **named))


def served(queue: FairQueue, turns: int, seconds: float = 1.0) -> list[JobRun]:
    """Compute units one after another; return their jobs."""
    order = []
    for _ in range(turns):
        run = queue.next()
        assert run is not None
        run.done(run.take())
        queue.charge(run, seconds)
        order.append(run)
    return order


def test_one_who_comes_is_next(pool: SegmentPool) -> None:
    """A new job waits for no unit of those that have been served already, however many they are."""
    queue = FairQueue()
    for number in range(10):
        queue.add(plenty(pool, connection=number))
    served(queue, 20)
    late = plenty(pool, connection=10)
    queue.add(late)
    assert late in served(queue, 11)
    assert served(queue, 110).count(late) == 10


def test_a_newcomer_does_not_overtake_for_ever(pool: SegmentPool) -> None:
    """Small jobs that come again and again leave the old one every second unit."""
    queue, old = FairQueue(), plenty(pool, connection=1)
    queue.add(old)
    order = served(queue, 5)
    for _ in range(10):
        small = JobRun(dataclasses.replace(job_of(pool, 1), connection=2))
        queue.add(small)
        while not small.over:
            order += served(queue, 1)
        queue.remove(small)
    assert order[5:].count(old) == 10


def test_time_is_shared_by_owner_then_by_connection(pool: SegmentPool) -> None:
    """Each of two owners gets half of the time, and of this each connection its half, whatever units it has."""
    queue, counts = FairQueue(), Counter[tuple[str, int]]()
    for owner, connection, jobs in (("one", 1, 1), ("two", 2, 1), ("two", 3, 7)):
        for _ in range(jobs):
            queue.add(plenty(pool, owner=owner, connection=connection))
    for _ in range(80):
        run = queue.next()
        assert run is not None
        run.done(run.take())
        counts[run.job.owner, run.job.connection] += 1
        queue.charge(run, 2.0 if run.job.connection == 2 else 1.0)
    seconds = {"one": counts["one", 1], "two": 2 * counts["two", 2] + counts["two", 3]}
    assert abs(seconds["one"] - seconds["two"]) <= 2
    assert abs(2 * counts["two", 2] - counts["two", 3]) <= 2


def test_a_batch_is_one_client(pool: SegmentPool) -> None:
    """A job waits for one unit of a connection with many jobs, even while none of those has been computed."""
    queue = FairQueue()
    for _ in range(20):
        queue.add(plenty(pool, connection=1))
    late = plenty(pool, connection=2)
    queue.add(late)
    first, second = queue.next(), None
    assert first is not None
    first.take()
    second = queue.next()
    assert second is late


def test_only_short_units(pool: SegmentPool) -> None:
    """The spare worker is given units of short jobs only."""
    queue, short = FairQueue(), plenty(pool, short=True)
    queue.add(plenty(pool))
    assert queue.next(short=True) is None
    queue.add(short)
    assert queue.next(short=True) is short


def test_a_job_may_be_a_part_of_its_plan(pool: SegmentPool) -> None:
    """Only the units that are named run, in the order of their stages; a stage may have none."""
    job = job_of(pool, 2, 2)
    for named in (1, 2), (3,), ():
        run, given = JobRun(dataclasses.replace(job, units=tuple(job.plan.units[index] for index in named))), []
        while run.waiting:
            given.append(run.take())
            run.done(given[-1])
        assert [unit.index for unit in given] == list(named)
        assert run.over


def test_a_lost_unit_runs_first(pool: SegmentPool) -> None:
    """A unit that must run again is the next to be handed out."""
    run = JobRun(job_of(pool, 3))
    unit = run.take()
    run.lost(unit, killed=True)
    run.requeue(unit)
    assert run.take() is unit


@pytest.mark.parametrize(("killed", "most"), [(False, 2), (True, 6)])
def test_too_many_deaths_blame_the_unit(pool: SegmentPool, killed: bool, most: int) -> None:
    """The second crash with the same unit, or the sixth kill, blames the unit; deaths with others don't count."""
    run = JobRun(job_of(pool, 2))
    first, second = run.take(), run.take()
    assert not any(run.lost(first, killed=killed) for _ in range(most - 1))
    assert not run.lost(second, killed=killed)
    assert run.lost(first, killed=killed)


def test_memory_is_held_until_no_unit_is_on_a_worker(pool: SegmentPool) -> None:
    """After a job has failed and its owner has released everything, its memory is not reused before it is settled."""
    run = JobRun(job_of(pool, 2))
    unit = run.take()
    for segment in (*run.job.inputs, run.job.output):
        segment.release()
    run.fail(Cancelled("gone"))
    assert run.over
    assert pool.stats().idle_blocks == 0
    run.requeue(unit)
    assert run.settled.is_set()
    assert pool.stats().used == 0


def test_only_the_first_error_counts(pool: SegmentPool) -> None:
    """A job that has failed keeps its first error, and a complete one does not fail."""
    failed, complete = JobRun(job_of(pool, 1)), JobRun(job_of(pool, 1))
    failed.fail(Cancelled("first"))
    failed.fail(DeadlineExceeded("second"))
    assert isinstance(failed.error, Cancelled)
    complete.done(complete.take())
    complete.fail(DeadlineExceeded("late"))
    assert complete.error is None


def test_units_are_reported_in_the_order_of_completion(pool: SegmentPool) -> None:
    """Each unit that is done is reported, and none of a job that has failed."""
    run, seen = JobRun(job_of(pool, 3)), list[Unit]()
    run.job.on_unit = seen.append
    first, second, third = run.take(), run.take(), run.take()
    run.done(second)
    run.done(first)
    run.fail(Cancelled("gone"))
    run.done(third)
    assert seen == [second, first]


class QueueMachine(RuleBasedStateMachine):
    """In any order of events each unit is done once, stages run in order, and nothing settles early."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SegmentPool(1 << 26)
        self.queue = FairQueue()
        self.runs: list[JobRun] = []
        self.on_workers: list[tuple[JobRun, Unit]] = []
        self.finished: dict[JobRun, list[int]] = {}

    @rule(stages=st.lists(st.integers(1, 4), min_size=1, max_size=3))
    def submit(self, stages: list[int]) -> None:
        """Add a job."""
        run = JobRun(job_of(self.pool, *stages))
        self.runs.append(run)
        self.finished[run] = []
        self.queue.add(run)

    @rule()
    def give_out(self) -> None:
        """Hand a unit to a worker: one of the earliest incomplete stage."""
        run = self.queue.next()
        if run is None:
            assert not any(each.waiting for each in self.runs)
            return
        unit = run.take()
        assert unit.index not in self.finished[run]
        earlier = [other.index for other in run.job.plan.units if other.stage < unit.stage]
        assert set(earlier) <= set(self.finished[run])
        self.on_workers.append((run, unit))

    @precondition(lambda self: self.on_workers)
    @rule(pick=st.randoms(use_true_random=False), death=st.sampled_from([None, "crash", "kill"]))
    def come_back(self, pick: random.Random, death: str | None) -> None:
        """Finish a unit, or lose its worker."""
        run, unit = self.on_workers.pop(pick.randrange(len(self.on_workers)))
        if death is None:
            if run.error is None:
                self.finished[run].append(unit.index)
            run.done(unit)
            return
        if run.lost(unit, killed=death == "kill"):
            run.fail(Cancelled("too many deaths"))
        run.requeue(unit)

    @precondition(lambda self: self.runs)
    @rule(pick=st.randoms(use_true_random=False))
    def cancel(self, pick: random.Random) -> None:
        """Cancel a job."""
        pick.choice(self.runs).fail(Cancelled("gone"))

    @invariant()
    def jobs_settle_exactly_when_they_are_over_and_off_all_workers(self) -> None:
        """A job settles once it is over and no worker has its units, and never earlier."""
        for run in self.runs:
            busy = sum(1 for other, _ in self.on_workers if other is run)
            assert run.running == busy
            complete = len(self.finished[run]) == len(run.job.plan.units)
            assert run.over == (complete or run.error is not None)
            assert run.settled.is_set() == (run.over and not busy)
            assert len(set(self.finished[run])) == len(self.finished[run])

    def teardown(self) -> None:
        """Once the jobs are gone, no memory is held."""
        self.queue = FairQueue()
        self.runs.clear()
        self.on_workers.clear()
        self.finished.clear()
        self.pool.close()
        assert self.pool.stats().total == 0


QueueMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestQueueMachine = QueueMachine.TestCase
