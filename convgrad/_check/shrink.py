"""Shrinking: the smallest case that still shows a fault."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import prod
from typing import Any

from convgrad._check.cases import Case
from convgrad._check.problems import PER_AXIS, Problem, Takes

__all__ = ["changed", "shrunk"]

_TRIES = 800
_LEAST: dict[str, int] = {
    "n": 1, "groups": 1, "src_channels": 1, "dst_channels": 1, "wide": 1, "kernel": 1, "strides": 1, "dilations": 1,
    "pads_begin": 0, "pads_end": 0, "bias": False,
}  # fmt: skip
"""The members of a problem that can be smaller, and their least values."""

Sizes = dict[tuple[str, int], int]
"""Sizes by member and axis: channels are those of a group, and only some members have axes other than 0."""


def shrunk(case: Case, shows: Callable[[Case], bool], takes: Takes, seconds: float) -> tuple[Case, int]:
    """Return the smallest case found for which `shows` is true, and the number of cases tried.

    Greedy: the first simpler case that still shows the fault is taken, until none does or the time is over.
    """
    until, tries, seen = time.monotonic() + seconds, 0, {case}
    while True:
        for simpler in _simpler(case):
            if simpler in seen or _size(simpler) >= _size(case) or takes.limited(simpler.problem) != simpler.problem:
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


def _simpler(case: Case) -> Iterator[Case]:
    """Yield simpler cases: without half of what is not plain, with one smaller size, then with two.

    The data are integers as soon as these show the fault, since a single impulse may miss it in another problem.
    """
    plain = replace(case.problem, dtype="f32", data_format="NCX", weights_format="OIX")
    yield replace(case, problem=plain, kind="integers")
    yield replace(case, kind="integers")
    for problem in _problems(case.problem):
        yield replace(case, problem=problem)
    for kind in ("impulse", "integers", "normal"):
        yield replace(case, kind=kind)


def _problems(problem: Problem) -> Iterator[Problem]:
    yield from _halved(problem)
    yield replace(problem, dtype="f32")
    yield replace(problem, data_format="NCX")
    yield replace(problem, weights_format="OIX")
    yield replace(problem, bias=False)
    smaller = {key: _smaller(size, _LEAST[key[0]]) for key, size in _sizes(problem).items()}
    alone = [{key: size} for key, sizes in smaller.items() for size in sizes]
    pairs = [
        {one: first, other: second}
        for one, other in combinations(smaller, 2)
        for first, second in product(_few(smaller[one]), _few(smaller[other]))
    ]
    for sizes in (*alone, *pairs):
        for narrow in (True, False):
            if (found := changed(problem, sizes, narrow=narrow)) is not None:
                yield found


def _sizes(problem: Problem) -> Sizes:
    """Return the sizes of a problem, but those that have to be least."""
    members = ("n", "groups", "src_channels", *(() if problem.of_bias else ("dst_channels",)))
    found = {(name, 0): int(getattr(problem, name)) for name in members}
    for name in ("src_channels", "dst_channels"):
        if (name, 0) in found:
            found[name, 0] //= problem.groups
    for axis in range(problem.rank):
        found |= {(name, axis): getattr(problem, name)[axis] for name in ("wide", *PER_AXIS)}
    return {key: size for key, size in found.items() if key[0] in ("n", "wide") or not problem.of_bias or size > 1}


def changed(problem: Problem, sizes: Mapping[tuple[str, int], int], *, narrow: bool) -> Problem | None:
    """Return the problem with other sizes, or None if there is no such call.

    The wide tensor grows if the kernel does not fit otherwise. With `narrow` it follows the attributes of its axis, so
    that the other tensor keeps its size.
    """
    new = {name: getattr(problem, name) for name in _LEAST}
    new |= {name: new[name] // problem.groups for name in ("src_channels", "dst_channels")}
    for (name, axis), size in sizes.items():
        old = new[name]
        new[name] = (*old[:axis], size, *old[axis + 1 :]) if isinstance(old, tuple) else size
    new["src_channels"] *= new["groups"]
    new["dst_channels"] = new["src_channels"] if problem.of_bias else new["dst_channels"] * new["groups"]
    wide = []
    for axis, (w, k, s, d, b, e) in enumerate(zip(*[new[name] for name in ("wide", *PER_AXIS)], strict=True)):
        least = (k - 1) * d + 1 - b - e
        if narrow and ("wide", axis) not in sizes and any(at == axis and name in PER_AXIS for name, at in sizes):
            w = (problem.narrow[axis] - 1) * s + least + min(s - 1, problem.output_padding[axis])
        wide.append(max(1, w, least))
    try:
        return replace(problem, **{**new, "wide": tuple(wide)})
    except ValueError:
        return None


def _halved(problem: Problem) -> Iterator[Problem]:
    """Yield problems without half of the members that are not plain, without a quarter of them, and so on."""
    every = tuple(range(problem.rank))
    for count in range(1, problem.rank):
        for axes in combinations(every, count):
            yield from _with(problem, axes, _LEAST)
    members = [name for name, least in _LEAST.items() if _more(getattr(problem, name), least)]
    size = len(members) // 2
    while size > 1:
        for start in range(0, len(members), size):
            yield from _with(problem, every, {*members} - {*members[start : start + size]})
        size //= 2


def _with(problem: Problem, axes: Sequence[int], kept: Collection[str]) -> Iterator[Problem]:
    """Yield the plainest problem on some axes that has these members of the problem, if there is one."""
    members = ("wide", *PER_AXIS)
    new: dict[str, Any] = {name: tuple([getattr(problem, name)[axis] for axis in axes]) for name in members}
    try:
        some = replace(problem, **new)
    except ValueError:
        return
    least = {key: _LEAST[key[0]] for key in _sizes(some) if key[0] not in kept}
    found = changed(some if "bias" in kept else replace(some, bias=False), least, narrow=False)
    if found is not None:
        yield found


def _more(value: int | tuple[int, ...], least: int) -> bool:
    return (max(value, default=least) if isinstance(value, tuple) else value) > least


def _smaller(value: int, least: int) -> list[int]:
    """Return smaller values: the least ones, half the way, and 1, 2, 4, .. less, so that borders are found."""
    steps = {value - 2**power for power in range(value.bit_length())}
    return sorted(size for size in {*range(least, least + 6), (value + least) // 2, *steps} if least <= size < value)


def _few(sizes: Sequence[int]) -> list[int]:
    """Return the least of some sizes, one in the middle, and the largest."""
    return sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]}) if sizes else []
