"""The engine's guarantees: bits, deadlines, cancellation, and nothing left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from convgrad._errors import DeadlineExceeded, ShuttingDown
from kernels import ConvProblem, Unit, box, compute, plan
from tests.app.pool.fleet import TINY, Fleet, Frozen, fleet, random_inputs, soon
from tests.app.pool.proc import descriptors, opened_since

WIDE = dataclasses.replace(TINY, n=6, src_channels=40, dst_channels=48, src_spatial=(30, 30), dst_spatial=(28, 28))
LONG = dataclasses.replace(WIDE, src_channels=160, dst_channels=192)
"""Several units of some ten milliseconds each where workers are planned for."""
PROBLEMS = [
    WIDE,
    dataclasses.replace(TINY, dtype="f16"),
    dataclasses.replace(TINY, dtype="bf16", data_format="NXC", weights_format="XIO"),
    dataclasses.replace(TINY, n=0),
    dataclasses.replace(
        TINY, op="ConvTranspose", src_spatial=(6, 6), dst_spatial=(8, 8), weights_format="IOX", bias=True
    ),
    dataclasses.replace(WIDE, op="ConvTransposeBackwardWeights", src_spatial=(28, 28), dst_spatial=(30, 30)),
]


@pytest.fixture(scope="module")
def shared() -> Iterator[Fleet]:
    """Two workers for the tests in this file."""
    with fleet(2, grace_s=0.2, start_s=60.0) as made:
        yield made


@pytest.fixture
def two(shared: Fleet) -> Fleet:
    """Two workers, both running."""
    shared.run(shared.whole())
    return shared


@pytest.mark.heavy
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"{problem.op}-{problem.dtype}-{problem.n}")
@pytest.mark.parametrize("reference", [False, True])
def test_workers_and_one_process_give_the_same_bits(two: Fleet, problem: ConvProblem, reference: bool) -> None:
    """For every operation and dtype, workers with shared memory give the same bits as a single process."""
    inputs = random_inputs(problem)
    result = two.run(two.compute(problem, inputs, reference=reference))
    np.testing.assert_array_equal(result, compute(problem, *inputs, reference=reference))


async def test_a_cancel_does_not_interrupt_the_end_of_a_failed_job(two: Fleet) -> None:
    """A job past its deadline does not end while a stopped worker may still write to its memory."""
    with Frozen(two.pids):
        failing = asyncio.create_task(two.finish(two.job(plan(TINY), random_inputs(TINY), deadline=soon(0.02))))
        await asyncio.sleep(0.05)  # the deadline has passed, but not yet `grace_s`
        assert two.engine.snapshot()["jobs"] == 1
        failing.cancel()
        await asyncio.gather(failing, return_exceptions=True)
        assert two.engine.snapshot()["jobs"] == 0


@pytest.mark.heavy
def test_the_number_of_workers_changes_no_bit(two: Fleet) -> None:
    """One, two and three workers give the same bits for sums that depend on their order."""
    inputs = random_inputs(WIDE)
    results = [two.run(two.compute(WIDE, inputs)).tobytes()]
    for count in (1, 3):
        with fleet(count) as other:
            results.append(other.run(other.compute(WIDE, inputs)).tobytes())
    assert len(set(results)) == 1


async def test_a_reported_unit_is_final(two: Fleet) -> None:
    """A unit's box is final when the unit is reported, and each unit is reported once."""
    inputs = random_inputs(WIDE)
    expected = compute(WIDE, *inputs)
    job = two.job(plan(WIDE, workers=2), inputs)
    output = np.frombuffer(job.output.view, np.float32).reshape(WIDE.output_shape)
    seen = []

    def look(unit: Unit) -> None:
        seen.append(unit.index)
        if unit.offset is not None:
            np.testing.assert_array_equal(box(output, unit), box(expected, unit))

    job.on_unit = look
    await two.engine.run(job)
    assert sorted(seen) == list(range(len(job.plan.units)))
    assert job.queue_s is not None
    assert two.counters["compute_s"] > 0


async def test_a_deadline_ends_a_running_job(two: Fleet) -> None:
    """If the deadline passes during the computation, the call fails, and neither worker nor error keeps its memory."""
    job = two.job(plan(LONG, workers=4, reference=True), random_inputs(LONG), deadline=soon(0.05))
    with Frozen(two.pids):
        with pytest.raises(DeadlineExceeded) as failed:
            await two.finish(job)
        assert not two.busy()
    assert two.segments.stats().used == 0, f"the frames of {failed.value!r} keep the memory"


async def test_a_deadline_ends_a_job_that_never_ran(two: Fleet) -> None:
    """A job whose deadline passes in the queue fails too, and the jobs before and after it succeed."""
    inputs = random_inputs(LONG)
    chosen = plan(LONG, workers=4, reference=True)
    before = [asyncio.create_task(two.finish(two.job(chosen, inputs))) for _ in range(2)]
    with pytest.raises(DeadlineExceeded):
        await two.finish(two.job(chosen, inputs, deadline=soon(-1.0)))
    behind = await two.compute(TINY, random_inputs(TINY))
    np.testing.assert_array_equal(behind, compute(TINY, *random_inputs(TINY)))
    for result, _ in await asyncio.gather(*before):
        np.testing.assert_array_equal(result, compute(LONG, *inputs, reference=True))


async def test_a_deadline_ends_a_tiny_job(two: Fleet) -> None:
    """A job that is computed in the server's process fails too if its deadline has passed."""
    job = two.job(plan(TINY), random_inputs(TINY), deadline=soon(-1.0))
    with pytest.raises(DeadlineExceeded):
        await two.engine.run_here(job)
    two.release(job)


def test_a_spare_worker_goes_past_long_units() -> None:
    """While the only worker has a long unit, a spare one computes short ones, and no other long one."""
    inputs = random_inputs(TINY)

    async def scenario(both: Fleet) -> None:
        chosen = plan(LONG, workers=4, reference=True)
        with Frozen(both.pids) as frozen:
            long = [asyncio.create_task(both.finish(both.job(chosen, random_inputs(LONG)))) for _ in range(2)]
            await both.until(lambda: both.engine.snapshot()["jobs"] == 2)
            (busy,) = both.busy()
            (spare,) = both.pids - {busy}
            os.kill(spare, signal.SIGCONT)
            frozen.pids = {busy}
            for _ in range(3):
                result, _ = await both.finish(both.job(plan(TINY, workers=1), inputs, short=True))
                np.testing.assert_array_equal(result, compute(TINY, *inputs))
            assert both.busy() == [busy]
            assert both.engine.workers == (1, 1)
        await asyncio.gather(*long)

    with fleet(1, spare=True) as both:
        both.run(scenario(both))


async def test_a_cancelled_job_frees_workers_and_memory(two: Fleet) -> None:
    """A caller that leaves after the first unit leaves no unit on a worker and no lease."""
    await two.leave(two.job(plan(LONG, workers=4, reference=True), random_inputs(LONG)))
    assert not two.busy()
    assert two.engine.snapshot()["jobs"] == 0
    assert two.segments.stats().used == 0


def test_stop_leaves_no_process_and_no_descriptor() -> None:
    """Stop fails running and new jobs, also when it is called twice; after it everything is as before start."""
    before = descriptors()
    with fleet(2) as both:
        snapshot = both.engine.snapshot()
        pids = [snapshot["fork_server"]["pid"], *both.pids]

        async def stuck() -> None:
            job = both.job(plan(TINY), random_inputs(TINY))
            with Frozen(both.pids):
                running = asyncio.create_task(both.finish(job))
                await both.until(both.busy)
                stopping = asyncio.create_task(both.engine.stop())
                await asyncio.sleep(0)
                assert not both.engine.ready
                with pytest.raises(ShuttingDown):
                    await both.compute(TINY, random_inputs(TINY))
                await both.engine.stop()
                await stopping
                with pytest.raises(ShuttingDown):
                    await running

        both.run(stuck())
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not opened_since(before)
