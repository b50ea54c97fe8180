"""One admitted call: it owns its segments, runs its units, says what is final, and frees everything on every way out."""

from __future__ import annotations

import asyncio
import hashlib
import time
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from app.engines.base import Job
from app.events import Begin, End, Event, Progress, TileReady
from app.options import Options
from app.planning import tensor_bytes
from app.timings import Timings
from convgrad._errors import DeadlineExceeded, InvalidParams
from kernels import Plan, Unit, box, storage_dtype
from schemas.ops import ResolvedOp
from schemas.tables import find_operation

if TYPE_CHECKING:
    from app.intake.landing import Holding
    from app.pool.buffers import Segment, SegmentPool
    from app.service import Service

__all__ = ["Call", "Prepared"]

# Below this a hash takes less time than the hop to a thread.
_HASH_INLINE = 1 << 20
# A call of thousands of units tells its progress about this many times.
_PROGRESS_STEPS = 100


@dataclass(frozen=True, slots=True)
class Prepared:
    """Hold a call that has passed every check: what to compute and how; the tensors may still be on their way."""

    op: ResolvedOp
    plan: Plan
    options: Options
    deadline: float
    """`time.monotonic()` at which the call is over."""
    warnings: tuple[str, ...]

    @property
    def output_name(self) -> str:
        """Name of the output in the dialect of the name called."""
        return self.op.wire_name(self.op.output.name)


class _Output:
    """Keep the output's segment out of the pool until the last view that was handed to a socket is gone.

    A transport may hold the bytes of a cut connection longer than the call lives, and nobody says when it lets go. So
    each view hangs on an array of its own: every view derived from it keeps that array alive, and its end is the sign.
    """

    def __init__(self, pool: SegmentPool, nbytes: int) -> None:
        self._pool = pool
        self.segment = pool.acquire(max(1, nbytes))
        self.view = self.segment.view[:nbytes]
        self._lent: set[weakref.ref[npt.NDArray[np.uint8]]] = set()
        self._closed = False

    def lend(self, start: int, stop: int) -> memoryview:
        """View some bytes for a reader that may outlive the call."""
        array = np.frombuffer(self.view[start:stop], np.uint8)
        self._lent.add(weakref.ref(array, self._returned))
        return memoryview(array)

    def close(self) -> None:
        """Give the segment back, now or when the last view ends."""
        self._closed = True
        self._release_when_free()

    def _returned(self, reference: weakref.ref[npt.NDArray[np.uint8]]) -> None:
        self._lent.discard(reference)
        self._release_when_free()

    def _release_when_free(self) -> None:
        if self._closed and not self._lent:
            self._closed = False
            self._pool.release(self.segment)


class Call:
    """Run one prepared call; made by `Service.call`, used once, with ``async with``."""

    def __init__(
        self,
        service: Service,
        prepared: Prepared,
        tensors: Mapping[str, Segment],
        holding: Holding,
        timings: Timings,
        call_id: str,
    ) -> None:
        self.prepared = prepared
        self.timings = timings
        self.id = call_id
        self.stats: dict[str, Any] = {}
        self._service = service
        self._inputs = _in_kernel_order(prepared.op, tensors)
        self._holding = holding
        self._cleanup = ExitStack()
        self._units: AsyncIterator[Unit] | None = None
        self._output: _Output

    async def __aenter__(self) -> Self:
        """Admit the call and take its segments; raises what `Service.admit` raises, and `Overloaded` for memory."""
        self._service.admit()
        if time.monotonic() >= self.prepared.deadline:
            raise DeadlineExceeded("the deadline was over before the work began")
        pool = self._service.segments
        with ExitStack() as undo:
            self._service.calls.add(self)
            undo.callback(self._service.calls.discard, self)
            self._output = _Output(pool, tensor_bytes(self.prepared.op.output))
            undo.callback(self._output.close)
            scratch_bytes = self.prepared.plan.scratch_bytes
            self._scratch = pool.acquire(scratch_bytes) if scratch_bytes else None
            if self._scratch is not None:
                undo.callback(pool.release, self._scratch)
            for segment in self._inputs:
                undo.callback(pool.release, self._holding.hand_over(segment))
            self._cleanup = undo.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        # The segments go back only after no worker can write to them: a second cancellation must not cut that short.
        closing = asyncio.ensure_future(self._close())
        self._service.closing.add(closing)
        closing.add_done_callback(self._service.closing.discard)
        await asyncio.shield(closing)

    @property
    def array(self) -> npt.NDArray[Any]:
        """The output in storage dtype (f16 and bf16 as the uint16 of their bits), valid while the call is open."""
        spec = self.prepared.op.output
        return np.frombuffer(self._output.view, storage_dtype(spec.dtype)).reshape(spec.shape)

    @property
    def nbytes(self) -> int:
        """Size of the output."""
        return len(self._output.view)

    def lend(self, start: int, stop: int) -> memoryview:
        """View bytes `start` to `stop` of the output for a socket; the segment stays until the view is dropped."""
        return self._output.lend(start, stop)

    async def events(self) -> AsyncIterator[Event]:
        """Run the call: `Begin`, then `Progress` and `TileReady` as units finish, then `End`.

        Raises `DeadlineExceeded`, `WorkerLost` or `ShuttingDown`; closing the iterator stops the work.
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
            self.prepared.warnings,
        )
        yield Progress(0, total)
        output, seq, done, step = self.array, 0, 0, max(1, total // _PROGRESS_STEPS)
        start = time.perf_counter()
        self._units = self._service.engine.run(self._job())
        async with aclosing(self._units) as units:  # type: ignore[type-var]
            async for unit in units:
                done += 1
                if done % step == 0 or done == total:
                    yield Progress(done, total)
                if unit.offset is not None and unit.shape is not None:
                    yield TileReady(seq, unit.offset, unit.shape, box(output, unit))
                    seq += 1
        seconds = time.perf_counter() - start
        self.timings.add("compute", seconds)
        self.stats = {
            "kernel": plan.kernel,
            "gmac": plan.macs / 1e9,
            "compute_ms": round(seconds * 1000, 3),
            "tiles": tiles,
        }
        yield End(tiles, self.stats)

    async def finish(self) -> None:
        """Run the call to its end for a door that sends the whole output at once."""
        async with aclosing(self.events()) as events:  # type: ignore[type-var]
            async for _ in events:
                pass

    async def sha256(self) -> str:
        """Hash the complete output, in a thread when it is large."""
        if self.nbytes <= _HASH_INLINE:
            return hashlib.sha256(self._output.view).hexdigest()
        # Lent: a cancelled caller leaves while the thread still reads.
        return (await asyncio.to_thread(hashlib.sha256, self.lend(0, self.nbytes))).hexdigest()

    def _job(self) -> Job:
        return Job(
            id=self.id,
            plan=self.prepared.plan,
            inputs=self._inputs,
            output=self._output.segment,
            scratch=self._scratch,
            deadline=self.prepared.deadline,
        )

    async def _close(self) -> None:
        try:
            if self._units is not None:
                await self._units.aclose()  # type: ignore[attr-defined]
        finally:
            self._cleanup.close()


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
