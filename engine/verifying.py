"""Verify a result of the caller's own, which is given as one more input, under the name of the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from engine.algorithms import check_algorithm
from engine.limits import Limits
from engine.options import Options, refuse_options
from engine.planning import (
    Computation,
    Prepared,
    check_limits,
    is_fast,
    plan_verification_call,
    work_of_taps,
    work_of_verification,
)
from schemas.broken_rules import broken_rule, dims, invalid_params
from schemas.ops import ResolvedOp, TensorMeta, resolve
from schemas.rows import DTYPE_NAMES, REFERENCE_DTYPES
from schemas.tables import find_operation
from schemas.tensors import TensorSpec
from verify.unit import read_report

__all__ = ["plan_verified", "report_of"]


def plan_verified(
    name: str,
    attributes: Mapping[str, Any],
    metas: Mapping[str, TensorMeta | list[int]],
    options: Options,
    limits: Limits,
) -> tuple[ResolvedOp, Callable[[], Computation]]:
    """Check the verification of a result; return the operation, with the result as its last input, and what plans it.

    Raises what `engine.prepare.check` raises; planning raises `TooLarge` for its scratch memory or units.
    """
    refuse_options(options, ("outputs", "reference", "reproducible"), "a verification")
    called = find_operation(name)
    spellings = called.operation.output_spellings
    given = {key: meta for key, meta in metas.items() if key in spellings}
    if len(given) != 1:
        names = " or ".join(called.wire_names[row.name] for row in called.operation.outputs)
        msg = f"send exactly one result to verify, as the input {names}"
        raise invalid_params(name, [broken_rule(["inputs"], msg, "missing" if not given else "conflict")])
    ((key, meta),) = given.items()
    rest = {name: value for name, value in metas.items() if name not in given}
    op = resolve(name, attributes, rest, outputs=(spellings[key],))
    _check_result(op, key, meta)
    check_algorithm(name, options.algorithm, [("", op)])
    result = TensorSpec(op.output.name, op.dtype, op.output.shape)
    fast = is_fast(op, limits, options.fast)
    verified = replace(op, inputs=(*op.inputs, result), macs=work_of_verification(op, fast=fast))
    check_limits(verified, limits, work_of_taps(op))
    return verified, partial(plan_verification_call, verified, limits, explain=options.explain, fast=fast)


def report_of(prepared: Prepared, output: bytes | memoryview, stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report in the output of a finished verification, with the call's names, as JSON."""
    op, (computation,) = prepared.op, prepared.computations
    judged = read_report(output)
    factors = [op.wire_name(name) for name in computation.inputs[:-1]]
    report = {"op": op.called_as, "output": op.wire_name(op.output.name), "passed": judged.pop("passed"), **judged}
    return report | {"factors": factors[:2], "resolved": op.reply_attributes(), "stats": stats} | op.reply_warnings


def _check_result(op: ResolvedOp, key: str, meta: TensorMeta | list[int]) -> None:
    loc, broken = ["inputs", key], []
    if not isinstance(meta, TensorMeta):
        broken.append(broken_rule(loc, f"{key} must be a tensor", "type"))
    else:
        if meta.dtype != op.dtype:
            msg = f"{key} must be {op.dtype} like the inputs, but is {meta.dtype}"
            if meta.dtype in (*DTYPE_NAMES, *REFERENCE_DTYPES):
                msg += f": to verify a result of {meta.dtype}, convert the inputs to {meta.dtype}"
            broken.append(broken_rule([*loc, "dtype"], msg, "mixed_dtypes"))
        if meta.shape != op.output.shape:
            msg = f"{key} must have shape {dims(op.output.shape)}, but has {dims(meta.shape)}"
            broken.append(broken_rule([*loc, "shape"], msg, "output_shape"))
    if broken:
        raise invalid_params(op.called_as, broken)
