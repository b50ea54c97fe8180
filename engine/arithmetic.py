"""`options.arithmetic`: what a kernel under verification says of its products and sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convgrad._arithmetic import broken
from engine.planning import problem_of
from schemas.broken_rules import broken_rule, invalid_params, safe_key
from schemas.ops import ResolvedOp
from verify.arithmetic import Arithmetic

__all__ = ["arithmetic_of"]


def arithmetic_of(given: Mapping[str, Any] | None, op: ResolvedOp) -> Arithmetic:
    """Return the arithmetic that a kernel declares for an operation; None declares the usual one.

    Raises `InvalidParams` with every member that means nothing for the operation or its dtype, and what may be said.
    """
    usual = Arithmetic.usual(op.dtype)
    if given is None:
        return usual
    loc = ["options", "arithmetic"]
    rules = broken(given, problem_of(op), op.called_as)
    if rules:
        listed = [broken_rule([*loc, name], f"{safe_key(name)} {rule}", kind) for name, rule, kind in rules]
        raise invalid_params("options", listed)
    declared = {"sum": usual.sum, "segment_sum": op.dtype, **{k: v for k, v in given.items() if v is not None}}
    if declared.get("segments", 1) == 1:
        declared["segment_sum"] = usual.segment_sum
    return Arithmetic(**declared)
