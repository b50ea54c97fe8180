"""From a call's name, attributes, tensors' shapes and options to its plans, checked against all rules and limits.

What Winograd's algorithm can compute and promises is here too (`options.algorithm`).

Calls are remembered by their arguments: training repeats the calls of the same few layers. Keys are exact about types,
as the rules are, where Python takes True, 1 and 1.0 as equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from engine.arithmetic import arithmetic_of
from engine.options import Options, check_encoding, refuse_options
from engine.planning import (
    Limits,
    Prepared,
    check_limits,
    is_fast,
    is_planned_at_once,
    plan_call,
    plan_verification_call,
    problem_of,
    verification_cost,
    work_of_taps,
    work_of_tolerance,
    work_of_verification,
)
from kernels.cache import CACHE
from kernels.problem import Algorithm
from kernels.target import target
from kernels.winograd.rules import FAMILY, Refusal, exact_factor, refusals, winograd_macs
from schemas.broken_rules import broken_rule, dims, invalid_params
from schemas.ops import ResolvedOp, TensorMeta, require_reference, resolve
from schemas.rows import DTYPE_NAMES, MAX_DIMS, REFERENCE_DTYPES
from schemas.tables import find_operation
from schemas.tensors import TensorSpec
from verify.arithmetic import Arithmetic
from verify.tolerance import wide_dtype
from verify.unit import read_report

__all__ = ["Metas", "Preparer", "check_algorithm", "describe", "describe_winograd", "report_of", "tolerance_of"]

Metas = Mapping[str, TensorMeta | list[int]]
"""Dtype and shape of each input, and the values of shapes, by the names that the caller used."""

_NUMBERS = itertools.count()
_MAX_MEMBERS = 16
_MAX_TEXT = 64
_INTEGERS = frozenset((int,))


def _check(name: str, attributes: Mapping[str, Any], metas: Metas, options: Options, limits: Limits) -> ResolvedOp:
    """Check everything that does not need the tensors' bytes: names, rules, shapes, options, limits.

    Raises `UnknownOperation`, `InvalidParams`, `Unsupported` or `TooLarge`.
    """
    op = resolve(name, attributes, metas, outputs=options.outputs)
    if not options.uses_reference:
        require_reference(op)
    check_encoding(options, ((op.wire_name(spec.name), spec.shape) for spec in op.outputs))
    check_algorithm(op.called_as, options.algorithm, [("", op)])
    if options.algorithm == "winograd" and limits.device != "cpu":
        rule = "algorithm must be direct or auto on a GPU, but is winograd"
        raise invalid_params(op.called_as, [broken_rule(["options", "algorithm"], rule, "algorithm")])
    check_limits(op, limits)
    return op


def _check_verification(
    name: str, attributes: Mapping[str, Any], metas: Metas, options: Options, limits: Limits
) -> tuple[ResolvedOp, bool]:
    """Check the verification of a result; return the operation, with the result as its last input, and if it is fast.

    Raises what `_check` raises.
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
    return verified, fast


def _check_tolerance(
    name: str, attributes: Mapping[str, Any], metas: Metas, options: Options, limits: Limits
) -> tuple[ResolvedOp, Arithmetic]:
    """Check the call that a tolerance is for; return the operation, and the arithmetic that its kernel declares.

    Raises what `_check` raises.
    """
    refuse_options(options, ("reference", "reproducible", "explain", "fast"), "a tolerance")
    if len(options.outputs) > 1:
        msg = f"a tolerance is of one output, but outputs has {len(options.outputs)}"
        raise invalid_params("options", [broken_rule(["options", "outputs"], msg, "conflict")])
    op = resolve(name, attributes, metas, outputs=options.outputs)
    check_algorithm(name, options.algorithm, [("", op)])
    said = _declared(options, op)
    wide = replace(op.output, dtype=wide_dtype(op.dtype))  # the reference, and as many tolerances
    op = replace(op, outputs=(wide, wide), macs=work_of_tolerance(op, said))
    check_encoding(options, [("reference", wide.shape)])
    check_limits(op, limits, work_of_taps(op))
    return op, said


def _declared(options: Options, op: ResolvedOp) -> Arithmetic:
    return arithmetic_of(None if options.arithmetic is None else dict(options.arithmetic), op)


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


class Preparer:
    """Prepare calls within `limits`, and remember them with their plans (`kernels.cache`)."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._number = next(_NUMBERS)

    def prepare(
        self, name: str, attributes: Mapping[str, Any], metas: Metas, options: Options, *, verify: bool = False,
        tolerance: bool = False,
    ) -> Prepared:  # fmt: skip
        """Check and plan a call; raises what `check` raises, and `TooLarge` for its scratch memory or units.

        With `verify` it is the verification of a result, which is among the inputs under the name of an output; with
        `tolerance` the tolerance of the results of the call.
        """
        found = None if verify or tolerance else self.known(name, attributes, metas, options)
        return found or self.check(name, attributes, metas, options, verify=verify, tolerance=tolerance)[0]()

    def check(
        self, name: str, attributes: Mapping[str, Any], metas: Metas, options: Options, *, verify: bool = False,
        tolerance: bool = False,
    ) -> tuple[Callable[[], Prepared], bool]:  # fmt: skip
        """Check a call that is not `known`; return what plans it, and whether that is fast enough for an event loop.

        Raises `UnknownOperation`, `InvalidParams`, `Unsupported` or `TooLarge`.
        """
        if verify:
            op, fast = _check_verification(name, attributes, metas, options, self.limits)
            said = _declared(options, op)

            def plan_verification() -> Prepared:
                computation = plan_verification_call(op, self.limits, said, explain=options.explain, fast=fast)
                return Prepared(op, (computation,), options, _named(op, metas))

            return plan_verification, options.fast is True or is_planned_at_once(op, reference=True)
        if tolerance:
            op, said = _check_tolerance(name, attributes, metas, options, self.limits)

            def plan_tolerance() -> Prepared:
                computation = plan_verification_call(op, self.limits, said, tolerance=True)
                return Prepared(op, (computation,), options, _named(op, metas))

            return plan_tolerance, is_planned_at_once(op, reference=True)
        op = _check(name, attributes, metas, options, self.limits)

        def plan() -> Prepared:
            computations = plan_call(op, self.limits, options.uses_reference, options.algorithm)
            return self.keep(attributes, metas, Prepared(op, computations, options, _named(op, metas)))

        return plan, is_planned_at_once(op, options.uses_reference)

    def known(self, name: str, attributes: object, metas: object, options: Options) -> Prepared | None:
        """Return the call if it was prepared before."""
        key = self._key(name, attributes, metas, options)
        entry = None if key is None else CACHE.find(key)
        if entry is None:
            return None
        found: Prepared = entry[0]
        return found if options.deadline_ms is None else replace(found, options=options)

    def keep(self, attributes: object, metas: object, prepared: Prepared) -> Prepared:
        """Remember a prepared call by its arguments, and return it."""
        options = prepared.options
        if (key := self._key(prepared.op.called_as, attributes, metas, options)) is not None:
            any_time = options._replace(deadline_ms=None)
            CACHE.keep(key, prepared if options.deadline_ms is None else replace(prepared, options=any_time))
        return prepared

    def _key(self, name: object, attributes: object, metas: object, options: Options) -> Hashable | None:
        """Return a key that only equal calls share; None for calls with unusual or long arguments."""
        if type(attributes) is not dict or type(metas) is not dict or type(name) is not str:
            return None
        if len(attributes) > _MAX_MEMBERS or len(metas) > _MAX_MEMBERS:
            return None
        parts: list[Any] = [self._number, name, options._replace(deadline_ms=None), len(attributes)]
        for members in (attributes, metas):
            for key, value in members.items():
                kind = type(value)
                if kind is TensorMeta:
                    parts.append(value.dtype)
                    value = value.shape
                    kind = type(value)
                if kind is tuple or kind is list:
                    if len(value) > MAX_DIMS or not _INTEGERS.issuperset(map(type, value)):
                        return None
                    value = tuple(value)
                elif kind is not int and (kind is not str or len(value) > _MAX_TEXT):
                    return None
                parts += (key, value)
        return tuple(parts)


def _named(op: ResolvedOp, metas: Metas) -> dict[str, str]:
    """Return the names that the caller gave the inputs, by canonical name."""
    operation = op.called.operation
    spellings = {**operation.output_spellings, **operation.input_spellings}  # a result to verify is an input too
    return {spellings[name]: name for name in metas if name in spellings}


def describe(prepared: Prepared, limits: Limits) -> dict[str, Any]:
    """Describe a call as JSON: resolved attributes, outputs, plan and cost."""
    op = prepared.op
    plan = prepared.describe()
    if len(op.outputs) == 1:  # several can't be verified at once
        plan["winograd"] = describe_winograd(op)
        plan["verify"] = verification_cost(op, limits)
    outputs = {op.wire_name(spec.name): spec.as_json() for spec in op.outputs}
    reply = {"op": op.called_as, "outputs": outputs, "resolved": prepared.resolved, "plan": plan}
    return reply | op.reply_warnings


def report_of(prepared: Prepared, output: bytes | memoryview, stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report in the output of a finished verification, with the call's names, as JSON."""
    op, (computation,) = prepared.op, prepared.computations
    judged = read_report(output)
    factors = [op.wire_name(name) for name in computation.inputs[:-1]]
    report = {"op": op.called_as, "output": op.wire_name(op.output.name), "passed": judged.pop("passed"), **judged}
    return report | {"factors": factors[:2], "resolved": op.reply_attributes(), "stats": stats} | op.reply_warnings


def tolerance_of(prepared: Prepared, output: memoryview, stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report in the output of a finished tolerance, with the call's names, as JSON."""
    op = prepared.op
    found = {"op": op.called_as, "output": op.wire_name(op.output.name), **read_report(output)}
    return found | {"resolved": op.reply_attributes(), "stats": stats} | op.reply_warnings


_NOT_COMPILED = "winograd needs compiled code; none works on this machine's processor (/readyz has the reason)"

_PROMISES = (
    "the same bits for any number of workers, on every API",
    "exact sums of integers, if the product of their largest magnitudes is at most exact_product",
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
