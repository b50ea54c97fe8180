"""A whole check: cases are drawn, tried and judged until the time is over, and faults are shrunk."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from typing import Any

from convgrad._check import suites
from convgrad._check.benchdnn import fitting
from convgrad._check.cases import EXACT, KINDS, SOURCES, Case, draw
from convgrad._check.evidence import cause, ordinary, telling
from convgrad._check.examine import NO_DIGIT, Fault, Tried, examine, fault_of, shows
from convgrad._check.issues import ISSUE_KINDS, ISSUES, replayed
from convgrad._check.judge import Judge
from convgrad._check.large import LARGE, check_large
from convgrad._check.named import LAYERS, TRAPS
from convgrad._check.probe import flags, nearer, probed
from convgrad._check.problems import Problem, Takes
from convgrad._check.process import KernelProcess
from convgrad._check.relations import RELATIONS
from convgrad._check.reproducer import reproducer
from convgrad._check.shrink import shrunk
from convgrad._errors import CallerError
from convgrad._report import Report

__all__ = ["Choice", "check", "chosen", "of_shapes", "of_suite"]

_AHEAD = 8
"""Cases by which the kernel may be ahead of the judge."""

_JUDGES = 4
_SHRUNK = 16
"""Faults that are shrunk: each may take some seconds."""

_SHARE = 0.15
"""Share of the whole time that shrinking one fault may take."""

_HANGS_S = 2.0
"""Time limit of smaller cases of a kernel that hung: it need not be waited for as long again."""

_CALLS = ("repeat", "alignment", "memory")


@dataclass(frozen=True)
class Choice:
    """Which cases are drawn: all of them by default.

    `listed` returns problems for a kernel, and their names: they are tried with each kind of data instead. `large` are
    names of large problems to be tried instead.
    """

    sources: Sequence[str] = SOURCES
    kinds: Sequence[str] = tuple(KINDS)
    names: Sequence[str] = ()
    skip: Sequence[str] = ()
    numbers: Sequence[int] = ()
    listed: Callable[[Takes], Sequence[tuple[str, Problem]]] | None = None
    large: Sequence[str] = ()


def chosen(only: Sequence[str], skip: Sequence[str]) -> Choice:
    """Return what `--only` and `--skip` choose: kinds of data, sources, traps, layers or issues, numbers of cases.

    Traps, layers and issues may be named by any part of their name. Raises `ValueError` for a word that means nothing.
    """
    known = (*KINDS, *SOURCES)
    named: dict[str, list[str]] = {"traps": [], "issues": [], "large": []}
    for word in only:
        if not (word in known or word.isdecimal()):
            family, names = _family(word)
            named[family] += names
    for word in skip:
        if word not in (*known, *_CALLS, *RELATIONS):
            raise ValueError(f"--skip {word[:40]!r} is none of {', '.join((*known, *_CALLS, *RELATIONS))}")
    if sum(map(bool, named.values())) > 1:
        raise ValueError("--only chooses traps and layers, or issues, or large problems, not some of each")
    kinds = [kind for kind in KINDS if kind in only] or [kind for kind in KINDS if kind not in skip]
    sources = [source for source in SOURCES if source in only] or [each for each in SOURCES if each not in skip]
    if not kinds or not sources:
        raise ValueError("--skip leaves no cases")
    numbers = [int(word) for word in only if word.isdecimal()]
    choice = Choice(sources, kinds, named["traps"], skip, numbers, large=named["large"])
    if not named["issues"]:
        return choice
    few = kinds if {*kinds} & {*only} else [kind for kind in ISSUE_KINDS if kind in kinds] or kinds
    return replace(choice, kinds=few, listed=partial(replayed, names=named["issues"]))


def _family(word: str) -> tuple[str, list[str]]:
    """Return the problems that a word of `--only` names, and of which family they are."""
    families: dict[str, Iterable[str]] = {"traps": (*TRAPS, *LAYERS), "issues": ISSUES, "large": LARGE}
    if word in ("issues", "large"):
        return word, [*families[word]]
    for family, names in families.items():
        if found := [name for name in names if word.casefold() in name.casefold()]:
            return family, found
    more = "part of the name of a trap, layer or issue, or the number of a case"
    raise ValueError(f"--only {word[:40]!r} is none of {', '.join((*KINDS, *SOURCES))}, issues, large, {more}")


def of_shapes(choice: Choice, shapes: Mapping[str, Mapping[str, Any]]) -> Choice:
    """Add the problems of a file to a choice; raises `ValueError` if the choice already names other problems."""
    if choice.names or choice.listed or choice.large:
        raise ValueError("--shapes chooses the problems: --only may choose kinds of data or the number of a case")
    return replace(choice, listed=partial(fitting, shapes=shapes))


def of_suite(choice: Choice, suite: str) -> Choice:
    """Return the problems of a suite, judged result by result; raises `ValueError` if others are chosen, too."""
    if choice.names or choice.listed or choice.large:
        raise ValueError("--suite chooses the problems: it goes with neither --only nor --shapes")
    suites.problems(suite)
    listed, skip = partial(suites.listed, suite=suite), (*choice.skip, *RELATIONS)
    return replace(choice, kinds=suites.KINDS, skip=skip, listed=listed)


@dataclass
class _Check:
    """The state of a check; `data` is the report so far."""

    kernel: KernelProcess
    judge: Judge
    choice: Choice
    data: dict[str, Any]
    seconds: float
    shrinking: float
    begun: float = field(default_factory=time.monotonic)

    def record(self, tried: Tried, faults: Sequence[Fault], report: Report | None) -> None:
        """Add a case to the report."""
        case, outcome = tried.case, tried.outcome
        problem = case.problem
        status = "unsupported" if outcome.status == "unsupported" else "failed" if faults else "passed"
        entry: dict[str, Any] = {
            "number": case.number, "op": problem.op, "dtype": problem.dtype, "kind": case.kind, "name": case.name,
            "status": status, "seconds": round(outcome.seconds, 6), "macs": problem.macs,
            "faults": sorted({fault.kind for fault in faults}), "protocols": tried.relations,
        }  # fmt: skip
        if self.data["options"].get("arithmetic"):
            entry["arithmetic"] = self.judge.declared(problem)
        if report is not None and (errors := report.data.get("errors")):
            entry |= {"length": problem.sum_length, "to_naive": errors["to_naive"], "to_best": errors["to_best"]}
        self.data["cases"].append(entry)
        self.data["next"] = case.number + 1
        for fault in faults:
            self._add(fault, case)

    def _add(self, fault: Fault, case: Case) -> None:
        """Count a fault; the first of its kind and cause is shrunk, and joined with one that needs the same."""
        begun = time.monotonic() - self.begun
        faults, key = self.data["faults"], [fault.kind, case.problem.op, _cause(fault, case)]
        same = next((known for known in faults if key in known["keys"]), None)
        if same is None and self.data["shrunk"] >= _SHRUNK:
            alike = (known for known in faults if known["op"] == key[1])
            same = next((known for known in alike if _joint(known["kind"]) == _joint(fault.kind)), None)
        if same is not None:
            same["count"] += 1
            if same["kind"] == fault.kind and telling(_report(fault)) > telling(same["report"]):
                same |= _evidence(fault, case)
            return
        self.data["shrunk"] += 1
        smallest, tries, shown = self._shrunk(fault, case)
        features = _features(smallest)
        new = {
            "features": features, "problem": str(smallest.problem), "smallest": smallest.as_json(), "tries": tries,
            "smallest_text": shown.text,
            "reproducer": reproducer(smallest, shown, self.data["kernel"], self.data["arrays"], self.judge),
        }  # fmt: skip
        found: dict[str, Any] = {
            "kind": fault.kind, "op": key[1], "count": 1, "after": round(begun, 3), "keys": [key],
            "first": case.as_json(), **_evidence(fault, case), **new,
        }  # fmt: skip
        for other, where in self._evidence(smallest, shown):
            new_evidence = _evidence(other, where)
            if telling(new_evidence["report"]) >= telling(found["report"]):
                found |= new_evidence
        for known in faults:
            if _same(known, found):
                known["count"] += 1
                known["keys"].append(key)
                if known["kind"] != fault.kind:
                    return
                known |= new if len(features) < len(known["features"]) else {}
                if telling(found["report"]) > telling(known["report"]):
                    known |= {name: found[name] for name in ("text", "clearest", "report")}
                return
        faults.append(found)

    def _evidence(self, smallest: Case, shown: Fault) -> Iterator[tuple[Fault, Case]]:
        """Yield verdicts on the smallest case and on ordinary ones with the same fault, until one has a single hint."""
        if shown.report is None:
            return
        yield shown, smallest
        for case in ordinary(smallest, self.kernel.takes):
            with suppress(CallerError):
                found = shows(self.kernel, case, shown.kind, self.judge)
                if found is not None and found.report is not None:
                    yield found, case
                    if telling(found.report.data)[:2] == (2, -1):
                        return

    def _shrunk(self, fault: Fault, case: Case) -> tuple[Case, int, Fault]:
        found = [fault]

        def still(smaller: Case) -> bool:
            with suppress(CallerError):  # the service can't judge it
                new = shows(self.kernel, smaller, fault.kind, self.judge)
                if new is not None:
                    found.append(new)
                return new is not None
            return False

        left = self.seconds + self.shrinking - (time.monotonic() - self.begun)
        seconds = min(self.shrinking, max(1.0, left))
        if fault.kind != "hung":
            smallest, tries = shrunk(case, still, self.kernel.takes, seconds)
            return smallest, tries, found[-1]
        for limit in (self._soon(), _HANGS_S):
            with self.kernel.limited(limit):
                smallest, tries = shrunk(case, still, self.kernel.takes, seconds)
            with self.kernel.limited(_HANGS_S):
                if smallest != case and still(smallest):  # or else it was only slow
                    return smallest, tries, found[-1]
        return case, tries, fault

    def _soon(self) -> float:
        """Return the seconds after which a call has probably hung: many times the longest call so far."""
        longest = max((each["seconds"] for each in self.data["cases"]), default=0.0)
        return min(_HANGS_S, max(0.5, 20 * longest))


def _cause(fault: Fault, case: Case) -> str:
    """Return what may distinguish causes: the error raised, the best hint of a wrong result, or its unusual data."""
    if fault.report is None:
        return fault.text.partition(":")[0] if fault.kind == "raised" else ""
    return cause(fault.report.data) or ("" if case.kind in (*EXACT, "normal", "positive", "smooth") else case.kind)


def _joint(kind: str) -> str:
    """Return the kind of a fault: one for all relations and one for accesses out of bounds, which come together."""
    return "relation" if kind in RELATIONS else {"outside": "crashed"}.get(kind, kind)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two faults are one: they have the same cause, need the same, or show in the same smallest case."""
    if one["op"] != other["op"]:
        return False
    if _joint(one["kind"]) != _joint(other["kind"]):
        follow = {"wrong", "memory", *RELATIONS}
        case, another = one["smallest"], other["smallest"]
        exact = {case["kind"], another["kind"]} <= {*EXACT}
        return {one["kind"], other["kind"]} <= follow and exact and case["problem"] == another["problem"]
    named, needed, needs = cause(one["report"]), {*one["features"]}, {*other["features"]}
    return bool(named and named == cause(other["report"])) or needed <= needs or needs <= needed


def _evidence(fault: Fault, case: Case) -> dict[str, Any]:
    """Return the members of a report's fault that show it."""
    return {"text": fault.text, "clearest": case.as_json(), "report": _report(fault)}


def _report(fault: Fault) -> dict[str, Any] | None:
    return None if fault.report is None else fault.report.data


def _features(case: Case) -> list[str]:
    """Return the features of a shrunk case that the plainest one does not have: the fault needs them."""
    problem = case.problem
    plain = {"strides": 1, "dilations": 1, "kernel": 1}
    found = [name for name, least in plain.items() if max(getattr(problem, name), default=least) > least]
    found += ["pads"] if max((*problem.pads_begin, *problem.pads_end), default=0) > 0 else []
    found += [name for name in ("n", "groups") if getattr(problem, name) > 1]
    found += [] if case.kind in EXACT else [case.kind]
    return found + ([] if problem.dtype == "f32" else [problem.dtype])


def check(
    kernel: KernelProcess,
    judge: Judge,
    data: dict[str, Any],
    *,
    choice: Choice,
    seconds: float,
    cases: int | None,
    shrinking: float | None = None,
    on_progress: Callable[[str, float], object],
) -> None:
    """Try cases from `data["next"]` on, until the time is over or so many `cases` were tried, and add to `data`.

    Shrinking a fault takes at most so many seconds, by default a share of all. `on_progress` is called with what is
    being tried, and the share of the time that has passed.
    """
    state = _Check(kernel, judge, choice, data, seconds, _SHARE * seconds if shrinking is None else shrinking)
    spent = data["seconds"]
    if choice.large:
        check_large(kernel, data, choice.large, cases=cases, until=state.begun + seconds, on_progress=on_progress)
        data["seconds"] = round(spent + time.monotonic() - state.begun, 3)
        return
    if not data["cases"] and choice.listed is None:
        stated, kernel.takes = kernel.takes, probed(kernel)
        data |= {"takes": kernel.takes.as_json(), "declined": flags(stated, kernel.takes)}
    waiting: deque[tuple[Tried, Future[Report] | None]] = deque()

    def skipped(case: Case) -> tuple[str, ...]:
        return *choice.skip, *judge.unfit(case.problem)

    try:
        with ThreadPoolExecutor(_JUDGES) as pool:
            for done, case in enumerate(_cases(state, cases)):
                share = (time.monotonic() - state.begun) / seconds if cases is None else done / cases
                what = f"case {case.number}: {case.problem.op} {case.problem.dtype}, {case.kind}, {case.name}"
                on_progress(f"{len(data['faults'])} faults, {what}", min(1.0, share))
                tried = examine(kernel, case, skipped(case))
                if tried.outcome.status == "unsupported" and choice.listed is None:
                    others = (examine(kernel, other, skipped(other)) for other in nearer(case, kernel.takes))
                    tried = next((each for each in others if each.outcome.status != "unsupported"), tried)
                result = tried.result
                verdict = None if result is None else pool.submit(judge.verify, tried.case, tried.inputs, result)
                waiting.append((tried, verdict))
                while len(waiting) > _AHEAD or (waiting and (waiting[0][1] is None or waiting[0][1].done())):
                    _finish(state, *waiting.popleft())
            while waiting:
                _finish(state, *waiting.popleft())
    finally:
        data["faults"].sort(key=lambda fault: telling(fault["report"]), reverse=True)
        data["seconds"] = round(spent + time.monotonic() - state.begun, 3)
        data["restarts"] = kernel.restarts


def _cases(state: _Check, most: int | None) -> Iterator[Case]:
    """Yield the cases to try, until there were so many or the time is over."""
    choice, first = state.choice, state.data["next"]
    seed, takes = state.data["seed"], state.kernel.takes
    listed = None if choice.listed is None else choice.listed(takes)
    for number in islice(choice.numbers or count(first), most):
        if time.monotonic() - state.begun > state.seconds:
            return
        if listed is None:
            yield draw(seed, number, takes, sources=choice.sources, kinds=choice.kinds, names=choice.names)
        elif number >= len(listed) * len(choice.kinds):
            return
        else:
            kind, (name, problem) = choice.kinds[number // len(listed)], listed[number % len(listed)]
            yield Case(problem, kind, seed, number, name)


def _finish(state: _Check, tried: Tried, verdict: Future[Report] | None) -> None:
    faults, report = list(tried.faults), None
    if verdict is not None:
        try:
            report = verdict.result()
        except CallerError as error:  # beyond a limit of the service, for example
            state.data["unjudged"].append({"number": tried.case.number, "text": str(error)[:300]})
        else:
            faults += [fault] if (fault := fault_of(report)) else []
    if _follows(faults, report):
        faults = [fault for fault in faults if fault.kind != "wrong"]
    if report is None or not report.passed or {*_CALLS} & {fault.kind for fault in faults}:
        faults = [fault for fault in faults if fault.kind not in RELATIONS]  # which follow from the others
    state.record(tried, faults, report)


def _follows(faults: Sequence[Fault], report: Report | None) -> bool:
    """Whether the result is wrong because it is not always the same: it was left over, or exact bits differ."""
    differ = [fault for fault in faults if fault.kind in _CALLS]
    if any(fault.kind == "memory" or NO_DIGIT in fault.text for fault in differ):
        return True
    if not differ or report is None:
        return False
    return {r["rule"] for r in report.data["rules"] if not r["passed"]} == {"exact"}
