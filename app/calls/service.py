"""The use cases, the same for every API: validate, prepare, call.

An API's walk through one call::

    with service.admit(), Lease(service.segments) as holding:     # refuses here, before the body is read
        ...                                                         # intake writes tensors to the lease
        prepared = await service.prepare(name, attributes, inputs, options)    # every check, no bytes needed
        async with service.call(prepared, tensors, holding, timings=timings) as call:
            async for event in call.events():       # Begin, Progress, TileReady, .., End (app.calls.events)
                ...

Leaving ``async with`` by any way stops the work and frees the segments of inputs, scratch and output.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from app.calls.admission import Admission
from app.calls.call import Call, Checked, Prepared, Resources
from app.calls.cancel import Cancellations
from app.calls.planning import check_limits, describe_plan, is_planned_at_once, plan_call
from app.intake.options import parse_options
from app.settings import Settings
from app.telemetry.context import current_context
from app.telemetry.metrics import Telemetry
from app.telemetry.timings import Timings
from convgrad._errors import DeadlineExceeded, Overloaded, ShuttingDown
from schemas.ops import TensorMeta, resolve

if TYPE_CHECKING:
    from app.intake.sinks import Lease
    from app.pool.buffers import Segment, SegmentPool
    from app.pool.engine import Engine
    from app.pool.messages import Unfit
    from kernels import Plan

__all__ = ["Checked", "Prepared", "Service"]

_log = logging.getLogger("convgrad")


class Service:
    """Compute gradients for the APIs: one object for the life of the process."""

    def __init__(
        self, settings: Settings, engine: Engine, segments: SegmentPool, telemetry: Telemetry | None = None
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.segments = segments
        self.admission = Admission(settings)
        self.connections: Callable[[], int] = lambda: 0
        """Tell how many connections are open; the server knows."""
        self.cancellations = Cancellations()
        self.unfit: tuple[str, ...] = ()
        """Targets whose code does not work on this processor, each with the reason."""
        self.on_unfit: Callable[[Unfit], None] = lambda _: None
        """Start again with a narrower target; the process knows how."""
        self.on_failed: Callable[[str], None] = lambda _: None
        """End, for no worker can be had; the process knows how."""
        self.draining = False
        self._ids = itertools.count(1)
        self.addresses: list[str] = []
        self._began = time.monotonic()
        self._announced = False
        # Plans that take long are made one after another, so that they take their turns with one thread at the most.
        self._planner = ThreadPoolExecutor(1, "convgrad-plan")
        self._requests = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.telemetry = telemetry or Telemetry()
        self._resources = Resources(self.admission, engine, segments, self.telemetry)

    @property
    def calls(self) -> Set[Call]:
        """The calls that wait or compute."""
        return self._resources.running

    @property
    def requests(self) -> int:
        """Admitted requests that are not answered yet."""
        return self._requests

    @property
    def status(self) -> str:
        """One of `starting`, `ready`, `failed`, `draining`; `ready` only while there is a worker that has answered."""
        if self.draining:
            return "draining"
        if self.engine.workers[0]:
            return "ready"
        return "starting" if self.engine.failure is None else "failed"

    async def start(self) -> None:
        """Begin to warm up, in the background; the log says when calls are taken."""
        self._began = time.monotonic()
        self.engine.on_change = self._look
        await self.engine.start()

    def _look(self) -> None:
        """Tell of the engine what the process or a reader of the log has to know."""
        engine = self.engine
        if engine.unfit is not None:
            self.on_unfit(engine.unfit)
        elif engine.given_up:
            self.on_failed(engine.failure or "")
        elif not self._announced and engine.workers[0]:
            ready, wanted = engine.workers
            if ready == wanted or engine.failure is not None:
                self._announced = True
                where = "".join(f", at {address}" for address in self.addresses)
                count = f"{ready} workers" if ready == wanted else f"{ready} of {wanted} workers"
                _log.info("ready after %.1f s with %s%s", time.monotonic() - self._began, count, where)

    async def drained(self, seconds: float) -> None:
        """Take no new requests and wait until the admitted ones are done, at most so long."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.idle()

    async def idle(self) -> None:
        """Wait until no admitted request is left."""
        await self._idle.wait()

    async def stop(self) -> None:
        """Stop at once whatever still runs and leave no process and no memory behind."""
        self.draining = True
        await self.engine.stop(0.0)
        self._planner.shutdown(wait=False, cancel_futures=True)
        self.segments.close()

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Let the current request in, before its body is read; a drain waits for the end of the ``with`` block.

        Raises `ShuttingDown` while draining, `Overloaded` while the kernels compile or the queue is full, and
        `RateLimited` when the key has as many calls as it may.
        """
        if self.draining:
            raise ShuttingDown("the service is shutting down", retry_after=5)
        if not self.engine.ready and self.engine.failure is not None:
            raise Overloaded("the service has no workers; /readyz says why", retry_after=5, data={"reason": "failed"})
        if not self.engine.ready:
            raise Overloaded(
                "the service is starting: its kernels are being compiled",
                retry_after=2,
                data={"reason": "starting"},
            )
        with self.admission.request(current_context()):
            self._requests += 1
            self._idle.clear()
            try:
                yield
            finally:
                self._requests -= 1
                if not self._requests:
                    self._idle.set()

    async def validate(
        self,
        name: str,
        attributes: Mapping[str, Any],
        inputs: Mapping[str, TensorMeta | list[int]],
        options: object = None,
    ) -> dict[str, Any]:
        """Check a call without its tensors and say what it would be: attributes, outputs, plan and cost.

        It takes a place among the calls. Raises what `prepare` raises, and what entering a `Call` does.
        """
        context = current_context()
        checked = self.check(name, attributes, inputs, options, started=context.started)
        with self.admission.call(context):
            prepared = await self.plan(checked)
        op = prepared.op
        output = {"dtype": op.output.dtype, "shape": list(op.output.shape)}
        reply: dict[str, Any] = {
            "op": op.called_as,
            "outputs": {op.wire_name(op.output.name): output},
            "resolved": op.reply_attributes(),
            "plan": describe_plan(prepared.plan),
        }
        return reply | ({"warnings": list(op.warnings)} if op.warnings else {})

    def check(
        self,
        name: str,
        attributes: Mapping[str, Any],
        inputs: Mapping[str, TensorMeta | list[int]],
        options: object = None,
        *,
        started: float | None = None,
    ) -> Checked:
        """Check all that can be known without the tensors' bytes: names, rules, shapes, options, limits.

        `started` is the `time.monotonic()` from which the deadline counts; now, when absent.

        Raises `UnknownOperation`, `InvalidParams`, `Unsupported` or `TooLarge`.
        """
        chosen = parse_options(options)
        op = resolve(name, attributes, inputs)
        check_limits(op, self.settings)
        allowed = self.settings.deadline_s
        if chosen.deadline_ms is not None:
            allowed = min(allowed, chosen.deadline_ms / 1000)
        return Checked(op, chosen, (time.monotonic() if started is None else started) + allowed)

    async def plan(self, checked: Checked) -> Prepared:
        """Plan a checked call; raises `TooLarge` when its scratch is, and `DeadlineExceeded`."""
        op, reference = checked.op, checked.options.reference
        if is_planned_at_once(op, reference):
            chosen = plan_call(op, self.settings, reference)
        else:
            chosen = await self._plan_apart(checked)
        return Prepared(checked.op, chosen, checked.options, checked.deadline)

    async def _plan_apart(self, checked: Checked) -> Plan:
        """Plan in the planner's thread, after those that came before, so that the loop goes on meanwhile."""
        arguments = checked.op, self.settings, checked.options.reference
        planning = asyncio.get_running_loop().run_in_executor(self._planner, plan_call, *arguments)
        try:
            async with asyncio.timeout(checked.deadline - time.monotonic()):
                return await planning
        except TimeoutError:
            raise DeadlineExceeded("the deadline was over before the call was planned") from None

    async def prepare(
        self,
        name: str,
        attributes: Mapping[str, Any],
        inputs: Mapping[str, TensorMeta | list[int]],
        options: object = None,
        *,
        started: float | None = None,
    ) -> Prepared:
        """Check a call and plan it; raises what `check` and `plan` raise."""
        return await self.plan(self.check(name, attributes, inputs, options, started=started))

    def call(
        self,
        prepared: Prepared,
        tensors: Mapping[str, Segment],
        lease: Lease,
        *,
        timings: Timings | None = None,
    ) -> Call:
        """Pair a prepared call with its tensors, under either spelling of their names; the call takes them.

        The segments hold the elements from byte 0: C order, little-endian, as `prepared.op.inputs` says.
        Use the result with ``async with``; entering it queues the call and raises `Overloaded`
        when the queue or the memory is full, `RateLimited` when the key has as many calls as it may.
        """
        return Call(self._resources, prepared, tensors, lease, timings or Timings(), f"call-{next(self._ids)}")

    def snapshot(self) -> dict[str, Any]:
        """Give the numbers of the moment: calls, engine, segments."""
        return {"calls": len(self.calls), "draining": self.draining, "engine": self.engine.snapshot()}
