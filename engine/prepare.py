"""From a call's name, attributes, tensors' shapes and options to its plans, checked against all rules and limits.

Calls are remembered by their arguments: training repeats the calls of the same few layers. Keys are exact about types,
as the rules are, where Python takes True, 1 and 1.0 as equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from engine.algorithms import check_algorithm, describe_winograd
from engine.limits import Limits
from engine.options import Options, check_encoding
from engine.planning import Prepared, check_limits, describe_plans, plan_call, verification_cost
from engine.verifying import plan_verified
from kernels.cache import CACHE
from schemas.ops import ResolvedOp, TensorMeta, require_reference, resolve
from schemas.rows import MAX_DIMS

__all__ = ["Metas", "Preparer", "check", "describe", "named"]

Metas = Mapping[str, TensorMeta | list[int]]
"""Dtype and shape of each input, and the values of shapes, by the names that the caller used."""

_NUMBERS = itertools.count()
_MAX_MEMBERS = 16
_MAX_TEXT = 64
_INTEGERS = frozenset((int,))


def check(name: str, attributes: Mapping[str, Any], metas: Metas, options: Options, limits: Limits) -> ResolvedOp:
    """Check everything that does not need the tensors' bytes: names, rules, shapes, options, limits.

    Raises `UnknownOperation`, `InvalidParams`, `Unsupported` or `TooLarge`.
    """
    op = resolve(name, attributes, metas, outputs=options.outputs)
    if not options.uses_reference:
        require_reference(op)
    check_encoding(options, ((op.wire_name(spec.name), spec.shape) for spec in op.outputs))
    check_algorithm(op.called_as, options.algorithm, [("", op)])
    check_limits(op, limits)
    return op


class Preparer:
    """Prepare calls within `limits`, and remember them with their plans (`kernels.cache`)."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._number = next(_NUMBERS)

    def known(self, name: str, attributes: object, metas: object, options: Options) -> Prepared | None:
        """Return the call if it was prepared before."""
        key = self._key(name, attributes, metas, options)
        entry = None if key is None else CACHE.find(key)
        if entry is None:
            return None
        found: Prepared = entry.value
        return found if options.deadline_ms is None else replace(found, options=options)

    def keep(self, attributes: object, metas: object, prepared: Prepared) -> Prepared:
        """Remember a prepared call by its arguments, and return it."""
        if (key := self._key(prepared.op.called_as, attributes, metas, prepared.options)) is not None:
            chosen = _without_deadline(prepared.options)
            CACHE.keep(key, prepared if chosen is prepared.options else replace(prepared, options=chosen))
        return prepared

    def prepare(self, name: str, attributes: Mapping[str, Any], metas: Metas, options: Options) -> Prepared:
        """Check and plan a call; raises what `check` raises, and `TooLarge` for its scratch memory or units."""
        found = self.known(name, attributes, metas, options)
        if found is not None:
            return found
        op = check(name, attributes, metas, options, self.limits)
        return self.keep(attributes, metas, self.plan(op, metas, options))

    def plan(self, op: ResolvedOp, metas: Metas, options: Options) -> Prepared:
        """Plan a checked call; raises `TooLarge` for its scratch memory or units."""
        computations = plan_call(op, self.limits, options.uses_reference, options.algorithm)
        return Prepared(op, computations, options, named(op, metas))

    def prepare_verification(
        self, name: str, attributes: Mapping[str, Any], metas: Metas, options: Options
    ) -> Prepared:
        """Check and plan the verification of a result, which is among the inputs under the name of an output."""
        op, plan = plan_verified(name, attributes, metas, options, self.limits)
        return Prepared(op, (plan(),), options, named(op, metas))

    def _key(self, name: object, attributes: object, metas: object, options: Options) -> Hashable | None:
        """Return a key that only equal calls share; None for calls with unusual or long arguments."""
        if type(attributes) is not dict or type(metas) is not dict or type(name) is not str:
            return None
        if len(attributes) > _MAX_MEMBERS or len(metas) > _MAX_MEMBERS:
            return None
        parts: list[Any] = [self._number, name, _without_deadline(options), len(attributes)]
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


def _without_deadline(options: Options) -> Options:
    return options if options.deadline_ms is None else options._replace(deadline_ms=None)


def named(op: ResolvedOp, metas: Metas) -> dict[str, str]:
    """Return the names that the caller gave the inputs, by canonical name."""
    operation = op.called.operation
    spellings = {**operation.output_spellings, **operation.input_spellings}  # a result to verify is an input too
    return {spellings[name]: name for name in metas if name in spellings}


def describe(prepared: Prepared, limits: Limits) -> dict[str, Any]:
    """Describe a call as JSON: resolved attributes, outputs, plan and cost."""
    op = prepared.op
    plan = describe_plans(op, prepared.computations)
    if len(op.outputs) == 1:  # several can't be verified at once
        plan["winograd"] = describe_winograd(op)
        plan["verify"] = verification_cost(op, limits)
    outputs = {op.wire_name(spec.name): spec.as_json() for spec in op.outputs}
    reply = {"op": op.called_as, "outputs": outputs, "resolved": prepared.resolved, "plan": plan}
    return reply | op.reply_warnings
