"""Run a graph: every node is checked and planned first, then one call follows the other.

Results stay in shared memory: the next node reads the segment that the one before has written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack, aclosing
from math import prod
from typing import Self, cast

import numpy as np

from app.calls.call import Call
from app.calls.service import Service
from app.calls.work import Event, Output, Progress, Result, Work
from app.intake.lease import Lease
from app.pool.buffers import Memory, Segment
from app.threads import in_thread_if
from convgrad._dtypes import dtype
from engine.graphs import PreparedGraph, result_bytes, strided
from kernels import storage_dtype
from schemas.graphs import LogicalTensor
from schemas.tensors import TensorSpec

__all__ = ["GraphRun"]

# Copying this many bytes, or describing this many outputs, takes well under a millisecond.
_INLINE, _AT_ONCE = 256 << 10, 64


class GraphRun(Work):
    """The calls of a graph's nodes, one after the other; the `lease` owns all memory.

    `tensors` are the segments of the graph's inputs by id.
    """

    streams = "progress"

    def __init__(self, service: Service, prepared: PreparedGraph, tensors: Mapping[str, Memory], lease: Lease) -> None:
        self.context = lease.context
        self._service = service
        self._prepared = prepared
        self._values = cast("dict[int, Segment]", {int(name): memory for name, memory in tensors.items()})
        self._lease = lease
        self._admitted = ExitStack()
        self._running: Call | None = None
        self._cancelled = False
        self._result: Result | None = None

    async def __aenter__(self) -> Self:
        """Queue the graph, as one call; raises what entering a `Call` raises."""
        self._admitted.enter_context(self._service.admission.call(self.context))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave the queue; the lease owns the memory."""
        self._admitted.close()

    def result(self) -> Result:
        """Return the requested tensors, and the statistics of all nodes."""
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """Stop the call that runs, and those that follow."""
        self._cancelled = True
        if self._running is not None:
            self._running.cancel()

    async def events(self, *, each: bool = True) -> AsyncGenerator[Event, None]:
        """Compute all nodes; yield `Progress` only. Raises what running a call raises."""
        prepared, values, lease = self._prepared, self._values, self._lease
        total = prepared.units
        for number in prepared.in_memory:
            values[number] = await _dense(prepared.graph.tensors[number], values[number], lease)
        started, described, done = time.perf_counter(), [], 0
        for node, planned, reads, unused in prepared.steps():
            inputs = {name: lease.share(values[number]) for name, number in reads.items()}
            async with (
                Call(self._service, planned, inputs, lease, nested=True) as call,
                aclosing(call.events(each=each)) as events,
            ):
                self._running = call
                if self._cancelled:
                    call.cancel()
                async for event in events:
                    if isinstance(event, Progress):
                        yield Progress(done + event.done, total)
                self._running = None
                (output,) = call.outputs
                values[node.output] = lease.share(cast("Segment", output.memory))
                described.append(
                    {"id": node.id, "name": node.name, "op": planned.op.called_as, "stats": call.stats}
                    | {"resolved": planned.resolved}
                )
            done += planned.units
            await asyncio.sleep(0)  # tiny nodes are computed without a wait
            for number in unused & values.keys():
                lease.release(values.pop(number))
        outputs = []
        for count, number in enumerate(prepared.wanted, 1):
            outputs.append(await _output(prepared, number, values[number], lease))
            if count % _AT_ONCE == 0:
                await asyncio.sleep(0)
        milliseconds = round((time.perf_counter() - started) * 1000, 3)
        stats = {"gmac": prepared.graph.macs / 1e9, "compute_ms": milliseconds}
        self._result = Result({"nodes": described, "stats": stats}, outputs, prepared.options.encoding)


async def _output(prepared: PreparedGraph, number: int, segment: Segment, lease: Lease) -> Output:
    """Return a result, in the memory layout of its logical tensor if that was requested."""
    tensor = prepared.graph.tensors[number]
    assert tensor.shape is not None
    if prepared.layout == "logical" or tensor.strides is None:
        return Output(str(number), TensorSpec(str(number), tensor.dtype, tensor.shape), segment)
    laid_out = await lease.acquire(tensor.span * dtype(tensor.dtype).itemsize)
    await _copy(tensor, segment, laid_out, scatter=True)
    return Output(str(number), TensorSpec(str(number), tensor.dtype, (tensor.span,)), laid_out, tensor.strides)


async def _dense(tensor: LogicalTensor, segment: Segment, lease: Lease) -> Segment:
    """Return the elements of a tensor's memory in C order; the given segment is released."""
    packed = await lease.acquire(result_bytes(tensor))
    await _copy(tensor, packed, segment, scatter=False)
    lease.release(segment)
    return packed


async def _copy(tensor: LogicalTensor, packed: Segment, memory: Segment, *, scatter: bool) -> None:
    """Copy between C order (`packed`) and the tensor's own strides (`memory`), in a thread if it is large."""
    assert tensor.shape is not None
    kind = storage_dtype(tensor.dtype)
    dense = np.frombuffer(packed.view, kind, prod(tensor.shape)).reshape(tensor.shape)
    flat = np.frombuffer(memory.view, kind, tensor.span)
    if scatter:
        flat[:] = 0  # also between the elements
    target, source = (strided(tensor, flat), dense) if scatter else (dense, strided(tensor, flat))
    await in_thread_if(dense.nbytes > _INLINE, np.copyto, target, source)
