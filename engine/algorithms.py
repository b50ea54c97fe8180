"""`options.algorithm`: calls that Winograd's algorithm can't compute, its cost, and its promises."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from engine.planning import problem_of
from kernels.problem import Algorithm
from kernels.target import target
from kernels.winograd.rules import FAMILY, Refusal, refusals
from kernels.winograd.work import exact_factor, winograd_macs
from schemas.broken_rules import broken_rule, invalid_params
from schemas.ops import ResolvedOp

__all__ = ["check_algorithm", "describe_winograd"]

_NOT_COMPILED = "winograd needs compiled code; none works on this machine's processor (/readyz has the reason)"

_PROMISES = (
    "the same bits for any number of workers, on every API",
    "exact sums of integers, direct ones if the product of their largest magnitudes exceeds exact_product",
    "Inf and NaN in the same elements as direct sums",
)


def check_algorithm(what: str, algorithm: Algorithm, ops: Iterable[tuple[str, ResolvedOp]]) -> None:
    """Raise `InvalidParams` if `winograd` was chosen and can't compute a convolution or gradient, or there is none.

    `ops` are the operations of the request, each with a label for messages. Sums of a bias are always direct.
    """
    if algorithm != "winograd":
        return
    outputs = [(label, _broken(op, spec.name)) for label, op in ops for spec in op.outputs]
    taken = [(label, broken) for label, broken in outputs if all(each.attribute != "op" for each in broken)]
    # the gradients of one layer break the same rules
    messages = dict.fromkeys(f"{label}{each}" for label, broken in taken or outputs for each in broken)
    broken = [broken_rule(["options", "algorithm"], message, "algorithm") for message in messages]
    if broken:
        raise invalid_params(what, broken)


def describe_winograd(op: ResolvedOp) -> dict[str, Any]:
    """Describe as JSON whether Winograd can compute the first output: the rules it breaks, or cost and promises."""
    broken = [{"attribute": each.attribute, "rule": each.message} for each in _broken(op, op.output.name)]
    if broken:
        return {"allowed": False, "refused": broken}
    summed = problem_of(op)
    exact = (1 << 24) // max(1, exact_factor(summed))
    promises = list(_PROMISES)
    return {"allowed": True, "gmac": winograd_macs(summed) / 1e9, "exact_product": exact, "promises": promises}


def _broken(op: ResolvedOp, output: str) -> tuple[Refusal, ...]:
    """Return the rules that an output breaks, in terms of the operation called, not of the one that kernels compute."""
    problem = problem_of(op, output)
    found = refusals(problem)
    if any(each.attribute == "op" for each in found):
        rule = f"winograd computes {FAMILY}; {op.called_as} computes {op.wire_name(output)}"
        return (Refusal("op", rule),)
    if output == "diff_src":  # computed from diff_dst as if that were src
        found = refusals(replace(problem, src_channels=problem.dst_channels, dst_channels=problem.src_channels))
    return found or (() if target().compiles else (Refusal("target", _NOT_COMPILED),))
