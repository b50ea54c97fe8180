"""The tasks of sealed checks: begin one, give its next case, judge a result, finish it, verify its signature.

A submitted result is verified like any other one; the service has the inputs already.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

from app.calls.outputs import HeldTensor
from app.calls.sealed.checks import OUTCOMES, SealedCase, SealedCheck, is_check_id, refused
from app.calls.service import Service
from app.calls.tasks import Immediate, Task
from app.calls.verifying import Verification, prepare_verification
from app.calls.work import Answered, Result, Work
from app.intake.lease import Lease
from app.intake.requests import RequestObject, check_begun_inputs
from app.intake.tensors import Tensor
from app.pool.buffers import Segment
from app.telemetry.context import current_context
from convgrad._dtypes import dtype
from convgrad._errors import NotFound
from engine.options import ENCODINGS, Options, check_encoding
from engine.planning import Prepared, tensor_bytes
from schemas.broken_rules import broken_rule, invalid_params, safe_key
from schemas.checks import CHECK_METHODS
from schemas.rows import InputRows
from schemas.rpc import bind_params
from schemas.tables import find_operation

__all__ = ["CheckTask", "Submit"]

Place = Callable[[Any], Any]
"""Adds the path's parameters to the body."""

_SENT = ("tensors", "seed")
_LOOP_TURNS_TO_WAIT = 16


class CheckTask(Immediate):
    """Answer one of the `CHECK_METHODS`, all but `check.submit`."""

    def __init__(self, service: Service, method: str, place: Place = lambda body: body) -> None:
        super().__init__(service)
        self._method = method
        self._place = place
        self._given: Mapping[str, Any] = {}

    async def check_begun(self, document: Mapping[str, Any]) -> None:
        """Check nothing early: the request is small."""

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
        self._check: SealedCheck
        self._case: SealedCase
        self._outcome: str | None

    async def check_begun(self, document: Mapping[str, Any]) -> None:
        """Check what has arrived, and the case as soon as it is known."""
        given = self._place(document)
        if {"check", "case"} <= given.keys():
            self._find(given)
        check_begun_inputs(document.get("inputs"), int(self.service.settings.memory_budget))

    async def read(self, document: Any) -> RequestObject:
        """Read the params; raises `InvalidParams` for a case that takes no answer."""
        given = _params(self._place(document), "check.submit")
        self._find(given)
        self._outcome, inputs = _choice(given, "outcome", (None, *OUTCOMES)), given.get("inputs") or {}
        if not isinstance(inputs, Mapping):
            raise refused("inputs", "inputs must be an object", "object_type")
        row = find_operation(self._case.case.problem.op).operation.output
        rows = InputRows(inputs=() if self._outcome else (row,))
        for name in inputs.keys() - rows.input_spellings:
            rule = f"the only input is {row.name}: send it or an outcome, not both"
            raise invalid_params("check", [broken_rule(["inputs", safe_key(name)], rule, "unknown_input")])
        return RequestObject("check", rows, {}, inputs, None)

    def _find(self, given: Mapping[str, Any]) -> None:
        self._check = self.service.sealed_checks.find(current_context(), given["check"])
        self._case = self._check.case(given["case"])
        if not self._case.replies:  # else this may be the same answer again
            self._case.require_open()

    async def prepare(self, request: RequestObject, *, complete: bool) -> Prepared | None:
        """Check and plan the verification."""
        # The reply may have been sent before its task has ended.
        for _ in range(0 if self._case.sent else _LOOP_TURNS_TO_WAIT):
            await asyncio.sleep(0)
        self._case.require_sent()
        if self._outcome is not None or not (complete or request.inputs):
            return None
        asked = self._case.case.problem
        called = find_operation(asked.op)
        own = {name: Tensor(dtype(spec.dtype), spec.shape) for name, spec in self._case.specs.items()}
        inputs, options = {**request.inputs, **own}, {"fast": False}
        whole = RequestObject(called.called_as, called.operation, asked.attributes(), inputs, options)
        return await prepare_verification(self.service, whole)

    def open(self, prepared: Prepared | None, tensors: Mapping[str, Segment], lease: Lease) -> Work:
        """Return the verification, or the earlier reply if this answer was given before."""
        if (reply := self._replied(prepared, tensors)) is not None:
            return Answered(Result(reply))
        self._case.require_open()
        if prepared is None:
            answer = str(self._outcome)
            self._case.close(answer)
            self._case.replies[answer] = {"check": self._check.id, "case": self._case.number, "outcome": answer}
            return Answered(Result(self._case.replies[answer]))
        inputs = {name: lease.share(segment) for name, segment in self._case.inputs.items()}
        call = self.service, prepared, {**tensors, **inputs}, lease
        return Judgement(*call, check=self._check, case=self._case, given=next(iter(tensors.values())))

    def _replied(self, prepared: Prepared | None, tensors: Mapping[str, Segment]) -> dict[str, Any] | None:
        """Return the reply to an answer that was given before; its sender repeats it if the reply was lost."""
        replies, answers = self._case.replies, [str(self._outcome)]
        if replies and prepared is not None:
            size = tensor_bytes(prepared.op.output)
            answers = [hashlib.sha256(segment.view[:size]).hexdigest() for segment in tensors.values()]
        return next((replies[answer] for answer in answers if answer in replies), None)


class Judgement(Verification):
    """A verification that records its verdict in the check; if it fails, the case takes another answer."""

    def __init__(self, *call: Any, check: SealedCheck, case: SealedCase, given: Segment) -> None:
        super().__init__(*call)
        self.check, self.case, self.given = check, case, given
        self._reply: Result

    async def __aenter__(self) -> Self:
        """Queue the verification; raises `InvalidParams` if another one has begun."""
        self.case.require_open()
        self.case.status = "judging"
        try:
            return await super().__aenter__()
        except BaseException:
            self.case.reopen()
            raise

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.case.reopen()
        await super().__aexit__(kind, error, trace)

    def _ended(self, start: float) -> None:
        super()._ended(start)
        size = tensor_bytes(self.prepared.op.output)
        reply = {"check": self.check.id, "case": self.case.number, **super().result().document}
        self.case.judge(reply, self.given.view[:size])
        self._reply = Result(reply)

    def result(self) -> Result:
        """Return the report."""
        return self._reply


class _SentCase(Answered):
    """The reply with a case; marks the case as sent once the whole reply has been sent."""

    def __init__(self, case: SealedCase, result: Result) -> None:
        super().__init__(result)
        self._case = case

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._case.sent = self._case.sent or error is None


async def _begin(service: Service, given: Mapping[str, Any]) -> Work:
    checks, settings = service.sealed_checks, service.settings
    check = checks.begin(current_context(), given)
    limits = {"case_s": settings.check_case_s, "check_s": settings.check_s, "key_id": checks.signer.key_id}
    return Answered(Result({"check": check.id, "cases": check.asked, **limits}))


async def _next(service: Service, given: Mapping[str, Any]) -> Work:
    sent, encoding = _choice(given, "send", _SENT), _choice(given, "encoding", ENCODINGS)
    check = _found(service, given)
    case = await service.sealed_checks.next(check)
    if case is None:
        return Answered(Result({"check": check.id, "case": None, "cases": check.asked}))
    asked = case.case.problem
    document = {
        "check": check.id, "case": case.number, "cases": check.asked, "op": asked.op, "dtype": asked.dtype,
        "attributes": asked.attributes(), "problem": asked.as_json(),
        "outputs": {asked.output: {"dtype": asked.dtype, "shape": list(asked.output_shape)}},
    }  # fmt: skip
    if sent == "seed":
        case.as_seed = True
        return _SentCase(case, Result({**document, "generate": case.case.as_json()}, member="inputs"))
    check_encoding(Options(encoding), [(name, spec.shape) for name, spec in case.specs.items()])
    inputs = [HeldTensor(name, spec, case.inputs[name].share()) for name, spec in case.specs.items()]
    return _SentCase(case, Result(document, inputs, encoding, "inputs"))


async def _finish(service: Service, given: Mapping[str, Any]) -> Work:
    return Answered(Result(service.sealed_checks.finish(_found(service, given))))


async def _drop(service: Service, given: Mapping[str, Any]) -> Work:
    try:
        service.sealed_checks.drop(_found(service, given))
    except NotFound:  # the reply to the same request may have been lost
        if not is_check_id(given["check"]):
            raise
    return Answered(Result({"check": given["check"]}))


async def _verify_signature(service: Service, given: Mapping[str, Any]) -> Work:
    document = given["document"]
    if not isinstance(document, Mapping):
        raise refused("document", "document must be the object that check.finish returned", "object_type")
    return Answered(Result(service.sealed_checks.signer.verified(document)))


def _choice(given: Mapping[str, Any], name: str, choices: tuple[Any, ...]) -> Any:
    """Return a member that must be one of `choices`, by default the first."""
    value = given.get(name)
    if value is not None and value not in choices:
        raise refused(name, f"{name} must be {' or '.join(filter(None, choices))}", "choice")
    return choices[0] if value is None else value


def _found(service: Service, given: Mapping[str, Any]) -> SealedCheck:
    return service.sealed_checks.find(current_context(), given["check"])


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
