"""Workers that die, pause or don't stop: the caller gets the right bits or the right error, and the pool recovers."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from convgrad._errors import DeadlineExceeded, InternalError, WorkerLost
from kernels import Plan, compute, plan
from tests.app.pool.fleet import TINY, Fleet, Frozen, fleet, gone, kill, random_inputs, soon
from tests.app.pool.proc import descriptors

# One unit of some ten milliseconds of the reference.
SLOW = dataclasses.replace(TINY, n=3, src_channels=128, dst_channels=128, src_spatial=(50, 50), dst_spatial=(48, 48))

# Eight units where four workers are planned for.
MANY = dataclasses.replace(TINY, op="Convolution", n=16)


@pytest.fixture(scope="module")
def shared() -> Iterator[Fleet]:
    """Two workers, shared by the tests in this file, with long timeouts for workers that are slow to stop."""
    with fleet(2, grace_s=30.0, start_s=60.0) as made:
        yield made


@pytest.fixture
def two(shared: Fleet) -> Fleet:
    """Two workers, both running, whatever an earlier test did to them."""
    shared.run(shared.whole())
    return shared


@pytest.fixture(scope="module")
def strict() -> Iterator[Fleet]:
    """Two workers with short timeouts."""
    with fleet(2, grace_s=0.05, start_s=3.0) as made:
        yield made


async def test_a_worker_killed_in_the_middle_of_a_unit(two: Fleet) -> None:
    """After `kill -9` during a unit, the caller still gets the right bits."""
    inputs = random_inputs(SLOW)
    deaths = two.counters["deaths"]
    running = asyncio.create_task(two.compute(SLOW, inputs, reference=True))
    await two.until(lambda: any(each["unit"] for each in two.workers))
    kill(two.busy()[0])
    result = await running
    assert two.counters["deaths"] == deaths + 1
    np.testing.assert_array_equal(result, compute(SLOW, *inputs, reference=True))


@pytest.mark.heavy
async def test_no_call_is_refused_while_all_workers_are_replaced(two: Fleet) -> None:
    """Even with every worker dead the engine is ready: a new job waits for their replacements."""
    pids = two.pids
    for pid in pids:
        kill(pid)
    for pid in pids:
        await gone(pid)
    assert two.engine.ready
    await two.check()


async def test_a_lost_unit_runs_again_elsewhere(two: Fleet) -> None:
    """Only the unit of the dead worker is computed again, by another process, and the job reports it."""
    inputs = random_inputs(TINY)
    job = two.job(plan(TINY, workers=2, reference=True), inputs)
    with Frozen(two.pids):
        running = asyncio.create_task(two.finish(job))
        await two.until(two.busy)
        before = two.counters["retried_units"]
        kill(two.busy()[0])
        await two.until(lambda: two.counters["retried_units"] > before)
    result, units = await running
    assert two.counters["retried_units"] == before + 1
    assert sorted(unit.index for unit in units) == [unit.index for unit in job.plan.units]
    np.testing.assert_array_equal(result, compute(TINY, *inputs, reference=True))


async def test_a_unit_that_never_began_is_not_blamed(two: Fleet) -> None:
    """Workers prefetch a small unit of the only job; if a worker dies, another one runs that unit."""
    inputs = random_inputs(MANY)
    job = two.job(plan(MANY, workers=4, reference=True), inputs)
    total = len(job.plan.units)
    with Frozen(two.pids):
        running = asyncio.create_task(two.finish(job))
        await two.until(two.busy)
        assert two.engine.snapshot()["units_waiting"] == total - 2 * two.count
        before = two.counters["retried_units"]
        kill(two.busy()[0])
        await two.until(lambda: two.counters["retried_units"] > before)
    result, units = await running
    assert two.counters["retried_units"] == before + 1
    assert sorted(unit.index for unit in units) == list(range(total))
    np.testing.assert_array_equal(result, compute(MANY, *inputs, reference=True))


@pytest.mark.parametrize(("number", "deaths"), [(signal.SIGSEGV, 2), (signal.SIGKILL, 6)])
async def test_a_unit_that_crashes_workers_fails_its_job(two: Fleet, number: signal.Signals, deaths: int) -> None:
    """The second crash with the same unit, or the sixth kill, raises WorkerLost; the next job gets a complete pool."""
    old = two.pids  # how a worker ended is unknown once its fork server has died
    for pid in old:
        kill(pid)
    await two.until(lambda: not old & two.pids)
    await two.whole()
    job = two.job(plan(SLOW, reference=True), random_inputs(SLOW))
    assert len(job.plan.units) == 1
    running = asyncio.create_task(two.finish(job))
    died: list[int] = []
    for _ in range(deaths):
        await two.until(lambda: set(two.busy()) - set(died))
        died.extend(two.busy())
        os.kill(died[-1], number)
        await gone(died[-1])
    with pytest.raises(WorkerLost) as caught:
        await running
    assert caught.value.data == {"unit": 0}
    await two.check()
    await two.whole()


async def test_a_cancelled_unit_leaves_its_worker_alive(two: Fleet) -> None:
    """A worker that notices the stop ends both of its units and is not killed, and takes the next job."""
    pids, before = two.pids, two.counters["units"]
    job = two.job(plan(SLOW, workers=256, reference=True), random_inputs(SLOW))
    with Frozen(two.pids):
        reading = asyncio.ensure_future(two.engine.run(job))
        await two.until(two.busy)
        reading.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not two.busy()
    assert two.counters["units"] == before, "no unit was computed to its end"
    assert two.pids == pids
    await two.check()
    assert two.pids == pids


async def test_a_worker_that_ignores_a_stop_is_killed(strict: Fleet) -> None:
    """Cancelling returns only when the worker can't write any more; its memory is not reused before."""
    await strict.whole()
    job = strict.job(plan(TINY, reference=True), random_inputs(TINY))
    with Frozen(strict.pids):
        reading = asyncio.ensure_future(strict.engine.run(job))
        await strict.until(strict.busy)
        busy = strict.busy()
        strict.release(job)
        reading.cancel()
        await asyncio.sleep(0)
        assert strict.segments.acquire(job.output.size).id != job.output.id
        with pytest.raises(asyncio.CancelledError):
            await reading
        for pid in busy:
            await gone(pid)
    assert strict.segments.stats().used == 0
    await strict.whole()


async def test_a_worker_that_does_not_answer(strict: Fleet) -> None:
    """The call of a worker that never goes on fails at its deadline; the worker is killed and replaced."""
    inputs = random_inputs(TINY)
    await strict.whole()
    stopped = strict.pids
    with Frozen(stopped):
        running = asyncio.create_task(strict.finish(strict.job(plan(TINY), inputs, deadline=soon(0.3))))
        await strict.until(strict.busy)
        (victim,) = strict.busy()
        with pytest.raises(DeadlineExceeded):
            await running
        await gone(victim)
    await strict.check()
    await strict.whole()


async def test_a_worker_that_is_paused(strict: Fleet) -> None:
    """A worker that a machine pauses goes on with its unit, however long that took; others compute meanwhile."""
    await strict.whole()
    before, deaths = strict.pids, strict.counters["deaths"]
    job = strict.job(plan(SLOW, reference=True), random_inputs(SLOW))
    assert len(job.plan.units) == 1
    with Frozen(before) as frozen:
        running = asyncio.create_task(strict.finish(job))
        await strict.until(strict.busy)
        for pid in before - set(strict.busy()):
            os.kill(pid, signal.SIGCONT)
        frozen.pids &= set(strict.busy())
        for _ in range(20):
            await strict.check()
        assert not running.done()
    result, _ = await running
    np.testing.assert_array_equal(result, compute(SLOW, *random_inputs(SLOW), reference=True))
    assert (strict.pids, strict.counters["deaths"]) == (before, deaths)


@pytest.mark.heavy
async def test_a_dead_fork_server_is_replaced_while_workers_go_on(two: Fleet) -> None:
    """Workers outlive the process that forked them, and its successor replaces them."""
    pids, fork_server = two.pids, two.engine.snapshot()["fork_server"]
    kill(fork_server["pid"])
    await gone(fork_server["pid"])
    await two.check()
    assert two.pids == pids
    victim = two.workers[0]["pid"]
    kill(victim)
    await two.until(lambda: victim not in two.pids)
    await two.whole()
    assert two.engine.snapshot()["fork_server"]["restarts"] == fork_server["restarts"] + 1
    await two.check()


async def test_a_fork_server_that_dies_with_a_request(two: Fleet) -> None:
    """A worker that was requested from a fork server that dies is requested from its successor."""
    fork_server = two.engine.snapshot()["fork_server"]["pid"]
    with Frozen({fork_server}):
        kill(two.workers[0]["pid"])
        await two.until(lambda: len(two.workers) < two.count)
        kill(fork_server)
    await two.whole()


@pytest.mark.heavy
async def test_a_fork_server_that_hangs_is_replaced(strict: Fleet) -> None:
    """A fork server that does not fork on request is killed and replaced."""
    await strict.whole()
    fork_server = strict.engine.snapshot()["fork_server"]["pid"]
    with Frozen({fork_server}):
        kill(strict.workers[0]["pid"])
        await gone(fork_server)
    await strict.whole()


@contextmanager
def no_more_files(least: int = 0) -> Iterator[None]:
    """Allow no new descriptors of `least` or above in the block; those that are open stay open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def children(pid: int) -> set[int]:
    """Return the children of a process, zombies included."""
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@pytest.mark.parametrize("room", [0, 1])
async def test_no_descriptor_for_a_worker(two: Fleet, room: int) -> None:
    """A worker whose socket or pidfd can't be received ends, and is replaced once there are descriptors again."""
    fork_server, before = two.engine.snapshot()["fork_server"]["pid"], descriptors(os.getpid())
    with Frozen({fork_server}):
        kill(two.workers[0]["pid"])
        await two.until(lambda: len(two.workers) < two.count)
        os.close(free := os.dup(0))
        with no_more_files(free + room):
            os.kill(fork_server, signal.SIGCONT)
            await two.until(lambda: two.engine.failure)
    await two.whole()
    await two.until(lambda: children(fork_server) <= two.pids)
    assert len(descriptors(os.getpid())) <= len(before)  # what earlier tests left may have been closed


@pytest.mark.heavy
async def test_no_descriptors_for_a_fork_server(two: Fleet) -> None:
    """A dead fork server is replaced once there are descriptors again; failed attempts leak none."""
    await two.whole()
    fork_server, before = two.engine.snapshot()["fork_server"], descriptors(os.getpid())
    with no_more_files():
        kill(fork_server["pid"])
        await two.until(lambda: two.engine.snapshot()["fork_server"]["restarts"] > fork_server["restarts"] + 2)
    victim = two.workers[0]["pid"]
    kill(victim)
    await two.until(lambda: victim not in two.pids)
    await two.whole()
    assert len(descriptors(os.getpid())) <= len(before)  # what earlier tests left may have been closed


async def test_a_kernel_that_raises_fails_its_job_alone(two: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """An exception in a worker becomes InternalError, its details are logged, and the worker survives."""
    pids = two.pids
    broken = dataclasses.replace(plan(TINY), kernel="no such kernel")
    with pytest.raises(InternalError) as caught:
        await two.finish(two.job(broken, random_inputs(TINY)))
    assert "StopIteration" not in str(caught.value)
    assert "StopIteration" in caplog.text
    await two.check()
    assert two.pids == pids


def test_workers_have_only_their_own_descriptors(two: Fleet) -> None:
    """No worker has another one's socket or pidfd open: when its socket closes, a process exits."""
    for pid in two.pids:
        names = descriptors(pid).values()
        assert sum(name.startswith("socket:") for name in names) == 1
        assert not any("pidfd" in name for name in names)


def test_workers_are_killed_before_the_server_when_memory_runs_out(two: Fleet) -> None:
    """The out-of-memory killer prefers a worker, whose unit can run again, to the server and the fork server."""

    def score(pid: int | str) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    for pid in two.pids:
        assert score(pid) > score("self")
    assert score(two.engine.snapshot()["fork_server"]["pid"]) == score("self")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_the_process_group_are_left_to_the_server(two: Fleet, number: signal.Signals) -> None:
    """Ctrl-C, a service manager's SIGTERM or a closed terminal kills no worker: the server drains first."""
    pids = two.pids
    fork_server = two.engine.snapshot()["fork_server"]["pid"]
    for pid in (*pids, fork_server):
        os.kill(pid, number)
    inputs = random_inputs(TINY)
    np.testing.assert_array_equal(two.run(two.compute(TINY, inputs)), compute(TINY, *inputs))
    assert two.pids == pids
    assert two.engine.snapshot()["fork_server"]["pid"] == fork_server


async def test_workers_forget_memory_that_was_freed(two: Fleet) -> None:
    """After the pool frees a block, a worker unmaps it before its next unit."""

    def stale() -> bool:
        files = [number for number, name in descriptors().items() if "memfd:convgrad" in name]
        kept = {str(os.fstat(number).st_ino) for number in files}
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in two.pids]
        return any(set(re.findall(r"(\d+) +/memfd:convgrad", text)) - kept for text in maps)

    inputs = random_inputs(TINY)
    await two.compute(TINY, inputs)
    gc.collect()  # the traceback of an error in an earlier test may still hold a lease
    two.segments.trim()
    assert stale()
    while stale():
        await asyncio.gather(*(two.compute(TINY, inputs) for _ in range(two.count)))


async def test_concurrent_jobs_do_not_mix_data(two: Fleet) -> None:
    """Concurrent jobs over reused memory, with a worker dying among them, get their own results."""

    async def one(seed: int) -> None:
        for turn in range(4):
            inputs = random_inputs(TINY, seed * 100 + turn)
            result = await two.compute(TINY, inputs)
            np.testing.assert_array_equal(result, compute(TINY, *inputs))

    reused = two.segments.stats().reused
    jobs = asyncio.gather(*(one(seed) for seed in range(12)))
    kill(two.workers[0]["pid"])
    await jobs
    await two.whole()
    assert two.segments.stats().reused > reused


async def test_a_plan_is_sent_once(two: Fleet) -> None:
    """A repeated plan is sent as a number, and there may be more plans than a worker keeps."""
    inputs = random_inputs(TINY)
    plans: list[Plan] = [dataclasses.replace(plan(TINY), refusals=(str(i),)) for i in range(300)]
    expected = compute(TINY, *inputs)
    for chosen in (*plans, plans[0]):
        result, _ = await two.finish(two.job(chosen, inputs))
        np.testing.assert_array_equal(result, expected)
