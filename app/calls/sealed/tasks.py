"""The tasks of sealed checks: begin one, give its next case, judge a result, finish it, verify its signature.

A submitted result is verified like any other one; the service has the inputs already.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, cast

from app.calls.call import Verification
from app.calls.sealed.checks import Judging, settled, submit
from app.calls.service import Service
from app.calls.tasks import Task
from app.calls.work import Answered, Output, Result, finish
from app.intake.lease import Lease
from app.intake.requests import RequestObject
from app.intake.tensors import Tensor
from app.pool.buffers import Memory, Segment
from app.telemetry.context import RequestContext
from convgrad._dtypes import dtype
from engine.options import ENCODINGS, Options, check_encoding
from engine.planning import Prepared, tensor_bytes
from engine.sealed.checks import SealedCase, SealedCheck, choice
from schemas.broken_rules import broken_rule, invalid_params
from schemas.checks import CHECK_METHODS
from schemas.rows import InputRows
from schemas.rpc import bind_params
from schemas.tables import find_operation
from schemas.tensors import TensorSpec

__all__ = ["check_task"]

Place = Callable[[Any], Any]
"""Adds the path's parameters to the body."""

_SENT = ("tensors", "seed")


def check_task(service: Service, context: RequestContext, method: str, place: Place = lambda body: body) -> Task:
    """Return the task of one of the `CHECK_METHODS`; `place` adds what is in the path to the body."""
    return (_Submit if method == "check.submit" else _CheckTask)(service, context, method, place)


class _CheckTask(Task):
    """Answer one of the `CHECK_METHODS`."""

    need_data = False
    _given: Mapping[str, Any]
    """The params, once they are read."""

    def __init__(self, service: Service, context: RequestContext, method: str, place: Place) -> None:
        super().__init__(service, context)
        self._method = method
        self._place = place

    async def read(self, document: Any) -> RequestObject:
        """Read the params."""
        params, given = CHECK_METHODS[self._method], self._place(document)
        if not isinstance(given, Mapping):
            raise invalid_params("check", [broken_rule([], "the request must be an object", "object_type")])
        self._given = bind_params(given, tuple(params.params), required=params.required, what="check")
        return RequestObject("check", InputRows(), {}, {}, None)

    async def prepare(self, request: RequestObject) -> Any:  # noqa: ARG002
        """Return the answer."""
        return Answered(self.context, await self._answer())

    def _check(self) -> SealedCheck:
        """Return the check; raises what `SealedChecks.find` raises."""
        return self.service.sealed_checks.find(self._given["check"], self.context.tenant)

    async def _answer(self) -> Result:
        checks, context = self.service.sealed_checks, self.context
        match self._method:
            case "check.begin":
                check = checks.begin(self._given, context.tenant, context.key)
                limits = {"case_s": checks.limits.case_s, "check_s": checks.limits.check_s}
                return Result({"check": check.id, "cases": check.asked, **limits, "key_id": checks.signer.key_id})
            case "check.next":
                return await self._next()
            case "check.finish":
                return Result(checks.finish(await settled(self._check())))
            case "check.drop":
                return Result(checks.forget(self._given["check"], context.tenant))
            case "check.key":
                return Result(checks.signer.public)
        return Result(checks.verify_signature(self._given["document"]))

    async def _next(self) -> Result:
        given = self._given
        sent, encoding = choice(given, "send", _SENT), choice(given, "encoding", ENCODINGS)
        check = await settled(self._check())
        case = await self.service.sealed_checks.next(check)
        document = check.describe(case)
        if case is None:
            return Result(document)
        if sent == "seed":
            case.as_seed = True
            return Result({**document, "generate": case.case.as_json()}, member="inputs")
        asked = case.case.problem
        check_encoding(Options(encoding), asked.input_shapes.items())
        inputs = [
            Output(name, TensorSpec(name, asked.dtype, shape), case.inputs[name].share())
            for name, shape in asked.input_shapes.items()
        ]
        return Result(document, inputs, encoding, "inputs")


class _Submit(_CheckTask):
    """Judge the result of the case that is open, or note that the kernel has none."""

    need_data = True
    # Known once the params are.
    _case: SealedCase
    _outcome: str | None

    async def read(self, document: Any) -> RequestObject:
        """Read the params; raises `InvalidParams` for a case that takes no answer."""
        await super().read(document)
        self._case = self._check().case(self._given["case"])
        self._case.require_answerable()
        self._outcome, rows, inputs = self._case.read_answer(self._given)
        return RequestObject(self._case.case.problem.op, rows, {}, inputs, None)

    async def prepare(self, request: RequestObject) -> Any:
        """Check and plan the verification."""
        if self._outcome is not None:
            return None
        asked = self._case.case.problem
        called = find_operation(asked.op)
        own = {name: Tensor(dtype(asked.dtype), shape) for name, shape in asked.input_shapes.items()}
        attributes, inputs = asked.attributes(), {**request.inputs, **own}
        whole = RequestObject(called.called_as, called.operation, attributes, inputs, self._case.options)
        return await self.service.prepare(whole, self.context, verify=True)

    def open(self, prepared: Prepared | None, tensors: Mapping[str, Memory], lease: Lease) -> Answered:  # noqa: ARG002
        """Return the wait for the verdict; it is made whether or not the client waits for it."""
        answer = str(self._outcome)
        if prepared is not None:
            (result,) = tensors.values()
            answer = hashlib.sha256(result.view[: tensor_bytes(prepared.op.output)]).hexdigest()
        verdict, closing = submit(self._case, answer, lambda: self._judge(prepared, tensors)), self.service.closing
        closing.add(verdict)
        verdict.add_done_callback(closing.discard)
        return Answered(self.context, verdict)

    def _judge(self, prepared: Prepared | None, tensors: Mapping[str, Memory]) -> Judging:
        """Begin to judge; the tensors are owned at once, since those of the request are freed with it."""
        lease, given = self.service.lease(self.context), {**tensors, **self._case.inputs} if prepared else {}
        owned = {name: lease.share(cast("Segment", segment)) for name, segment in given.items()}
        return self._judged(prepared, owned, lease)

    async def _judged(self, prepared: Prepared | None, owned: Mapping[str, Memory], lease: Lease) -> dict[str, Any]:
        if prepared is None:
            return self._case.note(str(self._outcome))
        result = next(iter(owned.values())).view[: tensor_bytes(prepared.op.output)]
        with lease:
            async with Verification(self.service, prepared, owned, lease) as verification:
                await finish(verification)
                return self._case.judge(verification.result().document, result)
