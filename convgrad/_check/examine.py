"""One case: call the kernel, compare its results with each other, and have the service judge the first one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from convgrad._check.cases import DIGITS, Array, Case
from convgrad._check.evidence import reason
from convgrad._check.judge import Judge
from convgrad._check.problems import Problem
from convgrad._check.process import KernelProcess, Memory, Outcome
from convgrad._check.relations import RELATIONS, applicable, same_bits
from convgrad._dtypes import dtype_of_array
from convgrad._report import Report

__all__ = ["FAULTS", "NO_DIGIT", "Fault", "Tried", "examine", "fault_of", "shows"]

FAULTS = {
    "wrong": "the result is wrong",
    "raised": "the kernel failed",
    "crashed": "the kernel crashed",
    "hung": "the kernel hangs",
    "dtype": "the result has another dtype",
    "shape": "the result has another shape",
    "modified": "an input was changed",
    "outside": "memory beside a tensor was written",
    "repeat": "the bits differ when the call is repeated",
    "alignment": "the bits depend on the alignment of the tensors",
    "memory": "the result depends on what its memory held before",
    **{name: f"the result is not right when {relation.text}" for name, relation in RELATIONS.items()},
}
"""The kinds of faults, and what each means."""

_FIRST = Memory()

NO_DIGIT = "no digit is the same"


@dataclass(frozen=True)
class Fault:
    """What is wrong with a kernel in one case: one of `FAULTS`, in words, and the verdict if it was judged."""

    kind: str
    text: str
    report: Report | None = None


@dataclass
class Tried:
    """The outcome of running a case, before the verdict; `result` is None if there is nothing to judge."""

    case: Case
    outcome: Outcome
    inputs: dict[str, Array]
    faults: list[Fault] = field(default_factory=list)
    relations: list[str] = field(default_factory=list)

    @property
    def result(self) -> Array | None:
        """The result of the first call."""
        return self.outcome.result


def examine(kernel: KernelProcess, case: Case, skip: Collection[str] = ()) -> Tried:
    """Call the kernel on a case: twice, and once or twice more for a relation, which take turns."""
    fitting = [name for name in applicable(case) if name not in skip]
    chosen = fitting[case.number % len(fitting)] if fitting else None
    wanted = {*FAULTS} - {*RELATIONS} - {*skip}
    return _tried(kernel, case, wanted | ({chosen} if chosen else set()))


def shows(kernel: KernelProcess, case: Case, kind: str, judge: Judge) -> Fault | None:
    """Return the fault of a kind that a case shows, or None."""
    if kind in RELATIONS and (kind in judge.unfit(case.problem) or not RELATIONS[kind].fits(case)):
        return None
    tried = _tried(kernel, case, {kind})
    found = next((fault for fault in tried.faults if fault.kind == kind), None)
    if found is None and kind == "wrong" and tried.result is not None:
        found = fault_of(judge.verify(case, tried.inputs, tried.result))
    return found


def fault_of(report: Report) -> Fault | None:
    """Return the fault that a report describes; None if the result passed."""
    return None if report.passed else Fault("wrong", reason(report.data), report)


def _tried(kernel: KernelProcess, case: Case, wanted: Collection[str]) -> Tried:
    inputs = case.inputs()
    first = kernel.call(case.problem, inputs, _FIRST)
    tried = Tried(case, first, inputs)
    for fault in _faults_of(first):
        if fault.kind in wanted:
            tried.faults.append(fault)
    if first.result is None:
        return tried

    def run(problem: Problem, changed: dict[str, Array], memory: Memory = _FIRST) -> Array:
        dense = {name: np.ascontiguousarray(values) for name, values in changed.items()}
        outcome = kernel.call(problem, dense, memory)
        if outcome.result is None:
            raise _FailedError(outcome)
        return outcome.result

    try:
        if {"repeat", "alignment", "memory", "crashed"} & {*wanted}:  # memory beyond a tensor may be in its page
            tried.relations.append("repeat")
            tried.faults += _repeated(case, inputs, first.result, run, wanted)
        for name in [name for name in RELATIONS if name in wanted]:
            tried.relations.append(name)
            pairs = RELATIONS[name].expect(case, inputs, first.result, run)
            if not all(same_bits(got, expected) for got, expected in pairs):
                tried.faults.append(Fault(name, FAULTS[name]))
    except _FailedError as failed:
        tried.faults += [
            replace(fault, text=f"{fault.text}; an earlier call of the same case succeeded")
            for fault in _faults_of(failed.outcome)
            if fault.kind in wanted
        ]
    return tried


class _FailedError(Exception):
    """A further call had no result."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


def _faults_of(outcome: Outcome) -> list[Fault]:
    """Return the faults of a single call."""
    found = []
    if outcome.status not in ("done", "unsupported"):
        text = "".join([letter if letter.isprintable() else "?" for letter in outcome.text])
        found.append(Fault(outcome.status, text))
    if outcome.modified:
        found.append(Fault("modified", f"the kernel changed its input {' and '.join(outcome.modified)}"))
    if outcome.outside:
        found.append(Fault("outside", f"the kernel wrote beyond {' and '.join(outcome.outside)}"))
    return found


def _repeated(
    case: Case, inputs: dict[str, Array], result: Array, run: Callable[..., Array], wanted: Collection[str]
) -> list[Fault]:
    """Call again with other addresses and other data in the result's memory; if the bits differ, find out why."""
    elsewhere = Memory(poison=0x7B, at_end=case.number % 4 != 3, aligned=False)
    other: Any = run(case.problem, inputs, elsewhere)
    if same_bits(result, other):
        return []
    again = [run(case.problem, inputs, _FIRST) for _ in range(2)]
    differs = next((each for each in again if not same_bits(result, each)), None)
    if differs is None and not same_bits(other, run(case.problem, inputs, elsewhere)):
        differs = other
    if differs is not None:
        kind, differing = "repeat", differs
    elif not same_bits(result, moved := run(case.problem, inputs, replace(elsewhere, poison=_FIRST.poison))):
        kind, differing = "alignment", moved
    else:
        kind, differing = "memory", other
    if kind not in wanted:
        return []
    unequal = result.reshape(-1).view(np.uint8) != differing.reshape(-1).view(np.uint8)
    count = int(unequal.reshape(result.size, -1).any(1).sum())
    return [Fault(kind, f"{FAULTS[kind]}: {count} of {result.size} elements, {_digits(result, differing)}")]


def _digits(one: Array, other: Array) -> str:
    """Return in how many decimal digits two results are the same, of those that the dtype has."""
    with np.errstate(all="ignore"):
        wide, wider = one.astype(np.float64), other.astype(np.float64)
        unequal = ~((wide == wider) | (np.isnan(wide) & np.isnan(wider)))
        size = float(np.sqrt(np.mean(np.square(wide[np.isfinite(wide)])))) if np.isfinite(wide).any() else 0.0
        share = float(np.abs(wide - wider)[unequal].max(initial=0.0)) / size if size else np.inf
    if not share < 1:
        return NO_DIGIT
    if share == 0:
        return "in the sign of zero"
    have = (DIGITS[dtype_of_array(one).name] + 1) * np.log10(2)
    same = min(-np.log10(share), have)
    return f"by at most {share:.2g} of their RMS: {same:.1f} of {have:.1f} decimal digits are the same"
