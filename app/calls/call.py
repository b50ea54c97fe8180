"""One admitted call: it owns its segments, runs its units, yields events, and frees everything in the end."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from app.calls.errors import as_convgrad_error
from app.calls.events import Begin, End, Event, Progress, TileReady
from app.calls.planning import tensor_bytes
from app.intake.options import Options
from app.pool.engine import Arrival, Demand, Job, JobTimes
from app.telemetry.context import current_context
from app.telemetry.timings import Timings
from convgrad._errors import Cancelled, DeadlineExceeded, InvalidParams
from kernels import Plan, Unit, box, storage_dtype
from schemas.ops import ResolvedOp
from schemas.tables import find_operation

if TYPE_CHECKING:
    from app.calls.admission import Admission
    from app.intake.sinks import Lease
    from app.pool.buffers import Segment, SegmentPool
    from app.pool.engine import Engine
    from app.telemetry.metrics import Telemetry

__all__ = ["Call", "Checked", "Prepared", "Resources"]

# Below this size hashing takes less time than handing the work to a thread.
_HASH_INLINE = 1 << 20
# A call of thousands of units reports its progress about this many times.
_PROGRESS_STEPS = 100
_CANCELLED = "the caller cancelled the call"


@dataclass(frozen=True, slots=True)
class Checked:
    """A call that has passed every check; its tensors may still be arriving."""

    op: ResolvedOp
    options: Options
    deadline: float
    """When the call has to end, by `time.monotonic()`."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked call with its plan."""

    op: ResolvedOp
    plan: Plan
    options: Options
    deadline: float

    @property
    def output_name(self) -> str:
        """Name of the output, in the dialect of the operation's name."""
        return self.op.wire_name(self.op.output.name)


@dataclass(frozen=True, slots=True)
class Resources:
    """What all calls of a service share: admission, engine, memory, telemetry, and the calls that run or close."""

    admission: Admission
    engine: Engine
    segments: SegmentPool
    telemetry: Telemetry
    running: set[Call] = field(default_factory=set)
    closing: set[asyncio.Future[None]] = field(default_factory=set)


class Call:
    """Run one prepared call; created by `Service.call`, used once, with ``async with``."""

    def __init__(
        self,
        resources: Resources,
        prepared: Prepared,
        tensors: Mapping[str, Segment],
        lease: Lease,
        timings: Timings,
        call_id: str,
    ) -> None:
        self.prepared = prepared
        self.timings = timings
        self.id = call_id
        self.stats: dict[str, Any] = {}
        self.nbytes = tensor_bytes(prepared.op.output)
        """Size of the output in bytes."""
        self._times = JobTimes()
        self._demand = Demand()
        self._resources = resources
        self._inputs = _in_kernel_order(prepared.op, tensors)
        self._lease = lease
        self._cleanup = ExitStack()
        self._units: AsyncGenerator[Unit, None] | None = None
        self._first: asyncio.Task[Unit | None] | None = None
        self._arrival: Arrival | None = None
        self._output: Segment
        self._scratch: Segment | None = None
        self._context = current_context()
        self._entered = 0.0
        self._outcome: str | None = None
        self.cancelled = False
        self._waiting: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> Self:
        """Queue the call and take its segments; raises `Overloaded` when the queue or the memory is full."""
        self._entered = time.monotonic()
        try:
            await self._enter()
        except BaseException as error:
            self._count(error)
            raise
        return self

    async def _enter(self) -> None:
        if time.monotonic() >= self.prepared.deadline:
            raise DeadlineExceeded("the deadline passed before the work began")
        with ExitStack() as undo:
            undo.enter_context(self._resources.admission.call(self._context))
            self._resources.running.add(self)
            undo.callback(self._resources.running.discard, self)
            for segment in self._inputs:
                undo.callback(self._lease.hand_over(segment).release)
            if self._arrival is None:
                await self._take_memory(undo)
            else:
                undo.push(self._cleanup.pop_all())
                self._arrival.advance(self.prepared.op.n)
            self._cleanup = undo.pop_all()

    async def _take_memory(self, undo: ExitStack) -> None:
        self._output = await self._acquire(self.nbytes, undo)
        if scratch_bytes := self.prepared.plan.scratch_bytes:
            self._scratch = await self._acquire(scratch_bytes, undo)

    async def begin(self, images: int) -> None:
        """Start computing from the first `images` of the inputs, while the others are still arriving.

        Enter the call with ``async with`` once all have arrived, or `abandon` it. Until it is entered it takes no place
        in the queue. Raises `Overloaded` and `RateLimited` as entering does.
        """
        self._resources.admission.check(self._context)
        with ExitStack() as undo:
            await self._take_memory(undo)
            self._cleanup = undo.pop_all()
        self._arrival = Arrival(images)
        self._units = self._resources.engine.run(self._job())
        self._first = asyncio.ensure_future(anext(self._units, None))

    def advance(self, images: int) -> None:
        """Set how many images have arrived, after `begin`."""
        assert self._arrival is not None
        self._arrival.advance(images)

    async def abandon(self) -> None:
        """Stop a call that was begun but never entered."""
        if self._units is not None:
            await self._release()

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._count(error)
        if self._units is None:
            self._cleanup.close()
        else:
            await self._release()

    async def _release(self) -> None:
        # Segments are released only when no worker can write to them: a second cancellation must not interrupt this.
        closing = asyncio.ensure_future(self._close())
        self._resources.closing.add(closing)
        closing.add_done_callback(self._resources.closing.discard)
        await asyncio.shield(closing)

    @property
    def output(self) -> memoryview:
        """The output's bytes. A view may outlive the call, in a socket: the memory is not reused while it exists."""
        return self._output.view[: self.nbytes]

    @property
    def array(self) -> npt.NDArray[Any]:
        """The output in storage dtype: f16 and bf16 as the uint16 with the same bits."""
        spec = self.prepared.op.output
        return np.frombuffer(self.output, storage_dtype(spec.dtype)).reshape(spec.shape)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Run the call: `Begin`, then `Progress` and `TileReady` as units finish, then `End`.

        Raises `DeadlineExceeded`, `WorkerLost`, `ShuttingDown` or, after `cancel`, `Cancelled`; closing the
        iterator stops the work.
        """
        plan, op = self.prepared.plan, self.prepared.op
        spec, total = op.output, len(plan.units)
        tiles = sum(unit.offset is not None for unit in plan.units)
        yield Begin(
            op.called_as,
            self.prepared.output_name,
            spec.dtype,
            spec.shape,
            tiles,
            op.reply_attributes(),
            op.warnings,
        )
        yield Progress(0, total)
        output, seq, done, step = self.array, 0, 0, max(1, total // _PROGRESS_STEPS)
        with self._working() as units:
            while (unit := await self._next(units)) is not None:
                done += 1
                if done % step == 0 or done == total:
                    yield Progress(done, total)
                if unit.offset is not None and unit.shape is not None:
                    yield TileReady(seq, unit.offset, unit.shape, box(output, unit))
                    seq += 1
        yield End(tiles, self.stats)

    @contextmanager
    def _working(self) -> Iterator[AsyncGenerator[Unit, None]]:
        """Run the job while the block takes all of its units; `stats` is set afterwards."""
        plan, start = self.prepared.plan, time.perf_counter()
        if self._units is None:
            self._units = self._resources.engine.run(self._job())
        try:
            yield self._units
        except BaseException as error:
            self._outcome = _code(error)
            raise
        self._outcome, self._units = "ok", None  # the engine has released the job
        # The compute time of a streamed call includes waiting for a slow reader. A call that began early waited for
        # its inputs, not for a worker.
        queued = self._times.queue_s or 0.0 if self._arrival is None else 0.0
        computing = max(0.0, time.perf_counter() - start - queued)
        self.timings.add("queue", queued)
        self.timings.add("compute", computing)
        self.stats = {
            "kernel": plan.kernel,
            "gmac": plan.macs / 1e9,
            "compute_ms": round(computing * 1000, 3),
            "tiles": sum(unit.offset is not None for unit in plan.units),
        }

    def cancel(self) -> None:
        """Stop the work at the caller's request: `events` raises `Cancelled` when it next waits for a unit."""
        self.cancelled = True
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    async def finish(self) -> None:
        """Run the call to its end for an API that sends the whole output at once."""
        self._demand.each = False
        with self._working() as units:
            while await self._next(units) is not None:
                pass

    async def sha256(self) -> str:
        """Hash the complete output, in a thread if it is large."""
        if self.nbytes <= _HASH_INLINE:
            return hashlib.sha256(self.output).hexdigest()
        return (await asyncio.to_thread(hashlib.sha256, self.output)).hexdigest()

    async def _next(self, units: AsyncGenerator[Unit, None]) -> Unit | None:
        """Wait for the next unit. `cancel` interrupts only here, never in the middle of sending."""
        if self.cancelled:
            raise Cancelled(_CANCELLED)
        task = self._waiting = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        try:
            if self._first is not None:
                first, self._first = self._first, None
                return await first
            return await anext(units, None)
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
        self._resources.telemetry.call_done(
            self.id, self.prepared.op, self.prepared.plan, self._context, outcome, seconds
        )

    async def _acquire(self, nbytes: int, undo: ExitStack) -> Segment:
        segment = await self._resources.segments.acquire_async(max(1, nbytes), self._context.owner)
        undo.callback(segment.release)
        return segment

    def _job(self) -> Job:
        return Job(
            id=self.id,
            plan=self.prepared.plan,
            inputs=self._inputs,
            output=self._output,
            scratch=self._scratch,
            deadline=self.prepared.deadline,
            owner=self._context.tenant,
            arrival=self._arrival,
            times=self._times,
            demand=self._demand,
        )

    async def _close(self) -> None:
        assert self._units is not None
        units, self._units = self._units, None
        try:
            if self._first is not None:
                self._first.cancel()
                await asyncio.gather(self._first, return_exceptions=True)
            await units.aclose()
        finally:
            self._cleanup.close()


def _code(error: BaseException | None) -> str:
    if error is None or isinstance(error, GeneratorExit | asyncio.CancelledError):
        return Cancelled.code
    return as_convgrad_error(error).code


def _in_kernel_order(op: ResolvedOp, tensors: Mapping[str, Segment]) -> tuple[Segment, ...]:
    spellings = find_operation(op.called_as).operation.input_spellings
    found = {spellings.get(name, name): segment for name, segment in tensors.items()}
    missing = [op.wire_name(spec.name) for spec in op.inputs if spec.name not in found]
    if missing:
        raise InvalidParams(
            f"the data of {missing[0]} is missing",
            errors=[
                {"loc": ["inputs", name], "msg": f"the data of {name} is missing", "type": "missing"}
                for name in missing
            ],
        )
    return tuple(found[spec.name] for spec in op.inputs)
