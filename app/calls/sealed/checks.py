"""Sealed checks: the service draws the cases, judges the results, and signs a document with the outcomes.

Each case is drawn from 128 random bits of its own, so none can be derived from another. A check belongs to the key, or
without keys to the address, that began it. It holds the inputs of one case at
a time, until that is answered or its time is over.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Self

import numpy as np

from app.calls.sealed.signing import Signer
from app.pool.buffers import Segment, SegmentPool
from app.settings import Settings
from app.telemetry.context import RequestContext
from convgrad import __version__
from convgrad._check.cases import Array, Case, draw
from convgrad._check.problems import Takes
from convgrad._dtypes import dtype
from convgrad._errors import Forbidden, InvalidParams, NotFound, Overloaded, RateLimited
from schemas.broken_rules import BrokenRule, broken_rule, invalid_params, number, safe_key
from schemas.tables import find_operation, operation_names
from schemas.tensors import TensorSpec

__all__ = ["OUTCOMES", "Judging", "SealedCase", "SealedCheck", "SealedChecks", "is_check_id", "refused"]

FORMAT = "convgrad-sealed-check/2"
"""The format of the signed document."""

Judging = Coroutine[Any, Any, dict[str, Any]]
"""Judges an answer, sets the status of its case, and returns the reply."""

OUTCOMES = ("unsupported", "failed")
"""What a caller may report for a case instead of a result."""

_CASES = 50
_MOST_CHECKS = 256
"""Open checks of all owners; as many finished ones are kept."""
_LABEL = re.compile(r"[ -~]{0,200}")
_ID = re.compile(r"[0-9a-f]{32}")
_RETRY_AFTER_S = 5
_CANONICAL: dict[object, str] = {name: find_operation(name).operation.name for name in operation_names()}


def refused(member: str, message: str, kind: str) -> InvalidParams:
    """Return the error for a request that a check refuses; `kind` is its stable name."""
    return invalid_params("check", [broken_rule([member], message, kind)])


@dataclass(eq=False)
class SealedCase:
    """A case that was drawn: its outcome, and its inputs until it is answered or late.

    `status` is `open`, `judging`, `passed`, `failed`, `unsupported`, `late` or `unanswered`.
    """

    case: Case
    until: float
    inputs: dict[str, Segment] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    as_seed: bool = False
    status: str = "open"
    answer: str | None = None
    """The outcome or SHA-256 of the result that was submitted first. No other is taken, even if judging fails."""
    verdict: asyncio.Future[dict[str, Any]] | None = None
    """The reply to the answer, until the next case is drawn: a lost reply can be sent again."""
    varied: bool = False
    """Whether the elements of the result differ, so that no constant equals it."""

    @property
    def number(self) -> int:
        """Its number in the check, from 0 on."""
        return self.case.number

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Name, dtype and shape of each input."""
        problem = self.case.problem
        return {name: TensorSpec(name, problem.dtype, shape) for name, shape in problem.input_shapes.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs that are in memory."""
        return sum(segment.size for segment in self.inputs.values())

    def require_answerable(self) -> None:
        """Raise `InvalidParams` if the case takes no answer, nor the same one again."""
        self.expire()
        if self.status == "late":
            raise refused("case", f"the time for case {self.number} is over", "late")
        if self.status != "open" and self.verdict is None:
            raise self._answered()

    def submit(self, answer: str, judge: Callable[[], Judging]) -> asyncio.Future[dict[str, Any]]:
        """Return the verdict on an answer, judged now or before; raises `InvalidParams` after another answer."""
        self.require_answerable()
        if self.answer not in (None, answer):
            raise self._answered()
        if self.verdict is None:
            self.verdict = asyncio.ensure_future(self._judged(judge()))
            self.answer, self.status = answer, "judging"
            self.verdict.add_done_callback(lambda verdict: verdict.cancelled() or verdict.exception())
        return self.verdict

    async def _judged(self, judging: Judging) -> dict[str, Any]:
        try:
            return await judging
        finally:
            if self.status == "judging":  # it could not be judged
                self.status, self.verdict = "open", None
                self.expire()

    def _answered(self) -> InvalidParams:
        return refused("case", f"case {self.number} has been answered", "answered")

    def expire(self) -> None:
        """Mark the case late and free its inputs if the time for an answer is over."""
        if time.monotonic() >= self.until:
            self.end("late")

    def end(self, status: str) -> None:
        """Set the final status of a case without an answer."""
        if self.status == "open":
            self.close(status)

    def close(self, status: str) -> None:
        """Set the final status, and free the inputs."""
        self.status = status
        if self.timer is not None:
            self.timer.cancel()
        while self.inputs:
            self.inputs.popitem()[1].release()

    def judge(self, passed: bool, result: memoryview) -> None:
        """Note the verdict on a result."""
        elements = np.frombuffer(result, dtype(self.case.problem.dtype).numpy).astype(np.float64)
        finite = elements[np.isfinite(elements)]
        self.varied = bool((finite[1:] != finite[:1]).any())
        self.close("passed" if passed else "failed")

    def as_entry(self) -> dict[str, Any]:
        """Return its entry in the signed document."""
        case = self.case
        entry: dict[str, Any] = {
            "case": case.number, "status": self.status, "op": case.problem.op, "dtype": case.problem.dtype,
            "kind": case.kind, "name": case.name, "sent": "seed" if self.as_seed else "tensors",
            "seed": f"{case.seed:032x}",
        }  # fmt: skip
        return entry | ({} if self.answer in (None, *OUTCOMES) else {"result_sha256": self.answer})


@dataclass(eq=False)
class SealedCheck:
    """A check: its owner, what the kernel takes, the number of cases requested, and the cases drawn so far."""

    owner: str
    key: str
    takes: Takes
    asked: int
    label: str
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    begun: str = field(default_factory=lambda: _now())
    cases: list[SealedCase] = field(default_factory=list)
    document: dict[str, Any] | None = None
    """The signed document, once it is finished."""
    timer: asyncio.TimerHandle | None = None

    def case(self, number: object) -> SealedCase:
        """Return a case by its number; raises `InvalidParams` if it was not given."""
        self.require_unfinished()
        if type(number) is not int or not 0 <= number < len(self.cases):
            given = f"cases 0 to {len(self.cases) - 1} have been given" if self.cases else "none has been given yet"
            raise refused("case", f"case must be the number of a case that has been given: {given}", "not_given")
        return self.cases[number]

    def current(self) -> SealedCase | None:
        """Return the case that is to be answered; raises `InvalidParams` while its answer is being judged."""
        self.require_unfinished()
        for last in self.cases[-1:]:
            last.expire()
            if last.status == "judging":
                raise refused("check", f"the result of case {last.number} is being judged", "judging")
            return last if last.status == "open" else None
        return None

    async def settled(self) -> Self:
        """Wait until no answer is being judged; return the check."""
        if judging := [case.verdict for case in self.cases[-1:] if case.verdict is not None]:
            await asyncio.wait(judging)
        return self

    def require_unfinished(self) -> None:
        """Raise `InvalidParams` once the check is finished."""
        if self.document is not None:
            raise refused("check", "the check is finished", "finished")

    def summary(self) -> dict[str, Any]:
        """Return the document to be signed. It has no floats, which other languages would format differently."""
        counted = Counter(case.status for case in self.cases)
        verdict = self._verdict(counted)
        return {
            "format": FORMAT, "version": __version__, "check": self.id, "label": self.label, "key": self.key,
            "begun": self.begun, "finished": _now(), "takes": self.takes.as_json(), "asked": self.asked,
            "verdict": verdict, "passed": verdict == "passed",
            "counts": {"not_given": self.asked - len(self.cases), **counted},
            "cases": [case.as_entry() for case in self.cases],
        }  # fmt: skip

    def _verdict(self, counted: Counter[str]) -> str:
        if counted.keys() - {"passed", "unsupported"}:
            return "failed"
        varied = any(case.varied for case in self.cases if case.status == "passed")
        return "passed" if varied and counted["passed"] == self.asked else "incomplete"


class SealedChecks:
    """The open checks, and finished ones, whose documents can be requested again."""

    def __init__(self, settings: Settings, segments: SegmentPool) -> None:
        self._settings = settings
        self._segments = segments
        self._checks: dict[str, SealedCheck] = {}
        """By id: the open ones, and finished ones in the order in which they were finished."""
        self._drawing = asyncio.Lock()
        key = settings.sealed_key
        self.signer = Signer(None if key is None else key.get_secret_value())

    def begin(self, context: RequestContext, given: Mapping[str, Any]) -> SealedCheck:
        """Begin a check; raises `InvalidParams`, and `RateLimited` or `Overloaded` when there are too many."""
        settings, owner = self._settings, context.tenant
        takes, asked, label = _read(given, settings.sealed_cases)
        data = {"reason": "checks", "limit": settings.sealed_checks}
        unfinished = [check for check in self._checks.values() if check.document is None]
        if sum(check.owner == owner for check in unfinished) >= settings.sealed_checks:
            message = f"this key or address may have {settings.sealed_checks} open checks: finish or delete one"
            raise RateLimited(message, retry_after=_RETRY_AFTER_S, data=data)
        if len(unfinished) >= _MOST_CHECKS:
            message = f"{_MOST_CHECKS} checks are open, as many as the service keeps"
            raise Overloaded(message, retry_after=_RETRY_AFTER_S, data=data | {"limit": _MOST_CHECKS})
        check = SealedCheck(owner, context.key, takes, asked, label)
        check.timer = asyncio.get_running_loop().call_later(settings.sealed_check_s, self.drop, check)
        self._checks[check.id] = check
        return check

    def find(self, context: RequestContext, name: object) -> SealedCheck:
        """Return a check by its id; raises `NotFound`, and `Forbidden` for that of another key or address."""
        check = self._checks.get(name) if isinstance(name, str) else None
        if check is None:
            raise _unknown()
        if check.owner != context.tenant:
            raise Forbidden("another key or address began this check", data={"reason": "other_key"})
        return check

    async def next(self, check: SealedCheck) -> SealedCase | None:
        """Return the case that is to be answered, drawn now unless the last one is still open; None after the last.

        Raises `InvalidParams`, `RateLimited` and what `SegmentPool.acquire` raises.
        """
        async with self._drawing:
            current = check.current()
            if current is not None or len(check.cases) == check.asked:
                return current
            case, inputs = await asyncio.to_thread(_drawn, len(check.cases), check.takes)
            drawn = SealedCase(case, time.monotonic() + self._settings.sealed_case_s)
            try:
                await self._keep(drawn, inputs, check.owner)
                if check.id not in self._checks:
                    raise _unknown()
                check.require_unfinished()
            except BaseException:
                drawn.close("late")
                raise
            for last in check.cases[-1:]:
                last.verdict = None
            check.cases.append(drawn)
            drawn.timer = asyncio.get_running_loop().call_later(self._settings.sealed_case_s, drawn.end, "late")
            return drawn

    async def _keep(self, drawn: SealedCase, inputs: Mapping[str, Array], owner: str) -> None:
        """Copy the inputs to shared memory."""
        held = sum(case.nbytes for check in self._of(owner) for case in check.cases[-1:])
        needed, limit = held + sum(array.nbytes for array in inputs.values()), int(self._settings.sealed_memory)
        if needed > limit:
            message = f"the open cases of this key or address need {needed} bytes, but may have {limit}"
            data = {"reason": "check_memory", "limit": limit, "value": needed}
            raise RateLimited(message, retry_after=_RETRY_AFTER_S, data=data)
        for name, array in inputs.items():
            segment = await self._segments.acquire_async(max(1, array.nbytes), owner)
            drawn.inputs[name] = segment
            segment.view[: array.nbytes] = array.tobytes()

    def finish(self, check: SealedCheck) -> dict[str, Any]:
        """Return the signed document; the check takes no more answers."""
        if check.document is None:
            current = check.current()
            if current is not None:
                current.close("unanswered")
            check.document = self.signer.signed(check.summary())
            check.cases.clear()
            self._checks[check.id] = self._checks.pop(check.id)
            finished = [each for each in self._checks.values() if each.document is not None]
            mine = [each for each in finished if each.owner == check.owner]
            for oldest in (*mine[: -self._settings.sealed_checks], *finished[:-_MOST_CHECKS]):
                self.drop(oldest)
        return check.document

    def drop(self, check: SealedCheck) -> None:
        """Forget a check and free its memory."""
        self._checks.pop(check.id, None)
        if check.timer is not None:
            check.timer.cancel()
        for case in check.cases[-1:]:
            case.end("unanswered")

    def _of(self, owner: str) -> Iterator[SealedCheck]:
        return (check for check in self._checks.values() if check.owner == owner)


def is_check_id(name: object) -> bool:
    """Whether this may have been the id of a check."""
    return isinstance(name, str) and _ID.fullmatch(name) is not None


def _drawn(number: int, takes: Takes) -> tuple[Case, dict[str, Array]]:
    case = draw(secrets.randbits(128), number, takes)
    return case, case.inputs()


def _unknown() -> NotFound:
    message = "there is no such check: it was never begun, was deleted, or its time is over"
    return NotFound(message, data={"reason": "unknown_check"})


def _read(given: Mapping[str, Any], most: int) -> tuple[Takes, int, str]:
    """Read the parameters of a new check: what the kernel takes, the number of cases, a label."""
    broken: list[BrokenRule] = []
    takes = _takes(given.get("takes"), broken)
    asked, label = given.get("cases"), given.get("label")
    asked = min(_CASES, most) if asked is None else asked
    if type(asked) is not int or not 1 <= asked <= most:
        but = f", but is {number(asked)}" if type(asked) is int else ""
        broken.append(broken_rule(["cases"], f"cases must be an integer from 1 to {most}{but}", "value"))
    label = "" if label is None else label
    if not isinstance(label, str) or not _LABEL.fullmatch(label):
        broken.append(broken_rule(["label"], "label must be at most 200 characters of printable ASCII", "value"))
    if broken or takes is None:
        raise invalid_params("check", broken)
    return takes, asked, label


def _takes(given: object, broken: list[BrokenRule]) -> Takes | None:
    """Read what the kernel takes; `Takes` has the rules for values, and its messages don't echo them."""
    if not isinstance(given, Mapping | None):
        broken.append(broken_rule(["takes"], "takes must be an object", "object_type"))
        return None
    found = dict(given or {})
    known = {each.name: isinstance(each.default, bool) for each in fields(Takes)}
    for name, value in found.items():
        listed = isinstance(value, list) and all(type(each) in (str, int) for each in value)
        rule = None
        if name not in known:
            rule = f"takes has no such member; its members are {', '.join(known)}"
        elif known[name] and not isinstance(value, bool):
            rule = f"takes.{name} must be true or false"
        elif not known[name] and not listed:
            rule = f"takes.{name} must be a list of strings or integers"
        if rule:
            broken.append(broken_rule(["takes", safe_key(name)], rule, "value"))
        elif name == "ops":
            found[name] = list(dict.fromkeys(_CANONICAL.get(each, each) for each in value))
    try:
        return None if broken else Takes.from_json(found)
    except ValueError as error:
        broken.append(broken_rule(["takes"], str(error), "value"))
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
