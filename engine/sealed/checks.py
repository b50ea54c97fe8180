"""The state of sealed checks: cases drawn, results judged, outcomes signed with Ed25519 (`signing.py`).

The data of each case are drawn from 128 random bits of their own, so none can be derived from others. A service
adds memory for the inputs and limits of time (`app/calls/sealed/`); self-tests judge in the caller's process
(`selftest.py`).
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from convgrad import __version__
from convgrad._arithmetic import fitting, meaningless
from convgrad._check.cases import Case, draw
from convgrad._check.problems import Takes
from convgrad._dtypes import dtype
from convgrad._errors import Forbidden, InvalidParams, NotFound, Overloaded, RateLimited
from engine.sealed.signing import Signer
from schemas.broken_rules import BrokenRule, broken_rule, invalid_params, number, safe_key
from schemas.rows import InputRows
from schemas.tables import find_operation, operation_names

__all__ = ["RETRY_AFTER_S", "SealedCase", "SealedCheck", "SealedChecks", "choice"]

V = TypeVar("V")

FORMAT = "convgrad-sealed-check/4"
"""The format of the signed document."""

_OUTCOMES = ("unsupported", "failed")
"""What a caller may report for a case instead of a result."""

_CASES, _MOST_CASES = 50, 200
# Every fourth case repeats the problem of an earlier one.
_REPEATED = 4
_MOST_CHECKS = 256
"""Open checks of all owners; as many finished ones are kept."""
_LABEL = re.compile(r"[ -~]{0,200}")
_DIGEST = re.compile(r"(sha256:[0-9a-f]{64})?")
_ID = re.compile(r"[0-9a-f]{32}")
RETRY_AFTER_S = 5
_CANONICAL: dict[object, str] = {name: find_operation(name).operation.name for name in operation_names()}


@dataclass(eq=False)
class SealedCase:
    """A case that was drawn, of the check with this id, and its outcome.

    `status` is `open`, `judging`, `passed`, `failed`, `unsupported`, `late` or `unanswered`.
    """

    check: str
    case: Case
    arithmetic: Mapping[str, Any] = field(default_factory=dict)
    """What the kernel declares that means something for the case."""
    repeats: int | None = None
    """The earlier case whose problem it has, with other data."""
    until: float = math.inf
    inputs: dict[str, Any] = field(default_factory=dict)
    """The memory that holds the inputs until the case is closed, if any does."""
    closing: ExitStack = field(default_factory=ExitStack)
    """Frees what the case holds."""
    as_seed: bool = False
    status: str = "open"
    answer: str | None = None
    """The outcome or SHA-256 of the result that was submitted first. No other is taken, even if judging fails."""
    verdict: Any = None
    """What `submit` returned, until the next case is drawn: a lost reply can be sent again."""
    varied: bool = False
    """Whether the elements of the result differ, so that no constant equals it."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of the verification of its result."""
        return {"fast": False, **({"arithmetic": self.arithmetic} if self.arithmetic else {})}

    @property
    def number(self) -> int:
        """Its number in the check, from 0 on."""
        return self.case.number

    def require_answerable(self) -> None:
        """Raise `InvalidParams` if the case takes no answer, nor the same one again."""
        self.expire()
        if self.status == "late":
            raise _refused("case", f"the time for case {self.number} is over", "late")
        if self.status != "open" and self.verdict is None:
            raise self._answered()

    def read_answer(self, given: Mapping[str, Any]) -> tuple[str | None, InputRows, Mapping[str, Any]]:
        """Return the outcome in a submission, the rows of the inputs it may have, and those it has.

        Raises `InvalidParams` for another outcome, and for inputs that are not the result.
        """
        outcome, inputs = choice(given, "outcome", (None, *_OUTCOMES)), given.get("inputs") or {}
        if not isinstance(inputs, Mapping):
            raise _refused("inputs", "inputs must be an object", "object_type")
        row = find_operation(self.case.problem.op).operation.output
        rows = InputRows(inputs=() if outcome else (row,))
        if inputs.keys() == {"result"} and not outcome:
            return outcome, rows, {row.name: inputs["result"]}
        for name in inputs.keys() - rows.input_spellings:
            rule = f"the only input is {row.name}: send it or an outcome, not both"
            raise invalid_params("check", [broken_rule(["inputs", safe_key(name)], rule, "unknown_input")])
        return outcome, rows, inputs

    def submit(self, answer: str, judge: Callable[[], V]) -> V:
        """Return the verdict on an answer, judged now or before; raises `InvalidParams` after another answer.

        `judge` closes the case by `note` or `judge`; one that returns a future closes it later, or reopens it.
        """
        self.require_answerable()
        if self.answer not in (None, answer):
            raise self._answered()
        if self.verdict is None:
            self.answer, self.status = answer, "judging"
            try:
                self.verdict = judge()
            except BaseException:
                self.reopen()
                raise
        verdict: V = self.verdict
        return verdict

    def reopen(self) -> None:
        """Take the same answer again if it could not be judged."""
        if self.status == "judging":
            self.status, self.verdict = "open", None
            self.expire()

    def _answered(self) -> InvalidParams:
        return _refused("case", f"case {self.number} has been answered", "answered")

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
        self.inputs.clear()
        self.closing.close()

    def note(self, outcome: str) -> dict[str, Any]:
        """Close the case without a result; return the reply."""
        self.close(outcome)
        return {"check": self.check, "case": self.number, "outcome": outcome}

    def judge(self, report: Mapping[str, Any], result: bytes | memoryview) -> dict[str, Any]:
        """Close the case with the report on a result; return the reply."""
        elements = np.frombuffer(result, dtype(self.case.problem.dtype).numpy).astype(np.float64)
        finite = elements[np.isfinite(elements)]
        self.varied = bool((finite[1:] != finite[:1]).any())
        self.close("passed" if report["passed"] else "failed")
        return {"check": self.check, "case": self.number, **report}

    def as_entry(self) -> dict[str, Any]:
        """Return its entry in the signed document."""
        case = self.case
        entry: dict[str, Any] = {
            "case": case.number, "status": self.status, "op": case.problem.op, "dtype": case.problem.dtype,
            "kind": case.kind, "name": case.name, "sent": "seed" if self.as_seed else "tensors",
            "seed": f"{case.seed:032x}", "arithmetic": dict(self.arithmetic),
        }  # fmt: skip
        entry |= {} if self.repeats is None else {"repeats": self.repeats}
        return entry | ({} if self.answer in (None, *_OUTCOMES) else {"result_sha256": self.answer})


@dataclass(eq=False)
class SealedCheck:
    """A check: its owner, what the kernel takes, the number of cases requested, and the cases drawn so far."""

    owner: str
    key: str
    takes: Takes
    asked: int
    label: str
    digest: str
    """SHA-256 of the kernel, as its author gives it."""
    arithmetic: Mapping[str, Any]
    """What the kernel declares of its arithmetic."""
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    begun: str = field(default_factory=lambda: _now())
    cases: list[SealedCase] = field(default_factory=list)
    document: dict[str, Any] | None = None
    """The signed document, once it is finished."""
    closing: ExitStack = field(default_factory=ExitStack)
    """Frees what the check holds."""

    def case(self, number: object) -> SealedCase:
        """Return a case by its number; raises `InvalidParams` if it was not given."""
        self.require_unfinished()
        if type(number) is not int or not 0 <= number < len(self.cases):
            given = f"cases 0 to {len(self.cases) - 1} have been given" if self.cases else "none has been given yet"
            raise _refused("case", f"case must be the number of a case that has been given: {given}", "not_given")
        return self.cases[number]

    def current(self) -> SealedCase | None:
        """Return the case that is to be answered; raises `InvalidParams` while its answer is being judged."""
        self.require_unfinished()
        for last in self.cases[-1:]:
            last.expire()
            if last.status == "judging":
                raise _refused("check", f"the result of case {last.number} is being judged", "judging")
            return last if last.status == "open" else None
        return None

    def draw(self) -> SealedCase:
        """Draw the next case; some have the problem of an earlier one and other data, so that cached results fail."""
        number, seed, repeats = len(self.cases), secrets.randbits(128), None
        right = [each for each in self.cases if each.status == "passed" and each.varied]
        if right and number % _REPEATED == _REPEATED - 1:
            earlier = secrets.choice(right)
            case, repeats = replace(earlier.case, kind="integers", seed=seed, number=number), earlier.number
        else:
            case = draw(seed, number, self.takes)
        return SealedCase(self.id, case, fitting(self.arithmetic, case.problem), repeats)

    def give(self, drawn: SealedCase) -> SealedCase:
        """Make a case that was drawn the one to be answered; raises `InvalidParams` if the check is finished."""
        self.require_unfinished()
        for last in self.cases[-1:]:
            last.verdict = None
        self.cases.append(drawn)
        return drawn

    def describe(self, case: SealedCase | None) -> dict[str, Any]:
        """Describe a case as JSON, without its inputs; None means that there are no more."""
        document = {"check": self.id, "case": None if case is None else case.number, "cases": self.asked}
        if case is None:
            return document
        asked = case.case.problem
        return document | {
            "op": asked.op, "dtype": asked.dtype, "attributes": asked.attributes(), "problem": asked.as_json(),
            "outputs": {asked.output: {"dtype": asked.dtype, "shape": list(asked.output_shape)}},
        }  # fmt: skip

    def require_unfinished(self) -> None:
        """Raise `InvalidParams` once the check is finished."""
        if self.document is not None:
            raise _refused("check", "the check is finished", "finished")

    def summary(self) -> dict[str, Any]:
        """Return the document to be signed. It has no floats, which other languages would format differently."""
        counted = Counter(case.status for case in self.cases)
        varied = any(case.varied for case in self.cases if case.status == "passed")
        verdict = "passed" if varied and counted["passed"] == self.asked else "incomplete"
        if counted.keys() - {"passed", "unsupported"}:
            verdict = "failed"
        return {
            "format": FORMAT, "version": __version__, "check": self.id, "label": self.label, "digest": self.digest,
            "key": self.key, "begun": self.begun, "finished": _now(), "takes": self.takes.as_json(),
            "arithmetic": dict(self.arithmetic), "asked": self.asked,
            "verdict": verdict, "passed": verdict == "passed",
            "counts": {"not_given": self.asked - len(self.cases), **counted},
            "cases": [case.as_entry() for case in self.cases],
        }  # fmt: skip


class SealedChecks:
    """The open checks, and finished ones, whose documents can be requested again.

    Documents are signed with the key of `file` (`Signer`). An owner may have `checks` open checks at a time.
    """

    def __init__(self, file: Path | None = None, *, checks: int = _MOST_CHECKS) -> None:
        self.signer = Signer(file)
        self._most = checks
        self._checks: dict[str, SealedCheck] = {}
        """By id: the open ones, and finished ones in the order in which they were finished."""

    def begin(self, given: Mapping[str, Any], owner: str, key: str) -> SealedCheck:
        """Begin a check; raises `InvalidParams`, and `RateLimited` or `Overloaded` when there are too many."""
        takes, asked, label, digest, arithmetic = _read(given)
        data = {"reason": "checks", "limit": self._most}
        unfinished = [check for check in self._checks.values() if check.document is None]
        if sum(check.owner == owner for check in unfinished) >= self._most:
            message = f"this key or address may have {self._most} open checks: finish or delete one"
            raise RateLimited(message, retry_after=RETRY_AFTER_S, data=data)
        if len(unfinished) >= _MOST_CHECKS:
            message = f"{_MOST_CHECKS} checks are open, as many as the service keeps"
            raise Overloaded(message, retry_after=RETRY_AFTER_S, data=data | {"limit": _MOST_CHECKS})
        check = SealedCheck(owner, key, takes, asked, label, digest, arithmetic)
        self._checks[check.id] = check
        return check

    def find(self, name: object, owner: str) -> SealedCheck:
        """Return a check by its id; raises `NotFound`, and `Forbidden` for that of another owner."""
        check = self._checks.get(name) if isinstance(name, str) else None
        if check is None:
            message = "there is no such check: it was never begun, was deleted, or its time is over"
            raise NotFound(message, data={"reason": "unknown_check"})
        if check.owner != owner:
            raise Forbidden("another key or address began this check", data={"reason": "other_key"})
        return check

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
            for oldest in (*mine[: -self._most], *finished[:-_MOST_CHECKS]):
                self.drop(oldest)
        return check.document

    def drop(self, check: SealedCheck) -> None:
        """Forget a check and free its memory."""
        self._checks.pop(check.id, None)
        check.closing.close()
        for case in check.cases[-1:]:
            case.end("unanswered")

    def forget(self, name: object, owner: str) -> dict[str, Any]:
        """Forget a check by its id, also again; return the reply. Raises what `find` does for any other name."""
        try:
            self.drop(self.find(name, owner))
        except NotFound:  # the reply to the same request may have been lost
            if not isinstance(name, str) or not _ID.fullmatch(name):
                raise
        return {"check": name}

    def verify_signature(self, document: object) -> dict[str, Any]:
        """Return `valid`, `reason` and `key_id` for a document; raises `InvalidParams` if it is no object."""
        if not isinstance(document, Mapping):
            raise _refused("document", "document must be the object that check.finish returned", "object_type")
        return self.signer.verified(document)


def choice(given: Mapping[str, Any], name: str, choices: tuple[Any, ...]) -> Any:
    """Return a member that is one of `choices`, by default the first; raises `InvalidParams` for others."""
    value = given.get(name)
    if value is not None and value not in choices:
        raise _refused(name, f"{name} must be {' or '.join(filter(None, choices))}", "choice")
    return choices[0] if value is None else value


def _refused(member: str, message: str, kind: str) -> InvalidParams:
    """Return the error for a request that a check refuses; `kind` is its stable name."""
    return invalid_params("check", [broken_rule([member], message, kind)])


def _read(given: Mapping[str, Any]) -> tuple[Takes, int, str, str, dict[str, Any]]:
    """Read the parameters of a new check: takes, number of cases, label, digest, declared arithmetic."""
    broken: list[BrokenRule] = []
    takes = _takes(given.get("takes"), broken)
    asked, label = given.get("cases"), given.get("label")
    asked = _CASES if asked is None else asked
    if type(asked) is not int or not 1 <= asked <= _MOST_CASES:
        but = f", but is {number(asked)}" if type(asked) is int else ""
        broken.append(broken_rule(["cases"], f"cases must be an integer from 1 to {_MOST_CASES}{but}", "value"))
    label = "" if label is None else label
    if not isinstance(label, str) or not _LABEL.fullmatch(label):
        broken.append(broken_rule(["label"], "label must be at most 200 characters of printable ASCII", "value"))
    digest = "" if given.get("digest") is None else given["digest"]
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        broken.append(broken_rule(["digest"], "digest must be sha256: and 64 hexadecimal digits", "value"))
    arithmetic = _arithmetic(given.get("arithmetic"), takes, broken)
    if broken or takes is None:
        raise invalid_params("check", broken)
    return takes, asked, label, digest, arithmetic


def _arithmetic(given: object, takes: Takes | None, broken: list[BrokenRule]) -> dict[str, Any]:
    """Read what the kernel declares; refuse what means nothing for any operation and dtype that it takes."""
    if not isinstance(given, Mapping | None):
        broken.append(broken_rule(["arithmetic"], "arithmetic must be an object", "object_type"))
        return {}
    found = {str(name): value for name, value in (given or {}).items() if value is not None}
    for name, rule, kind in meaningless(found, takes.ops, takes.dtypes) if takes is not None else ():
        broken.append(broken_rule(["arithmetic", safe_key(name)], f"{safe_key(name)} {rule}", kind))
    return found


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
