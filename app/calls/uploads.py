"""The tasks of tensors that are kept under handles: keep one, send one, drop one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from app.calls.service import Service
from app.calls.tasks import Task
from app.calls.work import Answered, Output, Result
from app.intake.lease import Lease
from app.intake.requests import RequestObject
from app.intake.tensors import Tensor
from app.pool.buffers import Memory, Segment
from app.telemetry.context import RequestContext
from schemas.broken_rules import BrokenRule, broken_rule, invalid_params
from schemas.rows import InputRows, TensorRow
from schemas.spelling import check_members
from schemas.tensors import TensorSpec

__all__ = ["DropTensor", "KeepTensor", "SendTensor"]

_NAME = "tensor"
_ROWS = InputRows(inputs=(TensorRow(name=_NAME, doc="What is kept."),))


class KeepTensor(Task):
    """Keep the one input, `tensor`, under a new handle."""

    async def read(self, document: Any) -> RequestObject:
        """Read the request object, whose only member is `inputs`; raises `InvalidParams`."""
        broken: list[BrokenRule] = []
        if not isinstance(document, Mapping) or not isinstance(document.get("inputs") or {}, Mapping):
            raise invalid_params(_NAME, [broken_rule([], "the request and its inputs must be objects", "object_type")])
        check_members(document, ("inputs",), "the only member is inputs", broken)
        inputs = document.get("inputs") or {}
        check_members(inputs, (_NAME,), f"the only input is {_NAME}", broken)
        if broken:
            raise invalid_params(_NAME, broken)
        return RequestObject(_NAME, _ROWS, {}, inputs, None)

    async def prepare(self, request: RequestObject) -> TensorSpec:
        """Return the description of the tensor; raises `InvalidParams` if there is none."""
        found = request.inputs.get(_NAME)
        if not isinstance(found, Tensor):
            raise invalid_params(_NAME, [broken_rule(["inputs", _NAME], f"{_NAME} is missing", "missing")])
        return TensorSpec(_NAME, found.dtype.name, found.shape)

    def open(self, prepared: TensorSpec, tensors: Mapping[str, Memory], lease: Lease) -> Answered:  # noqa: ARG002
        """Return the reply, which has the handle."""
        kept = self.service.kept_tensors
        entry = kept.keep(Output(_NAME, prepared, tensors[_NAME]), self.context.tenant)
        return Answered(self.context, Result({**entry, "seconds": kept.limits.seconds}))


class _OfHandle(Task):
    """A task of the tensor with this handle; its request has no members."""

    need_data = False

    def __init__(self, service: Service, context: RequestContext, handle: str) -> None:
        super().__init__(service, context)
        self._handle = handle

    async def read(self, document: Any) -> RequestObject:  # noqa: ARG002
        """Read nothing."""
        return RequestObject(_NAME, InputRows(), {}, {}, None)


class SendTensor(_OfHandle):
    """Send the tensor with this handle."""

    async def prepare(self, request: RequestObject) -> Answered:  # noqa: ARG002
        """Return the tensor; raises `NotFound`."""
        found = self.service.kept_tensors.find(self._handle, self.context.tenant)
        shared = Output(_NAME, found.spec, cast("Segment", found.memory).share())
        return Answered(self.context, Result({"handle": self._handle}, [shared]))


class DropTensor(_OfHandle):
    """Forget the tensor with this handle."""

    async def prepare(self, request: RequestObject) -> Answered:  # noqa: ARG002
        """Return the handle; raises `NotFound`."""
        self.service.kept_tensors.drop(self._handle, self.context.tenant)
        return Answered(self.context, Result({"handle": self._handle}))
