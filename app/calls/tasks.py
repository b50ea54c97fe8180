"""What requests ask for, the same on every API: to compute, verify or validate an operation, or a graph of them.

A `Task` defines how its request object is read, how it is checked and planned, and which `Work` computes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

from app.calls.call import Call, Verification
from app.calls.call import Tolerance as ToleranceCall
from app.calls.graphs import GraphRun
from app.calls.service import Service
from app.calls.work import Answered, Result, Work
from app.intake.lease import Lease
from app.intake.requests import GraphRequest, RequestObject, read_graph_request, read_request_object
from app.intake.tensors import collect_tensors
from app.pool.buffers import Memory
from app.telemetry.context import RequestContext
from convgrad._errors import InvalidParams
from engine.graphs import PreparedGraph, describe_graph, prepare_graph
from engine.options import Options
from engine.planning import Prepared
from engine.prepare import describe
from schemas.broken_rules import BrokenRule, invalid_params
from schemas.rows import InputRows
from schemas.tables import CalledOperation, verified

__all__ = ["Ask", "Compute", "RunGraph", "Task", "Tolerance", "Validate", "ValidateGraph", "Verify"]

T = TypeVar("T")


class Task(ABC):
    """What a request asks the service to do."""

    need_data: ClassVar[bool] = True
    """Whether a tensor needs its data, and not just dtype and shape. If not, no worker is needed: `prepare` returns the
    `Work`, which is done."""
    limited: ClassVar[bool] = True
    """Whether it is rejected if the queue is full or its key has reached its limit of calls."""

    def __init__(self, service: Service, context: RequestContext) -> None:
        self.service = service
        self.context = context
        self.check_options: Callable[[Options], object] | None = None
        """May reject the options of a computation, for the format of the reply."""

    @abstractmethod
    async def read(self, document: Any) -> RequestObject:
        """Read a request object; raises `InvalidParams`."""

    @abstractmethod
    async def prepare(self, request: RequestObject) -> Any:
        """Check a request, and plan it; return what `open` needs. Raises what `Service.prepare` raises."""

    def open(self, prepared: Any, tensors: Mapping[str, Memory], lease: Lease) -> Work:
        """Return the work of a prepared request on these tensors, which it takes from the lease.

        A task that needs no data has nothing to open.
        """
        raise NotImplementedError

    async def check_head(self, request: RequestObject) -> None:
        """Check what has arrived of a request before its tensors have: what may still come is not missing."""
        if not self.need_data:  # it is small
            return
        try:
            await self.prepare(request)
        except InvalidParams as error:
            errors = [found for found in error.errors if not _may_come(found, request.rows)]
            if errors:
                raise invalid_params(request.called_as, errors) from None

    async def work(self, request: RequestObject, lease: Lease) -> Work:
        """Return the work of a request that has arrived, to be entered with ``async with`` at once.

        Raises what `arrived` raises.
        """
        prepared, tensors = await self.arrived(request, lease)
        return self.open(prepared, tensors, lease) if self.need_data else cast("Work", prepared)

    async def arrived(self, request: RequestObject, lease: Lease) -> tuple[Any, dict[str, Memory]]:
        """Check and plan a request that has arrived, and decode its tensors.

        Raises what `prepare` raises, and `InvalidParams` for tensors without data.
        """
        try:
            prepared = await self.prepare(request)
        except InvalidParams:  # what is wrong with the tensors themselves comes first
            await collect_tensors(request.inputs, lease, here=True, need_all=False)
            raise
        here = not self.need_data or (isinstance(prepared, Prepared) and prepared.tiny)
        with self.context.timings.measure("decode"):
            return prepared, await collect_tensors(request.inputs, lease, here=here, need_all=self.need_data)


def _may_come(found: BrokenRule, rows: InputRows) -> bool:
    loc = found["loc"]
    return bool(found["type"] == "missing" and (loc[:1] == ["inputs"] or rows.is_shape(str(loc[-1]))))


class Ask(Task):
    """Return the work that `answer` makes of the members of a request, which names no tensors and computes nothing."""

    need_data = False
    limited = False

    def __init__(self, service: Service, context: RequestContext, answer: Callable[..., Awaitable[Work]]) -> None:
        super().__init__(service, context)
        self._answer = answer
        self._given: Mapping[str, Any] = {}

    async def read(self, document: Any) -> RequestObject:
        """Read the members."""
        self._given = document if isinstance(document, Mapping) else {}
        return RequestObject("request", InputRows(), {}, {}, None)

    async def prepare(self, request: RequestObject) -> None:
        """Plan nothing."""

    async def work(self, request: RequestObject, lease: Lease) -> Work:  # noqa: ARG002
        """Return the work; raises what `answer` raises."""
        return await self._answer(self._given, lease)


class Compute(Task):
    """Compute the operation `called`."""

    def __init__(self, service: Service, context: RequestContext, called: CalledOperation) -> None:
        super().__init__(service, context)
        self.called = called

    async def read(self, document: Any) -> RequestObject:
        """Read a request object."""
        return read_request_object(self.called, document)

    async def prepare(self, request: RequestObject) -> Any:
        """Check and plan the call."""
        prepared = await self.service.prepare(request, self.context)
        if self.check_options is not None:
            self.check_options(prepared.options)
        return prepared

    def open(self, prepared: Prepared, tensors: Mapping[str, Memory], lease: Lease) -> Call:
        """Return the call."""
        return Call(self.service, prepared, tensors, lease)


class Verify(Compute):
    """Compare a result with the reference: the result is one more input, named like the output."""

    def __init__(self, service: Service, context: RequestContext, called: CalledOperation) -> None:
        super().__init__(service, context, verified(called))

    async def prepare(self, request: RequestObject) -> Prepared:
        """Check and plan the verification."""
        return await self.service.prepare(request, self.context, verify=True)

    def open(self, prepared: Prepared, tensors: Mapping[str, Memory], lease: Lease) -> Verification:
        """Return the verification."""
        return Verification(self.service, prepared, tensors, lease)


class Tolerance(Compute):
    """Return the tolerance of the results of a call."""

    async def prepare(self, request: RequestObject) -> Prepared:
        """Check and plan the tolerance."""
        return await self.service.prepare(request, self.context, tolerance=True)

    def open(self, prepared: Prepared, tensors: Mapping[str, Memory], lease: Lease) -> ToleranceCall:
        """Return the work."""
        return ToleranceCall(self.service, prepared, tensors, lease)


class Validate(Compute):
    """Check a call without computing it: describe its resolved attributes, outputs, plan and cost."""

    need_data = False

    async def prepare(self, request: RequestObject) -> Answered:
        """Return the description."""
        with self.service.admission.call(self.context):
            prepared = await super().prepare(request)
        return Answered(self.context, Result(describe(prepared, self.service.settings.limits)))


class RunGraph(Task):
    """Compute the nodes of a graph in order."""

    async def read(self, document: Any) -> GraphRequest:
        """Read a request object and the structure of its graph."""
        return await self.service.plan_in_thread(partial(read_graph_request, document), self.context)

    async def prepare(self, request: RequestObject) -> Any:
        """Check and plan all nodes."""
        return await self._planned(prepare_graph, request)

    async def _planned(self, plan: Callable[..., T], request: RequestObject) -> T:
        graph = cast("GraphRequest", request)
        planned = partial(plan, graph.call, graph.metas, self.service.settings.limits)
        return await self.service.plan_in_thread(planned, self.context, graph.call.options.deadline_ms)

    def open(self, prepared: PreparedGraph, tensors: Mapping[str, Memory], lease: Lease) -> GraphRun:
        """Return the run."""
        return GraphRun(self.service, prepared, tensors, lease)


class ValidateGraph(RunGraph):
    """Check a graph without computing it: describe its inputs and outputs, and attributes and cost of each node."""

    need_data = False

    async def prepare(self, request: RequestObject) -> Answered:
        """Return the description; tensors may be missing, too."""
        with self.service.admission.call(self.context):
            return Answered(self.context, Result(await self._planned(describe_graph, request)))
