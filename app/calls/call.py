"""One admitted call: it owns its segments, runs its units, yields events, and frees everything in the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self, cast

import numpy as np

from app.calls.service import Service
from app.calls.work import Begin, End, Event, Output, Progress, Result, Streams, TileReady, Work
from app.intake.lease import Lease
from app.pool.buffers import Memory, Segment
from app.pool.jobs import Job
from app.telemetry.context import as_convgrad_error
from convgrad._errors import Cancelled, DeadlineExceeded
from engine.planning import Computation, Prepared
from engine.prepare import report_of, tolerance_of
from kernels import Unit, box
from verify.tolerance import places_of

__all__ = ["Call", "Tolerance", "Verification"]

# A call of thousands of units reports its progress about this many times.
_PROGRESS_STEPS = 100


@dataclass(eq=False, slots=True)
class _Run:
    """What computes one output: its job, and the task that waits for the engine, unless it is over."""

    output: Output
    computation: Computation
    job: Job
    finished: asyncio.Queue[Unit | None] = field(default_factory=asyncio.Queue)
    """The units that are done; None after the last one, or to look why there are no more."""
    task: asyncio.Task[None] | None = None

    def ended(self, task: asyncio.Task[None]) -> None:
        """Note the end of the task."""
        if not task.cancelled():
            task.exception()  # if nobody waits for it, it is not logged
        self.finished.put_nowait(None)


class Call(Work):
    """Run one prepared call, once, with ``async with``.

    The memory holds the elements of `prepared.op.inputs`, by the caller's names for them, from byte 0, in C order and
    little-endian; the call takes segments from `lease`. One that is `nested` in other work, which has a place in the
    queue, leaves its results in segments, for workers to read.
    """

    streams: Streams = "tiles"

    def __init__(
        self,
        service: Service,
        prepared: Prepared,
        tensors: Mapping[str, Memory],
        lease: Lease,
        *,
        nested: bool = False,
    ) -> None:
        self.prepared = prepared
        self.context = lease.context
        self.deadline = service.deadline(self.context, prepared.options.deadline_ms)
        """When the call has to end, by `time.monotonic()`."""
        self.id = f"call-{next(service.call_numbers)}"
        self.stats: dict[str, Any] = {}
        self._service = service
        names = prepared.names
        self._inputs = {spec.name: tensors[names.get(spec.name, spec.name)] for spec in prepared.op.inputs}
        self._runs: list[_Run] = []
        self.outputs: list[Output] = []
        """The results, in the requested order; none before the call is queued."""
        self._lease, self._nested = lease, nested
        self._cleanup = ExitStack()
        self._entered = 0.0
        self._outcome: str | None = None
        self.cancelled = False

    async def __aenter__(self) -> Self:
        """Queue the call and take its segments.

        Raises `Overloaded` when the queue or the memory is full, `RateLimited` when the key has reached its limit.
        """
        self._entered = time.monotonic()
        try:
            with ExitStack() as undo:
                if self._entered >= self.deadline:
                    raise DeadlineExceeded("the deadline passed before the work began")
                if not self._nested:
                    undo.enter_context(self._service.admission.call(self.context))
                self._service.calls.add(self)
                undo.callback(self._service.calls.discard, self)
                for memory in self._inputs.values():
                    undo.callback(memory.release)
                    if isinstance(memory, Segment):
                        self._lease.hand_over(memory)
                for computation in self.prepared.computations:
                    self._runs.append(run := await self._run_of(computation, undo))
                    self.outputs.append(run.output)
                self._cleanup = undo.pop_all()
        except BaseException as error:
            self._count(error)
            raise
        return self

    async def _run_of(self, computation: Computation, undo: ExitStack) -> _Run:
        """Allocate the memory of an output and its scratch."""
        plan, spec = computation.plan, computation.output
        job = Job(
            id=self.id,
            plan=plan,
            inputs=tuple([cast("Segment", self._inputs[name]) for name in computation.inputs]),
            output=await self._acquire(computation.nbytes, undo),
            scratch=await self._acquire(plan.scratch_bytes, undo) if plan.scratch_bytes else None,
            deadline=self.deadline,
            owner=self.context.tenant,
            connection=self.context.connection,
            short=computation.short,
        )
        name = self.prepared.op.wire_name(spec.name)
        return _Run(Output(name, spec, job.output, tiles=computation.tiles), computation, job)

    async def _acquire(self, nbytes: int, undo: ExitStack) -> Segment:
        if self.prepared.tiny and not self._nested:
            return cast("Segment", Memory(np.empty(nbytes, np.uint8)))  # no worker reads it
        segment = await self._service.segments.acquire_async(max(1, nbytes), self.context.owner)
        undo.callback(segment.release)
        return segment

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._count(error)
        tasks = [run.task for run in self._runs if run.task is not None and not run.task.done()]
        for task in tasks:
            task.cancel()
        if not tasks:
            self._cleanup.close()
            return
        # Segments are released only when no worker can write to them: a second cancellation must not interrupt this.
        closing = asyncio.gather(*tasks, return_exceptions=True)
        closing.add_done_callback(lambda _: self._cleanup.close())
        self._service.closing.add(closing)
        closing.add_done_callback(self._service.closing.discard)
        await asyncio.shield(closing)

    async def events(self, *, each: bool = True) -> AsyncGenerator[Event, None]:
        """Run the call: for each output `Begin`, then `Progress` and `TileReady` as units finish, then `End`.

        All outputs are computed at the same time; the events of the second follow those of the first. Without `each`
        there are only `Begin` and `End`.

        Raises `DeadlineExceeded`, `WorkerLost`, `ShuttingDown` or, after `cancel`, `Cancelled`; closing the
        iterator leaves the work to the end of the block.
        """
        start, total, done = time.perf_counter(), self.prepared.units, 0
        step = max(1, total // _PROGRESS_STEPS)
        try:
            await self._start(each)
            for run in self._runs:
                yield Begin(run.output)
                if each and not done:
                    yield Progress(0, total)
                seq = 0
                while (unit := await self._next(run)) is not None:
                    done += 1
                    if done % step == 0 or done == total:
                        yield Progress(done, total)
                    if unit.offset is not None and unit.shape is not None:
                        yield TileReady(run.output, seq, unit.offset, unit.shape, box(run.output.array, unit))
                        seq += 1
                last = run is self._runs[-1]
                if last:
                    self._ended(start)
                yield End(run.output, self.stats if last else run.computation.stats(), last)
        except BaseException as error:
            self._outcome = self._outcome or _code(error)
            raise

    async def _start(self, each: bool) -> None:
        """Run the jobs; tiny ones end at once."""
        for run in self._runs:
            run.job.on_unit = run.finished.put_nowait if each else None
            if self.prepared.tiny:
                await self._service.engine.run_here(run.job)
                run.finished.put_nowait(None)
            else:
                run.task = asyncio.create_task(self._service.engine.run(run.job))
                run.task.add_done_callback(run.ended)

    async def _next(self, run: _Run) -> Unit | None:
        """Wait for the next unit; None at the end. `cancel` interrupts only here, never in the middle of sending."""
        unit = None if self.cancelled else await run.finished.get()
        if self.cancelled:
            raise Cancelled("the caller cancelled the call")
        if unit is None and run.task is not None:
            task, run.task = run.task, None
            try:
                await task
            finally:
                del task  # its error refers to this frame
        return unit

    def _ended(self, start: float) -> None:
        """Set `stats` when all outputs are complete."""
        self._outcome = "ok"
        # The compute time of a streamed call includes waiting for a slow reader.
        queued = min(run.job.queue_s or 0.0 for run in self._runs)
        computing = max(0.0, time.perf_counter() - start - queued)
        self.context.timings.add("queue", queued)
        self.context.timings.add("compute", computing)
        self.stats = self.prepared.stats(computing)

    def result(self) -> Result:
        """Return the reply of a finished call."""
        op = self.prepared.op
        document = {"op": op.called_as, "outputs": {}, "resolved": self.prepared.resolved, "stats": self.stats}
        return Result(document | op.reply_warnings, self.outputs, self.prepared.options.encoding)

    def cancel(self) -> None:
        """Stop the work at the caller's request: `events` raises `Cancelled` when it next waits for a unit."""
        self.cancelled = True
        for run in self._runs:
            run.finished.put_nowait(None)

    def _count(self, error: BaseException | None) -> None:
        """Count the call by its outcome; one that was not run to its end counts as cancelled."""
        outcome = self._outcome
        if outcome is None or (outcome == "ok" and error is not None):
            outcome = _code(error)
        seconds = time.monotonic() - self._entered
        self._service.telemetry.call_done(
            self.id, self.prepared.op, self.prepared.plans, self.context, outcome, seconds
        )


class Verification(Call):
    """A call whose output is a report."""

    streams = "progress"

    def result(self) -> Result:
        """Return the report of a finished verification."""
        (run,) = self._runs
        return Result(report_of(self.prepared, run.job.output.view, self.stats))


class Tolerance(Verification):
    """A call whose output is a report, the reference and the tolerance of each element."""

    def result(self) -> Result:
        """Return the report with both tensors."""
        (run,) = self._runs
        view, spec = run.job.output.view, self.prepared.op.output
        places = zip(("reference", "tolerance"), places_of(spec.shape, spec.dtype), strict=True)
        outputs = [Output(name, spec, Memory(view[place])) for name, place in places]
        return Result(tolerance_of(self.prepared, view, self.stats), outputs, self.prepared.options.encoding)


def _code(error: BaseException | None) -> str:
    if error is None or isinstance(error, GeneratorExit | asyncio.CancelledError):
        return Cancelled.code
    return as_convgrad_error(error).code
