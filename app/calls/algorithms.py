"""The caller's choice of algorithm: what Winograd's can't compute, and what it costs and promises."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from app.calls.planning import problem_of
from kernels.gradient.winograd.layout import tile_count
from kernels.problem import Algorithm
from kernels.target import target
from kernels.winograd.rules import FAMILY, Refusal, refusals
from schemas.ops import ResolvedOp
from schemas.problems import invalid_params, problem

__all__ = ["check_algorithm", "describe_winograd"]

_NOT_COMPILED = "winograd needs compiled code; none works on this machine's processor (/readyz has the reason)"

_PROMISES = (
    "the same bits for any number of workers, on every API",
    "exact sums of integers whose largest magnitudes have a product of at most exact_product; others are direct",
    "Inf and NaN in the elements in which direct sums have them",
)


def check_algorithm(what: str, algorithm: Algorithm, ops: Iterable[tuple[str, ResolvedOp]]) -> None:
    """Raise `InvalidParams` if `winograd` was chosen for weight gradients that it can't compute, or for none.

    `ops` are the operations of the request, each with a label for messages. Outputs of another kind, beside weight
    gradients, are summed directly.
    """
    if algorithm != "winograd":
        return
    outputs = [(label, _broken(op, spec.name)) for label, op in ops for spec in op.outputs]
    gradients = [(label, broken) for label, broken in outputs if all(each.attribute != "op" for each in broken)]
    problems = [
        problem(["options", "algorithm"], f"{label}{each}", "algorithm")
        for label, broken in gradients or outputs
        for each in broken
    ]
    if problems:
        raise invalid_params(what, problems)


def describe_winograd(op: ResolvedOp) -> dict[str, Any]:
    """Describe as JSON whether Winograd's can compute the first output: the rules it breaks, or cost and promises."""
    broken = [{"attribute": each.attribute, "rule": each.message} for each in _broken(op, op.output.name)]
    if broken:
        return {"allowed": False, "refused": broken}
    direct = problem_of(op)
    dims, tiles = direct.dims, tile_count(direct)
    # 16 products for each 2x2 tile, where direct sums need 4 * 9; depths of the kernel are summed directly.
    macs = 16 * tiles * dims.kernel[0] * dims.groups * dims.wide_channels * dims.narrow_channels
    exact = (1 << 24) // (16 * tiles) if tiles else 1 << 24
    return {"allowed": True, "gmac": macs / 1e9, "exact_product": exact, "promises": list(_PROMISES)}


def _broken(op: ResolvedOp, output: str) -> tuple[Refusal, ...]:
    """Return the rules that an output breaks; of the operation as the caller knows it, not as kernels compute it."""
    found = refusals(problem_of(op, output))
    if any(each.attribute == "op" for each in found):
        rule = f"winograd computes {FAMILY}; {op.called_as} computes {op.wire_name(output)}"
        return (Refusal("op", rule),)
    return found or (() if target().compiles else (Refusal("target", _NOT_COMPILED),))
