"""What requests ask for, the same on every API: to compute, verify or validate an operation, or a graph of them.

A `Task` defines how its request object is read, what is checked when, and which `Work` computes it. `RequestReceiver`
takes one request from its first bytes to its work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, cast

from app.calls.call import Call
from app.calls.graphs import GraphRun, PreparedGraph, check_begun_graph, describe_graph, prepare_graph
from app.calls.service import Service
from app.calls.verifying import Verification, prepare_verification
from app.calls.work import Answered, Result, Work
from app.intake.graphs import GraphRequest, read_graph_request
from app.intake.lease import Lease
from app.intake.requests import (
    Arrived,
    Begun,
    Known,
    RequestEvent,
    RequestObject,
    check_begun,
    read_request_object,
)
from app.intake.strict_json import Partial, PartialList
from app.intake.tensors import collect_tensors
from app.pool.buffers import Segment
from app.telemetry.context import current_context
from convgrad._errors import InvalidParams, Overloaded, RateLimited
from engine.options import Options, parse_options
from engine.planning import Prepared, tensor_bytes
from engine.prepare import check, describe
from schemas.broken_rules import BrokenRule, invalid_params
from schemas.ops import ResolvedOp, resolve
from schemas.tables import CalledOperation, verified
from schemas.tensors import TensorMeta

__all__ = ["Compute", "Immediate", "RequestReceiver", "RunGraph", "Task", "Validate", "ValidateGraph", "Verify"]


_BY_IMAGE = ("src", "diff_dst")
"""Inputs whose outermost axis is the batch, in every layout."""


class Task(ABC):
    """What a request asks the service to do."""

    need_data = True
    """Whether a tensor needs its data, and not just dtype and shape."""

    def __init__(self, service: Service) -> None:
        self.service = service

    @abstractmethod
    async def read(self, document: Any) -> RequestObject:
        """Read a request object; raises `InvalidParams`."""

    @abstractmethod
    async def check_begun(self, document: Mapping[str, Any]) -> None:
        """Check the part of a request object that has arrived; raises what `app.intake.requests.check_begun` does."""

    @abstractmethod
    async def prepare(self, request: RequestObject, *, complete: bool) -> Any:
        """Check a request, and plan it.

        Returns what `open` needs, or None while too little has arrived. Raises what `Service.prepare`
        raise.
        """

    @abstractmethod
    def open(self, prepared: Any, tensors: Mapping[str, Segment], lease: Lease) -> Work:
        """Return the work of a prepared request on these tensors, which it takes from the lease."""


class _OperationTask(Task):
    """A task for the operation `called`; `check` may reject its options, as soon as they are known."""

    def __init__(
        self, service: Service, called: CalledOperation, check: Callable[[Options], object] = lambda _: None
    ) -> None:
        super().__init__(service)
        self.called = called
        self._check = check

    async def read(self, document: Any) -> RequestObject:
        """Read a request object."""
        return read_request_object(self.called, document)

    async def check_begun(self, document: Mapping[str, Any]) -> None:
        """Check the part of a request object that has arrived."""
        self._check(check_begun(self.called, document, int(self.service.settings.memory_budget)))


class Compute(_OperationTask):
    """Compute an operation."""

    async def prepare(self, request: RequestObject, *, complete: bool) -> Prepared | None:  # noqa: ARG002
        """Check and plan the call."""
        is_shape = self.called.operation.is_shape
        if any(isinstance(meta, TensorMeta) and is_shape(key) for key, meta in request.metas.items()):
            self._check_without_shape(request)
            return None
        prepared = await self.service.prepare(request)
        self._check(prepared.options)
        return prepared

    def _check_without_shape(self, request: RequestObject) -> None:
        """Check a call whose shape input has not arrived: its values take precedence over the attribute."""
        name, spellings = self.called.called_as, self.called.operation.attribute_spellings
        shape = self.called.operation.shape_input
        attributes = {key: value for key, value in request.attributes.items() if spellings.get(key) != shape}
        try:
            options = parse_options(request.options)
            check(name, attributes, request.metas, options, self.service.settings)
        except InvalidParams as error:
            errors = [
                found
                for found in error.errors
                if not (found["type"] == "missing" and spellings.get(found["loc"][-1]) == shape)
            ]
            if errors:
                raise invalid_params(name, errors) from None

    def open(self, prepared: Prepared, tensors: Mapping[str, Segment], lease: Lease) -> Call:
        """Return the call."""
        return Call(self.service, prepared, tensors, lease)


class Verify(_OperationTask):
    """Compare a result with the reference: the result is one more input, named like the output."""

    def __init__(self, service: Service, called: CalledOperation) -> None:
        super().__init__(service, verified(called))

    async def prepare(self, request: RequestObject, *, complete: bool) -> Prepared | None:
        """Check and plan the verification."""
        metas = request.metas
        if complete or self.called.operation.output_spellings.keys() & metas.keys():
            return await prepare_verification(self.service, request)
        resolve(self.called.called_as, request.attributes, metas)  # the result may still come
        return None

    def open(self, prepared: Prepared, tensors: Mapping[str, Segment], lease: Lease) -> Verification:
        """Return the verification."""
        return Verification(self.service, prepared, tensors, lease)


class Immediate(Task):
    """A task that needs no worker: tensors may be just dtype and shape."""

    need_data = False

    async def prepare(self, request: RequestObject, *, complete: bool) -> Work | None:
        """Return the answer once the request is complete."""
        return await self.answer(request) if complete else None

    @abstractmethod
    async def answer(self, request: RequestObject) -> Work:
        """Return the answer; raises what checking and planning a call raise, and what entering one does."""

    def open(self, prepared: Work, tensors: Mapping[str, Segment], lease: Lease) -> Work:  # noqa: ARG002
        """Return the answer."""
        return prepared


class Validate(_OperationTask, Immediate):
    """Check a call without computing it."""

    async def answer(self, request: RequestObject) -> Answered:
        """Return the resolved attributes, outputs, plan and cost of the call."""
        with self.service.admission.call(current_context()):
            prepared = await self.service.prepare(request)
        return Answered(Result(describe(prepared, self.service.settings)))


class _Graph(Task):
    """A task for a graph."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._begun = False  # whether the graph had arrived when `check_begun` was called

    async def read(self, document: Any) -> GraphRequest:
        """Read a request object and the structure of its graph."""
        read = partial(read_graph_request, document)
        return await self.service.plan_in_thread(read, self.service.deadline())

    async def check_begun(self, document: Mapping[str, Any]) -> None:
        """Check the graph, when it has arrived."""
        given, options = document.get("attributes", document), document.get("options")  # a form's request has been read
        dump = given.get("graph")
        if not self._begun and not isinstance(dump, Partial | PartialList | None) and not isinstance(options, Partial):
            self._begun = True
            await check_begun_graph(self.service, dump, parse_options(options))


class RunGraph(_Graph):
    """Compute the nodes of a graph in order."""

    async def prepare(self, request: RequestObject, *, complete: bool) -> PreparedGraph:  # noqa: ARG002
        """Check and plan all nodes."""
        return await prepare_graph(self.service, cast("GraphRequest", request))

    def open(self, prepared: PreparedGraph, tensors: Mapping[str, Segment], lease: Lease) -> GraphRun:
        """Return the run."""
        return GraphRun(self.service, prepared, tensors, lease)


class ValidateGraph(_Graph, Immediate):
    """Check a graph without computing it; its tensors may be missing, too."""

    async def answer(self, request: RequestObject) -> Answered:
        """Return the inputs and outputs of the graph, and the attributes and cost of each node."""
        with self.service.admission.call(current_context()):
            return Answered(Result(await describe_graph(self.service, cast("GraphRequest", request))))


class RequestReceiver:
    """Take one request from its first bytes to its work.

    A call begins as soon as the first unit of its plan has its inputs, while the others arrive.
    """

    def __init__(self, task: Task, lease: Lease) -> None:
        self._task = task
        self._lease = lease
        self._context = current_context()
        self._known: Known | None = None
        self._call: Call | None = None
        self._overlaps = isinstance(task, Compute)

    async def receive(self, events: AsyncIterator[RequestEvent]) -> Work:
        """Check the request as it arrives; return its work, to be entered with ``async with`` at once.

        Raises what the decoder of `events` and the task raise.
        """
        try:
            return await self._receive(events)
        except BaseException as error:
            if self._call is not None:
                await self._call.abandon(error)
            raise

    async def _receive(self, events: AsyncIterator[RequestEvent]) -> Work:
        async with aclosing(cast("Any", events)):
            async for each in events:
                match each:
                    case Begun(document):
                        await self._task.check_begun(document)
                    case Known():
                        await self._check(each, complete=False)
                    case Arrived():
                        await self._advance(each)
        self._lease.received()
        known = self._known
        assert known is not None
        await self._check(known, complete=True)
        with self._context.timings.measure("decode"):
            tensors = await collect_tensors(known.request.inputs, self._lease) if self._task.need_data else {}
        if self._call is not None:
            if self._call.prepared.op == known.prepared.op:
                return self._call
            await self._call.abandon()
        return self._task.open(known.prepared, tensors, self._lease)

    async def _check(self, known: Known, *, complete: bool) -> None:
        """Plan the request, and again if something has changed since then, such as an optional input."""
        before, self._known = self._known, known
        if (
            known.prepared is None
            and before is not None
            and before is not known
            and before.request.metas == known.request.metas
        ):
            known.prepared = before.prepared
        if known.prepared is None and (complete or known.likely is None):
            try:
                known.prepared = await self._task.prepare(known.request, complete=complete)
            except InvalidParams as error:
                if known.all_described:
                    raise
                # Which inputs are required may depend on the outputs, and they may still come.
                errors = [found for found in error.errors if not _is_missing_input(found)]
                if errors:
                    raise invalid_params(known.request.called_as, errors) from None

    async def _advance(self, arrived: Arrived) -> None:
        """Begin or advance the call."""
        assert self._known is not None
        prepared = self._known.prepared or self._known.likely
        if not self._overlaps or prepared is None:
            return
        images, first = _complete_images(prepared.op, arrived.received), prepared.plan.units[0].images
        if self._call is not None:
            self._call.advance(images)
        elif first is not None and first <= images < prepared.op.n:
            call = cast("Call", self._task.open(prepared, arrived.segments, self._lease))
            try:
                await call.begin(images)
            except (Overloaded, RateLimited):
                self._overlaps = False  # the complete call may find room later
            else:
                self._call = call


def _is_missing_input(found: BrokenRule) -> bool:
    return bool(found["type"] == "missing" and found["loc"][:1] == ["inputs"])


def _complete_images(op: ResolvedOp, received: Mapping[str, int]) -> int:
    """Count the leading images that are complete in all inputs, given the bytes of each that were `received`."""
    images = op.n
    for spec in op.inputs:
        there, whole = received.get(spec.name, 0), tensor_bytes(spec)
        if there < whole:
            images = min(images, there * op.n // whole) if spec.name in _BY_IMAGE else 0
    return images
