"""The tasks of sealed checks: begin one, give its next case, judge a result, finish it, verify its signature.

A submitted result is verified like any other one; the service has the inputs already.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, cast

from app.calls.outputs import HeldTensor
from app.calls.sealed.checks import Judging, settled, submit
from app.calls.service import Service
from app.calls.tasks import Immediate, Task
from app.calls.verifying import Verification, prepare_verification
from app.calls.work import Answered, Event, Result, Work, finish
from app.intake.lease import Lease
from app.intake.requests import RequestObject
from app.intake.tensors import Tensor
from app.pool.buffers import Memory, Segment
from app.telemetry.context import current_context
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

__all__ = ["CheckTask", "Submit"]

Place = Callable[[Any], Any]
"""Adds the path's parameters to the body."""

_SENT = ("tensors", "seed")


class CheckTask(Immediate):
    """Answer one of the `CHECK_METHODS`, all but `check.submit`."""

    def __init__(self, service: Service, method: str, place: Place = lambda body: body) -> None:
        super().__init__(service)
        self._method = method
        self._place = place
        self._given: Mapping[str, Any] = {}

    async def read(self, document: Any) -> RequestObject:
        """Read the params."""
        self._given = _params(self._place(document), self._method)
        return RequestObject("check", InputRows(), {}, {}, None)

    async def answer(self, request: RequestObject) -> Work:  # noqa: ARG002
        """Return the answer."""
        return await _ANSWERS[self._method](self.service, self._given)


class Submit(Task):
    """Judge the result of the case that is open, or note that the kernel has none."""

    def __init__(self, service: Service, place: Place = lambda body: body) -> None:
        super().__init__(service)
        self._place = place
        # Known once the params are.
        self._case: SealedCase
        self._outcome: str | None

    async def read(self, document: Any) -> RequestObject:
        """Read the params; raises `InvalidParams` for a case that takes no answer."""
        given = _params(self._place(document), "check.submit")
        self._case = _found(self.service, given).case(given["case"])
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
        return await prepare_verification(self.service, whole)

    def open(self, prepared: Prepared | None, tensors: Mapping[str, Memory], lease: Lease) -> Verdict:  # noqa: ARG002
        """Return the wait for the verdict; it is made whether or not the client waits for it."""
        answer = str(self._outcome)
        if prepared is not None:
            (result,) = tensors.values()
            answer = hashlib.sha256(result.view[: tensor_bytes(prepared.op.output)]).hexdigest()
        verdict, closing = submit(self._case, answer, lambda: self._judge(prepared, tensors)), self.service.closing
        closing.add(verdict)
        verdict.add_done_callback(closing.discard)
        return Verdict(verdict)

    def _judge(self, prepared: Prepared | None, tensors: Mapping[str, Memory]) -> Judging:
        """Begin to judge; the tensors are owned at once, since those of the request are freed with it."""
        if prepared is None:
            return self._noted()
        lease = self.service.lease()
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
    output_bytes = 0

    def __init__(self, verdict: asyncio.Future[dict[str, Any]]) -> None:
        self._verdict = verdict

    async def events(self, *, each: bool = True) -> AsyncGenerator[Event, None]:  # noqa: ARG002
        """Wait for the verdict; raises what judging raised."""
        await asyncio.shield(self._verdict)
        return
        yield

    def result(self) -> Result:
        """Return the report."""
        return Result(self._verdict.result())


async def _begin(service: Service, given: Mapping[str, Any]) -> Work:
    checks, context = service.sealed_checks, current_context()
    check = checks.begin(given, context.tenant, context.key)
    limits = {"case_s": checks.limits.case_s, "check_s": checks.limits.check_s, "key_id": checks.signer.key_id}
    return Answered(Result({"check": check.id, "cases": check.asked, **limits}))


async def _next(service: Service, given: Mapping[str, Any]) -> Work:
    sent, encoding = choice(given, "send", _SENT), choice(given, "encoding", ENCODINGS)
    check = await settled(_found(service, given))
    case = await service.sealed_checks.next(check)
    document = check.describe(case)
    if case is None:
        return Answered(Result(document))
    if sent == "seed":
        case.as_seed = True
        return Answered(Result({**document, "generate": case.case.as_json()}, member="inputs"))
    asked = case.case.problem
    check_encoding(Options(encoding), asked.input_shapes.items())
    inputs = [
        HeldTensor(name, TensorSpec(name, asked.dtype, shape), case.inputs[name].share())
        for name, shape in asked.input_shapes.items()
    ]
    return Answered(Result(document, inputs, encoding, "inputs"))


async def _finish(service: Service, given: Mapping[str, Any]) -> Work:
    return Answered(Result(service.sealed_checks.finish(await settled(_found(service, given)))))


async def _drop(service: Service, given: Mapping[str, Any]) -> Work:
    return Answered(Result(service.sealed_checks.forget(given["check"], current_context().tenant)))


async def _verify_signature(service: Service, given: Mapping[str, Any]) -> Work:
    return Answered(Result(service.sealed_checks.verify_signature(given["document"])))


def _found(service: Service, given: Mapping[str, Any]) -> SealedCheck:
    return service.sealed_checks.find(given["check"], current_context().tenant)


def _params(given: Any, method: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise invalid_params("check", [broken_rule([], "the request must be an object", "object_type")])
    names, required = tuple(CHECK_METHODS[method].params), CHECK_METHODS[method].required
    return bind_params(given, names, required=required, what="check")


_ANSWERS: dict[str, Callable[[Service, Mapping[str, Any]], Awaitable[Work]]] = {
    "check.begin": _begin,
    "check.next": _next,
    "check.finish": _finish,
    "check.drop": _drop,
    "check.verify_signature": _verify_signature,
}
