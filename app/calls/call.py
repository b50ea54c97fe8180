"""One admitted call: it owns its segments, runs its units, yields events, and frees everything in the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np

from app.calls.outputs import CallOutput
from app.calls.service import Service
from app.calls.work import Begin, End, Event, Progress, Result, Streams, TileReady, Work
from app.pool.buffers import Memory, Segment
from app.pool.engine import Job
from app.telemetry.context import as_convgrad_error
from convgrad._errors import Cancelled, DeadlineExceeded, InvalidParams
from engine.planning import Prepared
from kernels import Unit, box
from schemas.ops import ResolvedOp
from schemas.tables import find_operation

if TYPE_CHECKING:
    from app.intake.lease import Lease

__all__ = ["Call"]

# A call of thousands of units reports its progress about this many times.
_PROGRESS_STEPS = 100
_CANCELLED = "the caller cancelled the call"


class Call(Work):
    """Run one prepared call, once, with ``async with``.

    The memory holds the elements of `prepared.op.inputs`, named in either spelling, from byte 0, in C order and
    little-endian; the call takes segments from `lease`.
    """

    streams: ClassVar[Streams] = "tiles"
    on_heap: ClassVar[bool] = True
    """Whether the results of a tiny call need not be in segments."""

    def __init__(
        self,
        service: Service,
        prepared: Prepared,
        tensors: Mapping[str, Memory],
        lease: Lease,
    ) -> None:
        self.prepared = prepared
        self.context = lease.context
        self.deadline = service.deadline(self.context, prepared.options.deadline_ms)
        """When the call has to end, by `time.monotonic()`."""
        self.id = f"call-{next(service.call_numbers)}"
        self.stats: dict[str, Any] = {}
        self.outputs = tuple(
            [CallOutput(prepared.op.wire_name(each.output.name), each) for each in prepared.computations]
        )
        """The results, in the requested order."""
        self._service = service
        self._inputs = _memory_of(prepared.op, tensors)
        self._lease = lease
        self._cleanup = ExitStack()
        self._entered = 0.0
        self._outcome: str | None = None
        self.cancelled = False
        self._waiting: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> Self:
        """Queue the call and take its segments.

        Raises `Overloaded` when the queue or the memory is full, `RateLimited` when the key has reached its limit.
        """
        self._entered = time.monotonic()
        try:
            await self._enter()
        except BaseException as error:
            self._count(error)
            raise
        return self

    async def _enter(self) -> None:
        if time.monotonic() >= self.deadline:
            raise DeadlineExceeded("the deadline passed before the work began")
        with ExitStack() as undo:
            undo.enter_context(self._admitted())
            self._service.calls.add(self)
            undo.callback(self._service.calls.discard, self)
            for memory in self._inputs.values():
                undo.callback(memory.release)
                if isinstance(memory, Segment):
                    self._lease.hand_over(memory)
            await self._take_memory(undo)
            self._cleanup = undo.pop_all()

    def _admitted(self) -> AbstractContextManager[None]:
        """Take a place in the queue while the block runs."""
        return self._service.admission.call(self.context)

    async def _take_memory(self, undo: ExitStack) -> None:
        """Allocate the memory of each output's job."""
        for output in self.outputs:
            plan = output.computation.plan
            output.job = Job(
                id=self.id,
                plan=plan,
                inputs=tuple([cast("Segment", self._inputs[name]) for name in output.computation.inputs]),
                output=await self._acquire(output.nbytes, undo),
                scratch=await self._acquire(plan.scratch_bytes, undo) if plan.scratch_bytes else None,
                deadline=self.deadline,
                owner=self.context.tenant,
                connection=self.context.connection,
                short=output.computation.short,
            )

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._count(error)
        if self._running:
            await self._release()
        else:
            self._cleanup.close()

    @property
    def _running(self) -> bool:
        return any(output.units is not None for output in self.outputs)

    async def _release(self) -> None:
        # Segments are released only when no worker can write to them: a second cancellation must not interrupt this.
        closing = asyncio.ensure_future(self._close())
        self._service.closing.add(closing)
        closing.add_done_callback(self._service.closing.discard)
        await asyncio.shield(closing)

    async def events(self, *, each: bool = True) -> AsyncGenerator[Event, None]:
        """Run the call: for each output `Begin`, then `Progress` and `TileReady` as units finish, then `End`.

        All outputs are computed at the same time; the events of the second follow those of the first. Without `each`
        there are only `Begin` and `End`.

        Raises `DeadlineExceeded`, `WorkerLost`, `ShuttingDown` or, after `cancel`, `Cancelled`; closing the
        iterator stops the work.
        """
        total = self.prepared.units
        for output in self.outputs:
            output.job.state.each = each
        done, step, start = 0, max(1, total // _PROGRESS_STEPS), self._start()
        for output in self.outputs:
            yield Begin(output)
            if each and not done:
                yield Progress(0, total)
            seq = 0
            try:
                while (unit := await self._next(output)) is not None:
                    done += 1
                    if not each:
                        continue
                    if done % step == 0 or done == total:
                        yield Progress(done, total)
                    if unit.offset is not None and unit.shape is not None:
                        yield TileReady(output, seq, unit.offset, unit.shape, box(output.array, unit))
                        seq += 1
            except BaseException as error:
                self._outcome = _code(error)
                raise
            output.units = None  # the engine has released the job
            last = output is self.outputs[-1]
            if last:
                self._ended(start)
            yield End(output, self.stats if last else output.computation.stats(), last)

    def _start(self) -> float:
        """Run the jobs that do not run yet; return the time."""
        service = self._service
        compute = service.here.run if self.prepared.tiny else service.engine.run
        for output in self.outputs:
            units = compute(output.job)
            if len(self.outputs) > 1:
                output.start(units)
            else:
                output.units = units
        return time.perf_counter()

    def _ended(self, start: float) -> None:
        """Set `stats` when all outputs are complete."""
        self._outcome = "ok"
        # The compute time of a streamed call includes waiting for a slow reader.
        queued = min(output.job.state.queue_s or 0.0 for output in self.outputs)
        computing = max(0.0, time.perf_counter() - start - queued)
        self.context.timings.add("queue", queued)
        self.context.timings.add("compute", computing)
        self.stats = self.prepared.stats(computing)

    @property
    def output_bytes(self) -> int:
        """Size of the output tensors."""
        return sum(output.nbytes for output in self.outputs)

    def result(self) -> Result:
        """Return the reply of a finished call."""
        op = self.prepared.op
        document = {"op": op.called_as, "outputs": {}, "resolved": self.prepared.resolved, "stats": self.stats}
        return Result(document | op.reply_warnings, self.outputs, self.prepared.options.encoding)

    def cancel(self) -> None:
        """Stop the work at the caller's request: `events` raises `Cancelled` when it next waits for a unit."""
        self.cancelled = True
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    async def _next(self, output: CallOutput) -> Unit | None:
        """Wait for the next unit. `cancel` interrupts only here, never in the middle of sending."""
        if self.cancelled:
            raise Cancelled(_CANCELLED)
        task = self._waiting = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        try:
            if output.first is not None:
                first, output.first = output.first, None
                return await first
            assert output.units is not None
            return await anext(output.units, None)
        except asyncio.CancelledError:
            if self.cancelled and task.uncancel() <= before:
                raise Cancelled(_CANCELLED) from None
            raise
        finally:
            self._waiting = None
            # An error that ends the task would refer to this frame and the frame to the task: a reference cycle.
            del task

    def _count(self, error: BaseException | None) -> None:
        """Count the call by its outcome; one that was not run to its end counts as cancelled."""
        if error is None:
            outcome = self._outcome or _code(None)
        else:
            outcome = self._outcome if self._outcome not in (None, "ok") else _code(error)
        seconds = time.monotonic() - self._entered
        self._service.telemetry.call_done(
            self.id, self.prepared.op, self.prepared.plans, self.context, outcome, seconds
        )

    async def _acquire(self, nbytes: int, undo: ExitStack) -> Segment:
        if self.prepared.tiny and self.on_heap:
            return cast("Segment", Memory(np.empty(nbytes, np.uint8)))  # no worker reads it
        segment = await self._service.segments.acquire_async(max(1, nbytes), self.context.owner)
        undo.callback(segment.release)
        return segment

    async def _close(self) -> None:
        try:
            for output in self.outputs:
                await output.close()
        finally:
            self._cleanup.close()


def _code(error: BaseException | None) -> str:
    if error is None or isinstance(error, GeneratorExit | asyncio.CancelledError):
        return Cancelled.code
    return as_convgrad_error(error).code


def _memory_of(op: ResolvedOp, tensors: Mapping[str, Memory]) -> dict[str, Memory]:
    """Return the memory of the inputs that are read, by canonical name; raises `InvalidParams` if one is missing."""
    operation = find_operation(op.called_as).operation
    spellings = {**operation.output_spellings, **operation.input_spellings}  # a result to verify is an input too
    segments = {spellings.get(name, name): segment for name, segment in tensors.items()}
    missing = [op.wire_name(spec.name) for spec in op.inputs if spec.name not in segments]
    if missing:
        raise InvalidParams(
            f"the data of {missing[0]} is missing",
            errors=[
                {"loc": ["inputs", name], "msg": f"the data of {name} is missing", "type": "missing"}
                for name in missing
            ],
        )
    return {spec.name: segments[spec.name] for spec in op.inputs}
