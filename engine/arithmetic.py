"""`options.arithmetic`: what a kernel under verification says of its products and sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convgrad._errors import InvalidParams
from engine.planning import problem_of
from kernels.problem import ConvProblem
from schemas.broken_rules import broken_rule, invalid_params
from schemas.ops import ResolvedOp
from verify.arithmetic import LARGEST_TILE, PRODUCTS, SUMS, WINOGRAD, Arithmetic
from verify.layout import is_bias

__all__ = ["arithmetic_of"]

_MOST_SEGMENTS = 1 << 12
_MEMBERS = ("products", "sum", "segments", "segment_sum", "algorithm")


def arithmetic_of(given: Mapping[str, Any] | None, op: ResolvedOp) -> Arithmetic:
    """Return the arithmetic that a kernel declares for an operation; None declares the usual one.

    Raises `InvalidParams` with every member that means nothing for the operation or its dtype, and what may be said.
    """
    problem = problem_of(op)
    usual = Arithmetic.usual(op.dtype)
    if given is None:
        return usual
    found = {name: value for name, value in given.items() if value is not None}
    broken = [
        (str(name)[:64], f"is not a member of arithmetic, which are {', '.join(_MEMBERS)}", "unknown_member")
        for name in found
        if name not in _MEMBERS
    ]
    choices = {"products": _products(problem), "sum": _sums(problem), "segment_sum": SUMS}
    for name, names in choices.items():
        if name in found and found[name] not in names:
            broken.append((name, f"must be {' or '.join(names)} for {op.called_as} in {op.dtype}", "choice"))
    segments = found.get("segments", 1)
    if type(segments) is not int or not 1 <= segments <= _MOST_SEGMENTS:
        broken.append(("segments", f"must be an integer from 1 to {_MOST_SEGMENTS}", "value"))
    rule = _broken_algorithm(found.get("algorithm", "direct"), problem)
    if rule is not None:
        broken.append(("algorithm", rule, "algorithm"))
    if broken:
        raise _refused(broken)
    declared: dict[str, Any] = {"segment_sum": op.dtype, **found}
    if segments == 1:
        declared["segment_sum"] = usual.segment_sum
    return Arithmetic(**{"sum": usual.sum, **declared})


def _refused(broken: list[tuple[str, str, str]]) -> InvalidParams:
    loc = ["options", "arithmetic"]
    return invalid_params("options", [broken_rule([*loc, name], f"{name} {rule}", kind) for name, rule, kind in broken])


def _products(problem: ConvProblem) -> tuple[str, ...]:
    return tuple(PRODUCTS) if problem.dtype == "f32" and not is_bias(problem) else ("f32",)


def _sums(problem: ConvProblem) -> tuple[str, ...]:
    return ("f64", "f32") if problem.dtype == "f64" else SUMS


def _broken_algorithm(name: object, problem: ConvProblem) -> str | None:
    """Return the rule that an algorithm breaks."""
    if name == "direct":
        return None
    match = WINOGRAD.fullmatch(name) if isinstance(name, str) else None
    if name != "fft" and match is None:
        return "must be direct, fft or winograd F(m, r), such as winograd F(4, 3)"
    if is_bias(problem):
        return f"must be direct for {problem.op}"
    if max((*problem.strides, *problem.dilations), default=1) > 1:
        return "must be direct where strides or dilations are above 1"
    if match is not None:
        tile, taps = int(match[1]), int(match[2])
        if tile < 1 or taps < 2 or tile + taps - 1 > LARGEST_TILE:
            return f"must have tiles of at most {LARGEST_TILE} by {LARGEST_TILE}"
        if taps not in problem.kernel:
            return f"is for {taps} taps, but the kernel has {' x '.join(map(str, problem.kernel))}"
    return None
