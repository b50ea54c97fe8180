"""What all calls share, on every API: admission, memory, checks, planning.

Requests use them through `app.calls.tasks`, and APIs through `app.api.answer`. A call on tensors in memory::

    with service.admit(context), service.lease(context) as lease:   # may refuse
        ...                                                         # tensors are written to segments of the lease
        prepared = await service.prepare(request, context)           # every check, no bytes needed
        async with Call(service, prepared, tensors, lease) as call:     # queued; app.calls.call
            async for event in call.events():       # Begin, Progress, TileReady, .., End (app.calls.work)
                ...

Leaving ``async with``, however that happens, stops the work and frees the segments of inputs, scratch and output.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from app.calls.admission import Admission
from app.calls.cancel import Cancellations
from app.calls.jobs.jobs import Jobs
from app.calls.kept import KeptTensors
from app.calls.sealed.checks import SealedChecks
from app.intake.lease import Lease, UploadSlot
from app.intake.requests import RequestObject
from app.pool.jobs import no_workers, shutting_down
from app.settings import Settings
from app.telemetry.context import ANYONE, RequestContext
from app.telemetry.metrics import Telemetry
from convgrad._errors import DeadlineExceeded, Starting
from engine.options import parse_options
from engine.planning import Prepared
from engine.prepare import Preparer

if TYPE_CHECKING:
    from app.intake.lease import DirectBody
    from app.pool.buffers import SegmentPool
    from app.pool.local import LocalEngine

__all__ = ["Service"]

T = TypeVar("T")

# Clients ask again at least this often while the service starts: the estimate of the time left may be wrong.
_LONGEST_WAIT_S = 30.0


class Service:
    """Admit requests, check and plan their calls: one object for the life of the process."""

    def __init__(
        self,
        settings: Settings,
        engine: LocalEngine,
        segments: SegmentPool,
        telemetry: Telemetry | None = None,
        unfit: tuple[str, ...] = (),
    ) -> None:
        self.settings = settings
        self.preparer = Preparer(settings.limits)
        self.engine = engine
        self.segments = segments
        self.admission = Admission(settings)
        self.cancellations = Cancellations()
        self.sealed_checks = SealedChecks(settings.check_key_file, segments)
        self.kept_tensors = KeptTensors(segments)
        self.jobs = Jobs.of(settings)
        """The jobs, if the settings name a spool."""
        self.unfit = unfit
        """Targets whose code does not work on this processor, each with the reason."""
        self.gpu: str | None = None
        """The GPU that computes, if one does."""
        self.draining = False
        """Whether the process is about to exit; /readyz then replies with 503."""
        self.admitting = True
        """Whether requests are admitted; `draining` alone does not refuse them."""
        # Long plans are made one after another, so that they keep at most one thread busy; each client has one at most
        # in the thread's queue.
        self._planner = ThreadPoolExecutor(1, "convgrad-plan")
        self._planning = WeakValueDictionary[str | int, asyncio.Lock]()
        # Enough to keep a fast network busy while the event loop does other work.
        self._upload_slots = asyncio.Semaphore(max(4, 2 * settings.worker_count))
        self.telemetry = telemetry or Telemetry()
        self.calls: set[Any] = set()
        """The calls that are waiting or computing."""
        self.closing: set[asyncio.Future[Any]] = set()
        """The ends of calls that still wait for workers, and the verdicts of sealed checks."""
        self.call_numbers = itertools.count(1)

    @property
    def status(self) -> str:
        """One of `starting`, `ready`, `failed`, `draining`; `ready` only while at least one worker is."""
        if self.draining:
            return "draining"
        if self.engine.workers[0]:
            return "ready"
        return "starting" if self.engine.failure is None else "failed"

    def starting(self) -> Starting:
        """Return the error of calls before the first worker is ready: how far that is, and when to try again."""
        share = self.engine.launcher.share
        return Starting(
            f"the service is starting: {share:.0%} of its kernels are compiled and loaded".replace("%", " %"),
            retry_after=min(_LONGEST_WAIT_S, max(1.0, round(self.engine.launcher.seconds_left(), 1))),
            data={"reason": "starting", "progress": round(share, 3)},
        )

    async def drain(self, seconds: float) -> None:
        """Wait at most `seconds` for the admitted requests to finish; fail the calls of those that have not."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self.admission.idle()
        except TimeoutError:
            self.admitting = False
            await self.engine.stop()

    async def stop(self) -> None:
        """Stop everything at once; no process and no shared memory is left."""
        self.draining, self.admitting = True, False
        await self.engine.stop()
        self._planner.shutdown(wait=False, cancel_futures=True)
        self.segments.close()

    def admit(self, context: RequestContext, limited: bool = True) -> AbstractContextManager[None]:
        """Admit a request before its body is read; `drain` waits for the end of the ``with`` block.

        One that is not `limited` computes nothing, and does not wait for calls.

        Raises `ShuttingDown` when `admitting` is false, `Overloaded` while the kernels compile or the queue is full,
        and `RateLimited` when the key has reached its limit of calls.
        """
        if not self.admitting:
            raise shutting_down()
        if not self.engine.ready:
            raise self.starting() if self.engine.failure is None else no_workers()
        return self.admission.request(context, limited)

    def lease(self, context: RequestContext, direct_body: DirectBody | None = None, limited: bool = True) -> Lease:
        """Return the lease of a request, which owns its tensors; large ones wait for an upload slot."""

        def slot() -> UploadSlot:
            check = (lambda: self.admission.check(context)) if limited else (lambda: None)
            return UploadSlot(self._upload_slots, check, lambda: context.received)

        return Lease(self.segments, context, direct_body, slot)

    def deadline(self, context: RequestContext, within_ms: float | None = None) -> float:
        """Return the deadline (`time.monotonic()`) of a request, which may ask for an earlier one."""
        allowed, asked = self.settings.deadline_s, math.inf if within_ms is None else within_ms / 1000
        return context.started + min(allowed, asked)

    async def prepare(self, request: RequestObject, context: RequestContext, **kind: bool) -> Prepared:
        """Check and plan a call; raises what `engine.prepare.Preparer.prepare` raises, and `DeadlineExceeded`.

        `kind` is what makes it a verification or a tolerance there.
        """
        options = parse_options(request.options)
        name, attributes, metas, preparer = request.called_as, request.attributes, request.metas, self.preparer
        if not any(kind.values()) and (found := preparer.known(name, attributes, metas, options)) is not None:
            return found
        plan, at_once = preparer.check(name, attributes, metas, options, **kind)
        return plan() if at_once else await self.plan_in_thread(plan, context, options.deadline_ms)

    async def plan_in_thread(self, plan: Callable[[], T], context: RequestContext, within_ms: float | None = None) -> T:
        """Call `plan` in the planner's thread, so that the event loop is not blocked: keys, or connections, take turns.

        Raises what `plan` raises, and `DeadlineExceeded`.
        """
        client = context.connection if context.key == ANYONE else context.key
        turn = self._planning.setdefault(client, asyncio.Lock())
        try:
            async with asyncio.timeout(self.deadline(context, within_ms) - time.monotonic()), turn:
                return await asyncio.get_running_loop().run_in_executor(self._planner, plan)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the call was planned") from None
