"""The clearest evidence of a fault: of several verdicts, the one that says most about its cause."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from convgrad._check.cases import EXACT, Case
from convgrad._check.problems import Problem, Takes
from convgrad._check.shrink import changed

__all__ = ["cause", "ordinary", "reason", "telling"]

_WORK = 2_000_000
_LIKELY = "the errors are as large as"


def reason(report: Mapping[str, Any]) -> str:
    """Return the line of a verdict that best explains why the result is wrong."""
    where = report["where"]["text"] if report["where"] else ""
    likely = [hint for hint in report["hints"] if hint.startswith(_LIKELY)]
    reasons = [*_named(report), *([where, *likely] if _is_place(where) else [*likely, where])]
    failed = [rule["text"] for rule in report["rules"] if not rule["passed"]]
    return next(filter(None, reasons), f"this does not hold: {failed[0]}" if failed else "see the report")


def _named(report: Mapping[str, Any]) -> list[str]:
    """Return the causes and hints of a verdict, but for the arithmetic that an error may come from by its size."""
    hints = [hint for hint in report["hints"] if not hint.startswith(_LIKELY)]
    return [*(each["text"] for each in report["causes"]), *hints]


def _is_place(where: str) -> bool:
    """Whether wrong elements have something in common."""
    return bool(where) and not any(words in where for words in ("every element", "one element", "spread over"))


def cause(report: Mapping[str, Any] | None) -> str:
    """Return what may distinguish causes of wrong results: the best hint of a verdict without numbers, or nothing."""
    named = _named(report)[:1] if report else []
    return re.sub(r"[\d., -]+", " ", named[0].partition(" (")[0]) if named else ""


def telling(report: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Return how much a verdict says: best if it has a single hint, without one if it says where."""
    if report is None:  # a crash or an exception explains itself
        return (1,)
    if hints := len(_named(report)):
        return (2, -hints, len(report["hints"]))
    place = _is_place(report["where"]["text"]) if report["where"] else False
    return (int(place or bool(report["hints"])), int(place))


def ordinary(smallest: Case, takes: Takes) -> Iterator[Case]:
    """Yield cases that have what the smallest one needs, and else are as problems usually are.

    In the smallest problem many causes have the same effect, and in the first one that failed several may come
    together.
    """
    kinds = ("normal", "integers") if smallest.kind in EXACT else (smallest.kind,)
    usual = {"n": 2, "I": 9, "O": 12, "kernel": 3}
    wanted = (usual | {"pads": 1}, usual, usual | {"kernel": 1}, {"O": 8, "kernel": 1})
    for problem in dict.fromkeys(_larger(smallest.problem, least) for least in wanted):
        if problem is None or takes.limited(problem) != problem or problem.work > _WORK:
            continue
        for kind in kinds:
            yield replace(smallest, problem=problem, kind=kind)


def _larger(problem: Problem, least: Mapping[str, int]) -> Problem | None:
    """Return the problem enlarged to at least these sizes and 5 to 7 pixels along each axis, plus `pads`."""
    groups = problem.groups
    sizes = {("n", 0): max(problem.n, least.get("n", 1))}
    sizes["src_channels", 0] = max(problem.src_channels // groups, least.get("I", 1))
    sizes["dst_channels", 0] = max(problem.dst_channels // groups, least["O"])
    for axis in range(problem.rank):
        kernel = 1 if problem.of_bias else max(problem.kernel[axis], least["kernel"])
        pads = [problem.pads_begin[axis], problem.pads_end[axis]]
        pads = [size + least.get("pads", 0) for size in pads] if any(pads) else pads
        extent = (kernel - 1) * problem.dilations[axis] + 1
        pixels = (max(problem.narrow[axis], 7 - axis) - 1) * problem.strides[axis]
        sizes |= {("kernel", axis): kernel, ("pads_begin", axis): pads[0], ("pads_end", axis): pads[1]}
        sizes["wide", axis] = max(problem.wide[axis], pixels + extent - sum(pads))
    return changed(problem, sizes, narrow=False)
