"""Verify a result of the caller's own, which is sent as one more input, under the name of the output."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from app.calls.algorithms import check_algorithm
from app.calls.call import Call
from app.calls.planning import (
    Prepared,
    check_limits,
    is_fast,
    is_planned_at_once,
    plan_verification_call,
    work_of_taps,
    work_of_verification,
)
from app.calls.service import Service
from app.calls.work import Result
from app.intake.options import parse_options, refuse_options
from app.intake.requests import RequestObject
from schemas.broken_rules import broken_rule, dims, invalid_params
from schemas.ops import ResolvedOp, TensorMeta, resolve
from schemas.rows import DTYPE_NAMES, REFERENCE_DTYPES
from schemas.tables import find_operation
from schemas.tensors import TensorSpec
from verify.unit import read_report

__all__ = ["Verification", "prepare_verification"]


async def prepare_verification(service: Service, request: RequestObject) -> Prepared:
    """Check and plan the verification of a result, which is among the inputs under the name of an output.

    The result becomes the last input of the resolved operation. Raises what `Service.check` and `Service.plan` raise.
    """
    options, settings, inputs = parse_options(request.options), service.settings, request.metas
    refuse_options(options, ("outputs", "reference", "reproducible"), "a verification")
    name = request.called_as
    called = find_operation(name)
    spellings = called.operation.output_spellings
    given = {key: meta for key, meta in inputs.items() if key in spellings}
    if len(given) != 1:
        names = " or ".join(called.wire_names[row.name] for row in called.operation.outputs)
        msg = f"send exactly one result to verify, as the input {names}"
        raise invalid_params(name, [broken_rule(["inputs"], msg, "missing" if not given else "conflict")])
    ((key, meta),) = given.items()
    rest = {name: value for name, value in inputs.items() if name not in given}
    op = resolve(name, request.attributes, rest, outputs=(spellings[key],))
    _check_result(op, key, meta)
    check_algorithm(name, options.algorithm, [("", op)])
    result = TensorSpec(op.output.name, op.dtype, op.output.shape)
    fast = is_fast(op, settings, options.fast)
    verified = replace(op, inputs=(*op.inputs, result), macs=work_of_verification(op, fast=fast))
    check_limits(verified, settings, work_of_taps(op))
    deadline = service.deadline(options.deadline_ms)
    plan = partial(plan_verification_call, verified, settings, explain=options.explain, fast=fast)
    at_once = fast or is_planned_at_once(op, reference=True)
    computation = plan() if at_once else await service.plan_in_thread(plan, deadline)
    return Prepared(verified, (computation,), options, deadline)


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


class Verification(Call):
    """A call whose output is a report."""

    streams = "progress"

    def result(self) -> Result:
        """Return the report of a finished verification."""
        op, (output,) = self.prepared.op, self.outputs
        judged = read_report(output.data)
        factors = [op.wire_name(name) for name in output.computation.inputs[:-1]]
        report = {"op": op.called_as, "output": output.name, "passed": judged.pop("passed"), **judged}
        report |= {"factors": factors[:2], "resolved": op.reply_attributes(), "stats": self.stats}
        return Result(report | op.reply_warnings)
