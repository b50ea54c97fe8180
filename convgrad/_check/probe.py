"""What a kernel takes, found out by calling it on small problems: draws then stay inside."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from convgrad._check.cases import Case
from convgrad._check.problems import PER_AXIS, Problem, Takes, fitted
from convgrad._check.process import KernelProcess, Memory

__all__ = ["flags", "nearer", "probed"]

_SECONDS = 20.0
_CALL_S = 2.0
_WORK = 2_000_000
_WITH: dict[str, dict[str, Any]] = {
    "strides": {"strides": 2}, "dilations": {"dilations": 2}, "pads": {"pads_begin": 1, "pads_end": 1},
    "uneven_pads": {"pads_end": 1}, "groups": {"groups": 2}, "bias": {"bias": True}, "empty": {"n": 0},
}  # fmt: skip
"""What makes an ordinary problem one that only kernels of this field take."""


def probed(kernel: KernelProcess) -> Takes:
    """Try each kind of problem that a kernel claims to take, and return those that it did not decline.

    A call that fails counts as taken: it is a fault, and cases will show it. After some seconds the rest, too.
    """
    takes, until = kernel.takes, time.monotonic() + _SECONDS

    def accepts(problems: Iterator[Problem]) -> Problem | None:
        for problem in problems:
            late = time.monotonic() > until
            with kernel.limited(_CALL_S):
                inputs = Case(problem, "integers", 0).inputs()
                if late or kernel.call(problem, inputs, Memory()).status != "unsupported":
                    return problem
        return None

    usual = (next(_ordinary(op, takes)) for op in takes.ops)
    first = accepts(usual) or accepts(each for op in takes.ops for each in _ordinary(op, takes))
    if first is None:
        return takes
    alike = replace(takes, data_formats=(first.data_format,), weights_formats=(first.weights_format,))
    known = {op: accepts(_ordinary(op, alike)) for op in takes.ops}
    bases = [problem for problem in known.values() if problem is not None]
    found: dict[str, Any] = {"ops": [op for op, problem in known.items() if problem is not None]}
    names = {"dtypes": "dtype", "data_formats": "data_format", "weights_formats": "weights_format"}
    for field, name in names.items():
        found[field] = [
            value for value in getattr(takes, field)
            if accepts(replace(base, **{name: value}) for base in bases if name != "weights_format" or not base.of_bias)
            or all(base.of_bias for base in bases)
        ]  # fmt: skip
    found["ranks"] = [
        rank for rank in takes.ranks
        if accepts(_shaped(base, rank) for base in bases if rank > 1 or base.op != "BiasAddBackward")
    ]  # fmt: skip
    for field, more in _WITH.items():
        problems = list(_changed(bases, more))
        found[field] = getattr(takes, field) and (not problems or accepts(iter(problems)) is not None)
    new: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    return replace(takes, **{name: value for name, value in new.items() if value != ()})


def nearer(case: Case, takes: Takes) -> Iterator[Case]:
    """Yield a case that was declined with ever fewer unusual attributes, as kernels for one kind of layer need them.

    These are square problems, kernels of 3 and 1, and channels in multiples of 16.
    """
    problem = case.problem
    if problem.of_bias:
        return
    square: dict[str, Any] = {name: getattr(problem, name)[:1] * problem.rank for name in PER_AXIS}
    i, o = (-(-size // problem.groups // 16) * 16 for size in (problem.src_channels, problem.dst_channels))
    channels = {"src_channels": i * problem.groups, "dst_channels": o * problem.groups}
    kernels: list[dict[str, Any]] = [{"kernel": (size,) * problem.rank} for size in (3, 1)]
    changes = [square, *kernels, channels, *[square | each for each in kernels]]
    changes += [channels | each for each in (square, *kernels)] + [square | channels | each for each in kernels]
    for new in changes:
        with suppress(ValueError):
            found = takes.limited(fitted(replace(problem, **new), _WORK))
            if found is not None:
                yield replace(case, problem=found)


def flags(before: Takes, after: Takes) -> list[str]:
    """Return what `--takes` would say of the fields in which a kernel takes less than it said."""
    old, new = before.as_json(), after.as_json()
    return [
        f"{name}={','.join(map(str, value)) if isinstance(value, list) else str(value).lower()}"
        for name, value in new.items()
        if value != old[name]
    ]


def _ordinary(op: str, takes: Takes) -> Iterator[Problem]:
    """Yield small problems of an operation, the most usual ones first."""
    ranks = sorted(takes.ranks, key=lambda rank: rank != 2)
    for dtype, rank, *formats in product(takes.dtypes, ranks, takes.data_formats, takes.weights_formats):
        if op == "BiasAddBackward" and rank == 1:
            continue
        base = Problem(op=op, dtype=dtype, n=2, src_channels=16, dst_channels=16, wide=(8,) * rank,
                       data_format=formats[0], weights_format=formats[1])  # fmt: skip
        for kernel in (3, 1) if not base.of_bias else (1,):
            pads = (kernel // 2,) * rank if takes.pads else ()
            yield replace(base, kernel=(kernel,) * rank, pads_begin=pads, pads_end=pads)


def _shaped(base: Problem, rank: int) -> Problem:
    """Return a problem with as many axes, each like its first one."""
    names = ("wide", "kernel", "strides", "dilations", "pads_begin", "pads_end")
    return replace(base, **{name: getattr(base, name)[:1] * rank for name in names})


def _changed(bases: Sequence[Problem], more: dict[str, Any]) -> Iterator[Problem]:
    """Yield the problems with other attributes, the same along all axes, where there are such."""
    for base in bases:
        new: dict[str, Any] = {name: (value,) * base.rank if isinstance(getattr(base, name), tuple) else value
               for name, value in more.items()}  # fmt: skip
        if base.of_bias or ("bias" in more and base.output != "dst") or ("n" in more and base.output != "diff_weights"):
            continue
        yield replace(base, **new)
