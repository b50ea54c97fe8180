"""What requests ask for, the same on every API: to compute, verify or validate an operation, or a graph of them.

A `Task` defines how its request object is read, how it is checked and planned, and which `Work` computes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from app.calls.call import Call, Verification
from app.calls.graphs import GraphRun, PreparedGraph, describe_graph, prepare_graph
from app.calls.service import Service
from app.calls.verifying import prepare_verification
from app.calls.work import Answered, Result, Work
from app.intake.lease import Lease
from app.intake.requests import GraphRequest, RequestObject, read_graph_request, read_request_object
from app.intake.tensors import collect_tensors
from app.pool.buffers import Memory
from app.telemetry.context import RequestContext
from convgrad._errors import InvalidParams
from engine.options import Options
from engine.planning import Prepared
from engine.prepare import describe
from schemas.broken_rules import BrokenRule, invalid_params
from schemas.rows import InputRows
from schemas.tables import CalledOperation, verified

__all__ = ["Compute", "Immediate", "RunGraph", "Task", "Validate", "ValidateGraph", "Verify"]


class Task(ABC):
    """What a request asks the service to do."""

    need_data = True
    """Whether a tensor needs its data, and not just dtype and shape."""

    def __init__(self, service: Service, context: RequestContext) -> None:
        self.service = service
        self.context = context

    @abstractmethod
    async def read(self, document: Any) -> RequestObject:
        """Read a request object; raises `InvalidParams`."""

    @abstractmethod
    async def prepare(self, request: RequestObject) -> Any:
        """Check a request, and plan it; return what `open` needs. Raises what `Service.prepare` raises."""

    @abstractmethod
    def open(self, prepared: Any, tensors: Mapping[str, Memory], lease: Lease) -> Work:
        """Return the work of a prepared request on these tensors, which it takes from the lease."""

    async def check_head(self, request: RequestObject) -> None:
        """Check what has arrived of a request before its tensors have: what may still come is not missing."""
        try:
            await self.prepare(request)
        except InvalidParams as error:
            errors = [found for found in error.errors if not _may_come(found, request.rows)]
            if errors:
                raise invalid_params(request.called_as, errors) from None

    async def work(self, request: RequestObject, lease: Lease) -> Work:
        """Return the work of a request that has arrived, to be entered with ``async with`` at once.

        Raises what `prepare` raises, and `InvalidParams` for tensors without data.
        """
        try:
            prepared = await self.prepare(request)
        except InvalidParams:  # what is wrong with the tensors themselves comes first
            await collect_tensors(request.inputs, lease, here=True, need_all=False)
            raise
        here = not self.need_data or (isinstance(prepared, Prepared) and prepared.tiny)
        with self.context.timings.measure("decode"):
            tensors = await collect_tensors(request.inputs, lease, here=here, need_all=self.need_data)
        return self.open(prepared, tensors, lease)


def _may_come(found: BrokenRule, rows: InputRows) -> bool:
    loc = found["loc"]
    return bool(found["type"] == "missing" and (loc[:1] == ["inputs"] or rows.is_shape(str(loc[-1]))))


class _OperationTask(Task):
    """A task for the operation `called`."""

    def __init__(self, service: Service, context: RequestContext, called: CalledOperation) -> None:
        super().__init__(service, context)
        self.called = called

    async def read(self, document: Any) -> RequestObject:
        """Read a request object."""
        return read_request_object(self.called, document)


class Compute(_OperationTask):
    """Compute an operation; `check` may reject its options."""

    def __init__(
        self,
        service: Service,
        context: RequestContext,
        called: CalledOperation,
        check: Callable[[Options], object] = lambda _: None,
    ) -> None:
        super().__init__(service, context, called)
        self._check = check

    async def prepare(self, request: RequestObject) -> Prepared:
        """Check and plan the call."""
        prepared = await self.service.prepare(request, self.context)
        self._check(prepared.options)
        return prepared

    def open(self, prepared: Prepared, tensors: Mapping[str, Memory], lease: Lease) -> Call:
        """Return the call."""
        return Call(self.service, prepared, tensors, lease)


class Verify(_OperationTask):
    """Compare a result with the reference: the result is one more input, named like the output."""

    def __init__(self, service: Service, context: RequestContext, called: CalledOperation) -> None:
        super().__init__(service, context, verified(called))

    async def prepare(self, request: RequestObject) -> Prepared:
        """Check and plan the verification."""
        return await prepare_verification(self.service, self.context, request)

    def open(self, prepared: Prepared, tensors: Mapping[str, Memory], lease: Lease) -> Verification:
        """Return the verification."""
        return Verification(self.service, prepared, tensors, lease)


class Immediate(Task):
    """A task that needs no worker: tensors may be just dtype and shape."""

    need_data = False

    async def prepare(self, request: RequestObject) -> Work:
        """Return the answer."""
        return await self.answer(request)

    async def check_head(self, request: RequestObject) -> None:
        """Check nothing early: the request is small."""

    @abstractmethod
    async def answer(self, request: RequestObject) -> Work:
        """Return the answer; raises what checking and planning a call raise, and what entering one does."""

    def open(self, prepared: Work, tensors: Mapping[str, Memory], lease: Lease) -> Work:  # noqa: ARG002
        """Return the answer."""
        return prepared


class Validate(Immediate, _OperationTask):
    """Check a call without computing it."""

    async def answer(self, request: RequestObject) -> Answered:
        """Return the resolved attributes, outputs, plan and cost of the call."""
        with self.service.admission.call(self.context):
            prepared = await self.service.prepare(request, self.context)
        return Answered(self.context, Result(describe(prepared, self.service.settings.limits)))


class _Graph(Task):
    """A task for a graph."""

    async def read(self, document: Any) -> GraphRequest:
        """Read a request object and the structure of its graph."""
        read = partial(read_graph_request, document)
        return await self.service.plan_in_thread(read, self.context)


class RunGraph(_Graph):
    """Compute the nodes of a graph in order."""

    async def prepare(self, request: RequestObject) -> PreparedGraph:
        """Check and plan all nodes."""
        return await prepare_graph(self.service, self.context, cast("GraphRequest", request))

    def open(self, prepared: PreparedGraph, tensors: Mapping[str, Memory], lease: Lease) -> GraphRun:
        """Return the run."""
        return GraphRun(self.service, prepared, tensors, lease)


class ValidateGraph(Immediate, _Graph):
    """Check a graph without computing it; its tensors may be missing, too."""

    async def answer(self, request: RequestObject) -> Answered:
        """Return the inputs and outputs of the graph, and the attributes and cost of each node."""
        with self.service.admission.call(self.context):
            described = await describe_graph(self.service, self.context, cast("GraphRequest", request))
        return Answered(self.context, Result(described))
