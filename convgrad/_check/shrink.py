"""Shrinking: the smallest case that still shows a fault."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from convgrad._check.cases import Case
from convgrad._check.problems import PER_AXIS, Problem, Takes

__all__ = ["shrunk"]

_TRIES = 400
_LEAST: dict[str, int] = {
    "n": 1, "groups": 1, "src_channels": 1, "dst_channels": 1, "wide": 1, "kernel": 1, "strides": 1, "dilations": 1,
    "pads_begin": 0, "pads_end": 0, "bias": False,
}  # fmt: skip
"""The members of a problem that can be smaller, and their least values."""


def shrunk(case: Case, shows: Callable[[Case], bool], takes: Takes, seconds: float) -> tuple[Case, int]:
    """Return the smallest case found for which `shows` is true, and the number of cases tried.

    Greedy: the first simpler case that still shows the fault is taken, until none does or the time is over.
    """
    until, tries, seen = time.monotonic() + seconds, 0, {case}
    while True:
        for simpler in _simpler(case, takes):
            if simpler in seen or _size(simpler) >= _size(case):
                continue
            if tries >= _TRIES or time.monotonic() > until:
                return case, tries
            seen.add(simpler)
            tries += 1
            if shows(simpler):
                case = simpler
                break
        else:
            return case, tries


def _size(case: Case) -> tuple[int, ...]:
    """Return how complex a case is: by its elements and integers, then by whether it is plain."""
    problem = case.problem
    elements = sum(map(prod, [*problem.input_shapes.values(), problem.output_shape]))
    numbers = sum(sum(getattr(problem, name)) for name in PER_AXIS)
    kinds = ("impulse", "integers", "normal")
    plain = (
        kinds.index(case.kind) if case.kind in kinds else len(kinds),
        problem.dtype != "f32",
        (problem.data_format != "NCX") + (problem.weights_format != "OIX") + problem.bias,
    )
    return (elements + 4 * numbers + 16 * problem.rank, problem.groups, *plain)


def _simpler(case: Case, takes: Takes) -> Iterator[Case]:
    """Yield simpler cases, large steps first."""
    yield from _halved(case, takes)
    plain = {"dtype": "f32", "data_format": "NCX", "weights_format": "OIX"}
    for changed in [plain, *_problems(case.problem)]:
        try:
            problem = replace(case.problem, **changed)
        except ValueError:
            continue
        if takes.limited(problem) == problem:
            if changed is plain:
                yield replace(case, problem=problem, kind="impulse")
            yield replace(case, problem=problem)
    for kind in ("impulse", "integers", "normal"):
        yield replace(case, kind=kind)


def _halved(case: Case, takes: Takes) -> Iterator[Case]:
    """Yield problems without half of the members that are not plain, without a quarter of them, and so on."""
    problem, every = case.problem, tuple(range(case.problem.rank))
    if problem.rank > 1:
        for axis in every:
            yield from _with(case, takes, [axis], _LEAST)
    members = [name for name, least in _LEAST.items() if _more(getattr(problem, name), least)]
    size = len(members) // 2
    while size > 1:
        for start in range(0, len(members), size):
            yield from _with(case, takes, every, {*members} - {*members[start : start + size]})
        size //= 2


def _with(case: Case, takes: Takes, axes: Sequence[int], kept: Collection[str]) -> Iterator[Case]:
    """Yield the plainest problem on some axes that has these members of the case's, if there is one."""
    problem = case.problem
    sizes = {name: getattr(problem, name) for name in _LEAST}
    sizes |= {name: sizes[name] // problem.groups for name in ("src_channels", "dst_channels")}
    new: dict[str, Any] = {name: sizes[name] if name in kept else least for name, least in _LEAST.items()}
    for name in ("wide", *PER_AXIS):
        new[name] = tuple([sizes[name][axis] if name in kept else _LEAST[name] for axis in axes])
    new["src_channels"] *= new["groups"]
    new["dst_channels"] = new["src_channels"] if problem.of_bias else new["dst_channels"] * new["groups"]
    per_axis = zip(*[new[name] for name in ("wide", *PER_AXIS)], strict=True)
    new["wide"] = tuple([max(wide, (k - 1) * d + 1 - b - e) for wide, k, _, d, b, e in per_axis])
    try:
        plain = replace(problem, **new)
    except ValueError:
        return
    if takes.limited(plain) == plain:
        yield replace(case, problem=plain)


def _more(value: int | tuple[int, ...], least: int) -> bool:
    return (max(value, default=least) if isinstance(value, tuple) else value) > least


def _problems(problem: Problem) -> Iterator[dict[str, Any]]:
    axes = ("wide", *PER_AXIS)
    for axis in range(problem.rank) if problem.rank > 1 else ():
        yield {name: _without(getattr(problem, name), axis) for name in axes}
    if problem.groups > 1:
        i, o = problem.src_channels // problem.groups, problem.dst_channels // problem.groups
        for groups in (1, 2, problem.groups // 2, problem.groups - 1):
            yield {"groups": groups, "src_channels": i * groups, "dst_channels": o * groups}
    for size in _smaller(problem.n, 1):
        yield {"n": size}
    groups = problem.groups
    for name in ("src_channels", "dst_channels"):
        for each in _smaller(getattr(problem, name) // groups, 1):
            new = {name: each * groups}
            yield {"src_channels": each, "dst_channels": each} if problem.of_bias else new
    for axis in range(problem.rank):
        for name in axes:
            values = getattr(problem, name)
            for size in _smaller(values[axis], 0 if name.startswith("pads") else 1):
                yield {name: (*values[:axis], size, *values[axis + 1 :])}
        # A shorter kernel with less padding, or a smaller stride with a smaller image, where one alone does not fit.
        wide, begin, end = (getattr(problem, name)[axis] for name in ("wide", "pads_begin", "pads_end"))
        for size in _smaller(wide, 1):
            more = {"wide": size, "pads_begin": max(0, begin - 1), "pads_end": max(0, end - 1)}
            yield {name: (*getattr(problem, name)[:axis], to, *getattr(problem, name)[axis + 1 :])
                   for name, to in more.items()}  # fmt: skip
    yield {"bias": False}
    yield {"dtype": "f32"}
    yield {"data_format": "NCX"}
    yield {"weights_format": "OIX"}


def _without(values: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*values[:axis], *values[axis + 1 :])


def _smaller(value: int, least: int) -> list[int]:
    """Return smaller values: the least one, half the way, and one less."""
    return sorted({least, (value + least) // 2, value - 1} - {value} - set(range(least)))
