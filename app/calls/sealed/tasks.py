"""The tasks of sealed checks: begin one, give its next case, judge a result, finish it, verify its signature.

A submitted result is verified like any other one; the service has the inputs already.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, cast

from app.calls.call import Verification
from app.calls.outputs import Output
from app.calls.sealed.checks import Judging, settled, submit
from app.calls.service import Service
from app.calls.tasks import Immediate, Task
from app.calls.verifying import prepare_verification
from app.calls.work import Answered, Event, Result, Work, finish
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
    return (Submit if method == "check.submit" else CheckTask)(service, context, method, place)


class _Check(Task):
    """A request about a check."""

    def __init__(self, service: Service, context: RequestContext, method: str, place: Place) -> None:
        super().__init__(service, context)
        self._method = method
        self._place = place

    def given(self, document: Any) -> dict[str, Any]:
        """Read the params."""
        params, given = CHECK_METHODS[self._method], self._place(document)
        if not isinstance(given, Mapping):
            raise invalid_params("check", [broken_rule([], "the request must be an object", "object_type")])
        return bind_params(given, tuple(params.params), required=params.required, what="check")

    def found(self, given: Mapping[str, Any]) -> SealedCheck:
        """Return the check; raises what `SealedChecks.find` raises."""
        return self.service.sealed_checks.find(given["check"], self.context.tenant)


class CheckTask(Immediate, _Check):
    """Answer one of the `CHECK_METHODS`, all but `check.submit`."""

    _given: Mapping[str, Any]

    async def read(self, document: Any) -> RequestObject:
        """Read the params."""
        self._given = self.given(document)
        return RequestObject("check", InputRows(), {}, {}, None)

    async def answer(self, request: RequestObject) -> Work:  # noqa: ARG002
        """Return the answer."""
        return Answered(self.context, await self._answer(self._given))

    async def _answer(self, given: Mapping[str, Any]) -> Result:
        checks, context = self.service.sealed_checks, self.context
        match self._method:
            case "check.begin":
                check = checks.begin(given, context.tenant, context.key)
                limits = {"case_s": checks.limits.case_s, "check_s": checks.limits.check_s}
                return Result({"check": check.id, "cases": check.asked, **limits, "key_id": checks.signer.key_id})
            case "check.next":
                return await self._next(given)
            case "check.finish":
                return Result(checks.finish(await settled(self.found(given))))
            case "check.drop":
                return Result(checks.forget(given["check"], context.tenant))
        return Result(checks.verify_signature(given["document"]))

    async def _next(self, given: Mapping[str, Any]) -> Result:
        sent, encoding = choice(given, "send", _SENT), choice(given, "encoding", ENCODINGS)
        check = await settled(self.found(given))
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


class Submit(_Check):
    """Judge the result of the case that is open, or note that the kernel has none."""

    # Known once the params are.
    _case: SealedCase
    _outcome: str | None

    async def read(self, document: Any) -> RequestObject:
        """Read the params; raises `InvalidParams` for a case that takes no answer."""
        given = self.given(document)
        self._case = self.found(given).case(given["case"])
        self._case.require_answerable()
        self._outcome, rows, inputs = self._case.read_answer(given)
        return RequestObject(self._case.case.problem.op, rows, {}, inputs, None)

    async def prepare(self, request: RequestObject) -> Prepared | None:
        """Check and plan the verification."""
        if self._outcome is not None:
            return None
        asked = self._case.case.problem
        called = find_operation(asked.op)
        own = {name: Tensor(dtype(asked.dtype), shape) for name, shape in asked.input_shapes.items()}
        inputs, options = {**request.inputs, **own}, {"fast": False}
        whole = RequestObject(called.called_as, called.operation, asked.attributes(), inputs, options)
        return await prepare_verification(self.service, self.context, whole)

    def open(self, prepared: Prepared | None, tensors: Mapping[str, Memory], lease: Lease) -> Verdict:  # noqa: ARG002
        """Return the wait for the verdict; it is made whether or not the client waits for it."""
        answer = str(self._outcome)
        if prepared is not None:
            (result,) = tensors.values()
            answer = hashlib.sha256(result.view[: tensor_bytes(prepared.op.output)]).hexdigest()
        verdict, closing = submit(self._case, answer, lambda: self._judge(prepared, tensors)), self.service.closing
        closing.add(verdict)
        verdict.add_done_callback(closing.discard)
        return Verdict(self.context, verdict)

    def _judge(self, prepared: Prepared | None, tensors: Mapping[str, Memory]) -> Judging:
        """Begin to judge; the tensors are owned at once, since those of the request are freed with it."""
        if prepared is None:
            return self._noted()
        lease = self.service.lease(self.context)
        segments = cast("Mapping[str, Segment]", {**tensors, **self._case.inputs})
        owned = {name: lease.share(segment) for name, segment in segments.items()}
        return self._judged(prepared, owned, lease)

    async def _noted(self) -> dict[str, Any]:
        return self._case.note(str(self._outcome))

    async def _judged(self, prepared: Prepared, owned: Mapping[str, Memory], lease: Lease) -> dict[str, Any]:
        result = next(iter(owned.values())).view[: tensor_bytes(prepared.op.output)]
        with lease:
            async with Verification(self.service, prepared, owned, lease) as verification:
                await finish(verification)
                return self._case.judge(verification.result().document, result)


class Verdict(Work):
    """The wait for a verdict, which is made whether or not anybody waits for it."""

    streams = "nothing"

    def __init__(self, context: RequestContext, verdict: asyncio.Future[dict[str, Any]]) -> None:
        self.context = context
        self._verdict = verdict

    async def events(self, *, each: bool = True) -> AsyncGenerator[Event, None]:  # noqa: ARG002
        """Wait for the verdict; raises what judging raised."""
        await asyncio.shield(self._verdict)
        return
        yield

    def result(self) -> Result:
        """Return the report."""
        return Result(self._verdict.result())
