"""Verify a caller's own result: it comes beside the inputs, under the name of the output that it should be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.calls.call import Call, Checked, Prepared
from app.calls.planning import Computation, check_limits, is_fast, plan_verification_call, work_of_verification
from app.calls.work import Result
from app.intake.options import Options
from app.settings import Settings
from schemas.ops import ResolvedOp, TensorMeta, resolve
from schemas.problems import dims, invalid_params, problem
from schemas.rows import DTYPE_NAMES, REFERENCE_DTYPES
from schemas.tables import find_operation
from schemas.tensors import TensorSpec
from verify.unit import read_report

__all__ = ["Verification", "check_verification", "verify_plan"]

Metas = Mapping[str, TensorMeta | list[int]]


def check_verification(
    name: str, attributes: Mapping[str, Any], inputs: Metas, settings: Settings, options: Options
) -> tuple[ResolvedOp, bool]:
    """Return the resolved operation whose last input is the result, and whether projections verify it.

    Raises what `Service.check` raises.
    """
    called = find_operation(name)
    spellings = called.operation.output_spellings
    given = {key: meta for key, meta in inputs.items() if key in spellings}
    if len(given) != 1:
        names = " or ".join(called.wire_names[row.name] for row in called.operation.outputs)
        msg = f"send exactly one result to verify, as the input {names}"
        raise invalid_params(name, [problem(["inputs"], msg, "missing" if not given else "conflict")])
    ((key, meta),) = given.items()
    rest = {name: value for name, value in inputs.items() if name not in given}
    op = resolve(name, attributes, rest, outputs=(spellings[key],))
    _check_result(op, key, meta)
    result = TensorSpec(op.output.name, op.dtype, op.output.shape)
    fast = is_fast(op, settings, options.fast)
    verified = replace(op, inputs=(*op.inputs, result), macs=work_of_verification(op, fast=fast))
    check_limits(verified, settings)
    return verified, fast


def _check_result(op: ResolvedOp, key: str, meta: TensorMeta | list[int]) -> None:
    loc, problems = ["inputs", key], []
    if not isinstance(meta, TensorMeta):
        problems.append(problem(loc, f"{key} must be a tensor", "type"))
    else:
        if meta.dtype != op.dtype:
            msg = f"{key} must be {op.dtype} like the inputs, but is {meta.dtype}"
            if meta.dtype in (*DTYPE_NAMES, *REFERENCE_DTYPES):
                msg += f": to verify a result of {meta.dtype}, convert the inputs to {meta.dtype}"
            problems.append(problem([*loc, "dtype"], msg, "mixed_dtypes"))
        if meta.shape != op.output.shape:
            msg = f"{key} must have shape {dims(op.output.shape)}, but has {dims(meta.shape)}"
            problems.append(problem([*loc, "shape"], msg, "output_shape"))
    if problems:
        raise invalid_params(op.called_as, problems)


def verify_plan(checked: Checked, settings: Settings, *, fast: bool) -> Prepared:
    """Plan the verification of a checked call, or a fast one; raises `TooLarge` for its scratch memory or units."""
    computation: Computation = plan_verification_call(checked.op, settings, explain=checked.options.explain, fast=fast)
    return Prepared(checked.op, (computation,), checked.options, checked.deadline)


class Verification(Call):
    """A call whose output is a report."""

    def result(self) -> Result:
        """Return the report of a finished verification."""
        op, (output,) = self.prepared.op, self.outputs
        judged = read_report(output.data)
        factors = [op.wire_name(name) for name in output.computation.inputs[:-1]]
        report = {"op": op.called_as, "output": output.name, "passed": judged.pop("passed"), **judged}
        report |= {"factors": factors[:2], "resolved": op.reply_attributes(), "stats": self.stats}
        return Result(report | ({"warnings": list(op.warnings)} if op.warnings else {}))
