"""The clearest evidence of a fault: of several verdicts, the one that says most about its cause."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from convgrad._check.cases import EXACT, Case
from convgrad._check.problems import Problem, Takes
from convgrad._check.shrink import changed

__all__ = ["cause", "ordinary", "telling"]

_WORK = 2_000_000


def _named(report: Mapping[str, Any]) -> list[str]:
    """Return the causes and hints of a verdict, without their numbers."""
    found = [*(each["text"].partition(" (")[0] for each in report["causes"]), *report["hints"]]
    return [re.sub(r"[\d., -]+", " ", text) for text in found]


def cause(report: Mapping[str, Any] | None) -> str:
    """Return what may distinguish causes of wrong results: the best hint of a verdict, or nothing."""
    return next(iter(_named(report)), "") if report else ""


def telling(report: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Return how much a verdict says: best if it has a single hint, without one if it says where."""
    if report is None:
        return (0,)
    if hints := len(_named(report)):
        return (1, -hints, len(report["hints"]))
    return (0, int(bool(report["where"]) and "every" not in report["where"]["text"]))


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
    """Return the problem with at least these sizes, and 5 to 7 pixels along each axis; with `pads` so many more."""
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
