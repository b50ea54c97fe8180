"""A real engine with real worker processes on its own event loop, and ways to kill and stop them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import uvloop

from app.pool.buffers import Segment, SegmentPool
from app.pool.jobs import Job
from app.pool.local import LocalEngine
from kernels import ConvProblem, Plan, Unit, compute, plan, storage_dtype

T = TypeVar("T")
Array = npt.NDArray[Any]
PATIENCE_S = 60.0
COMPILING_S = 280.0

TINY = ConvProblem(
    op="ConvolutionBackwardWeights", dtype="f32", n=2, src_channels=4, dst_channels=6, groups=1, src_spatial=(8, 8),
    dst_spatial=(6, 6), kernel=(3, 3), strides=(1, 1), dilations=(1, 1), pads_begin=(0, 0), data_format="NCX",
    weights_format="OIX",
)  # fmt: skip


class Fleet:
    """An engine, its memory, and the event loop that both use."""

    def __init__(self, workers: int, **options: Any) -> None:
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.segments = SegmentPool(256 << 20)
        self.engine = LocalEngine(self.segments, workers=workers, **options)
        self.count = workers + bool(options.get("spare"))

    def run(self, scenario: Awaitable[T], patience_s: float = PATIENCE_S) -> T:
        """Run a scenario to its end, failing if that takes too long; return its result."""

        async def bounded() -> T:
            async with asyncio.timeout(patience_s):
                return await scenario

        return self.runner.run(bounded())

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds, such as on the engine's snapshot."""
        while not condition():  # noqa: ASYNC110 - there is no event for what only an operator looks at
            await asyncio.sleep(0.002)

    async def whole(self) -> None:
        """Wait until every worker is running and ready."""
        await self.until(lambda: sum(worker["ready"] for worker in self.workers) == self.count)

    @property
    def workers(self) -> list[dict[str, Any]]:
        """Return the workers as in the snapshot."""
        found: list[dict[str, Any]] = self.engine.snapshot()["workers"]
        return found

    @property
    def counters(self) -> dict[str, Any]:
        """Return the engine's counters."""
        found: dict[str, Any] = self.engine.snapshot()["counters"]
        return found

    @property
    def pids(self) -> set[int]:
        """Return the process ids of the workers."""
        return {worker["pid"] for worker in self.workers}

    def busy(self) -> list[int]:
        """Return the process ids of the workers that have a unit."""
        return [worker["pid"] for worker in self.workers if worker["unit"]]

    def lay(self, array: Array) -> Segment:
        """Copy a tensor into shared memory; return its segment."""
        segment = self.segments.acquire(array.nbytes)
        segment.view[:] = array.tobytes()
        return segment

    def job(self, chosen: Plan, inputs: list[Array], **more: Any) -> Job:
        """Return a job with its own memory."""
        output = np.prod(chosen.problem.output_shape) * storage_dtype(chosen.problem.dtype).itemsize
        scratch = self.segments.acquire(chosen.scratch_bytes) if chosen.scratch_bytes else None
        segments = tuple(self.lay(array) for array in inputs)
        return Job("job", chosen, segments, self.segments.acquire(int(output)), scratch, **more)

    async def finish(self, job: Job) -> tuple[Array, list[Unit]]:
        """Run a job, return its result and its units, and release its memory however it ends."""
        problem = job.plan.problem
        try:
            units: list[Unit] = []
            job.on_unit = units.append
            await self.engine.run(job)
            result = np.frombuffer(bytes(job.output.view), storage_dtype(problem.dtype))
            return result.reshape(problem.output_shape), units
        finally:
            self.release(job)

    async def leave(self, job: Job) -> None:
        """Run a job, cancel it after its first unit, and release its memory."""
        begun = asyncio.Event()
        job.on_unit = lambda _: begun.set()
        running = asyncio.create_task(self.engine.run(job))
        await begun.wait()
        running.cancel()
        await asyncio.wait({running})
        self.release(job)

    def release(self, job: Job) -> None:
        """Release a job's memory."""
        for segment in (*job.inputs, job.output, *((job.scratch,) if job.scratch else ())):
            segment.release()

    async def compute(self, problem: ConvProblem, inputs: list[Array], **options: Any) -> Array:
        """Plan and run a problem; return its result."""
        result, _ = await self.finish(self.job(plan(problem, workers=self.count, **options), inputs))
        return result

    async def check(self, problem: ConvProblem = TINY, **options: Any) -> None:
        """Run a problem, and compare its result with that of this process."""
        inputs = random_inputs(problem)
        np.testing.assert_array_equal(
            await self.compute(problem, inputs, **options), compute(problem, *inputs, **options)
        )


@contextmanager
def fleet(workers: int, **options: Any) -> Iterator[Fleet]:
    """Start an engine; stop it in any case when the block ends."""
    made = Fleet(workers, **options)

    async def start() -> None:
        await made.engine.start()
        await made.whole()

    try:
        made.run(start(), COMPILING_S)
        yield made
    finally:
        made.run(made.engine.stop())
        made.segments.close()
        made.runner.close()


def random_inputs(problem: ConvProblem, seed: int = 0) -> list[Array]:
    """Return random floats in the storage of the problem's dtype; finite for every dtype."""
    rng = np.random.default_rng(seed)
    if problem.dtype == "f32":
        return [rng.standard_normal(shape).astype(np.float32) for shape in problem.input_shapes]
    return [rng.integers(0x3000, 0x3C00, shape).astype(np.uint16) for shape in problem.input_shapes]


class Frozen:
    """Stopped processes, until they are killed or the block ends."""

    def __init__(self, pids: set[int]) -> None:
        self.pids = set(pids)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

    def __enter__(self) -> Frozen:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue


async def gone(pid: int) -> None:
    """Wait until a process has exited."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, over.set)
    await over.wait()
    loop.remove_reader(pidfd)
    os.close(pidfd)


def kill(pid: int) -> None:
    """Send SIGKILL to a process."""
    os.kill(pid, signal.SIGKILL)


def soon(seconds: float) -> float:
    """Return a deadline this many seconds from now."""
    return time.monotonic() + seconds
