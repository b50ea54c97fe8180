"""The tasks of tensors that are kept under handles: keep one, send one, drop one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from app.calls.service import Service
from app.calls.tasks import Ask, Task
from app.calls.work import Answered, Output, Result
from app.intake.lease import Lease
from app.intake.requests import RequestObject
from app.intake.tensors import Tensor
from app.pool.buffers import Memory, Segment
from app.telemetry.context import RequestContext
from schemas.broken_rules import broken_rule, invalid_params
from schemas.rows import InputRows, TensorRow
from schemas.tensors import TensorSpec

__all__ = ["KeepTensor", "drop_tensor", "send_tensor"]

_NAME = "tensor"
_ROWS = InputRows(inputs=(TensorRow(name=_NAME, doc="What is kept."),))


class KeepTensor(Task):
    """Keep the one input, `tensor`, under a new handle."""

    async def read(self, document: Any) -> RequestObject:
        """Read the request object, whose only member is `inputs`; raises `InvalidParams`."""
        inputs = document.get("inputs") or {} if isinstance(document, Mapping) else None
        if not isinstance(inputs, Mapping) or {*document} - {"inputs"} or {*inputs} - {_NAME}:
            rule = f"the request must be an object whose only member is inputs, with the only member {_NAME}"
            raise invalid_params(_NAME, [broken_rule([], rule, "object_type")])
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


def send_tensor(service: Service, context: RequestContext, handle: str) -> Task:
    """Return the task that sends the tensor with a handle; it raises `NotFound`."""

    async def answer(*_: object) -> Answered:
        found = service.kept_tensors.find(handle, context.tenant)
        shared = Output(_NAME, found.spec, cast("Segment", found.memory).share())
        return Answered(context, Result({"handle": handle}, [shared]))

    return Ask(service, context, answer)


def drop_tensor(service: Service, context: RequestContext, handle: str) -> Task:
    """Return the task that forgets the tensor with a handle; it raises `NotFound`."""

    async def answer(*_: object) -> Answered:
        service.kept_tensors.drop(handle, context.tenant)
        return Answered(context, Result({"handle": handle}))

    return Ask(service, context, answer)
