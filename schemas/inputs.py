"""Inputs of a call: dtype and shape by canonical name, and the rules that involve inputs only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from schemas.broken_rules import BrokenRule, broken_rule, members_rule, number, safe_key
from schemas.rows import DTYPE_NAMES, MAX_DIMS, REFERENCE_DTYPES
from schemas.shapes import INT32_MAX
from schemas.spelling import advice, same_value
from schemas.tables import CalledOperation
from schemas.tensors import TensorMeta, read_meta

__all__ = ["Inputs", "read_inputs"]


@dataclass(slots=True)
class Inputs:
    """The valid inputs of a call by canonical name.

    `shape` is the value of the input that is a shape; None if it is absent, or a tensor whose values are unknown here.
    `dtype` is the type T of the call. `unsupported` is the broken rule of the first dtype that the operation does not
    have.
    """

    metas: dict[str, TensorMeta] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)
    shape: tuple[int, ...] | None = None
    values_unknown: bool = False
    dtype: str | None = None
    unsupported: BrokenRule | None = None


def read_inputs(called: CalledOperation, given: object) -> tuple[Inputs, list[BrokenRule]]:
    """Return the inputs of a call, and the rules that each breaks by itself or by its dtype."""
    inputs = Inputs()
    broken: list[BrokenRule] = []
    unusable = members_rule(given, ["inputs"])
    if unusable is not None:
        inputs.bad.update(row.name for row in called.operation.inputs)
        return inputs, [unusable]
    values = _by_name(called, given, inputs, broken)
    for row in called.operation.inputs:
        if row.name in values:
            key = inputs.spelled[row.name]
            before = len(broken)
            if row.dtypes == "s32":
                inputs.shape = _shape_values(values[row.name], key, row.name != "weights_shape", broken)
                inputs.values_unknown = not isinstance(values[row.name], list | tuple)
            else:
                ranks = (1,) if row.name == "bias" else called.operation.ranks
                _tensor(row.name, values[row.name], key, ranks, inputs, broken)
            if len(broken) > before:
                inputs.bad.add(row.name)
        elif row.required and row.name not in inputs.bad:
            name = called.wire_names[row.name]
            broken.append(broken_rule(["inputs", name], f"{name} is required", "missing"))
            inputs.bad.add(row.name)
    return inputs, broken


def _by_name(called: CalledOperation, given: Any, inputs: Inputs, broken: list[BrokenRule]) -> dict[str, object]:
    values: dict[str, object] = {}
    spellings = called.operation.input_spellings
    for key, value in given.items():
        name = spellings.get(key) if isinstance(key, str) else None
        if name is None:
            shown = safe_key(key)
            msg = f"{'this input' if shown == '?' else shown} is not an input of {called.called_as}"
            names = ", ".join(called.wire_names[row.name] for row in called.operation.inputs)
            msg += advice(called, key, "input") or f": it has {names}"
            broken.append(broken_rule(["inputs", shown], msg, "unknown_input"))
        elif value is None:
            continue
        elif name in values and not same_value(values[name], value):
            # Two tensors can't be compared before their data arrives, so a second one is an error.
            msg = f"{key} is another spelling of {inputs.spelled[name]}: give one"
            broken.append(broken_rule(["inputs", str(key)], msg, "conflict"))
            inputs.bad.add(name)
        else:
            values.setdefault(name, value)
            inputs.spelled[name] = str(key)
    return values


def _tensor(
    name: str, value: object, key: str, ranks: tuple[int, ...], inputs: Inputs, broken: list[BrokenRule]
) -> None:
    meta = read_meta(value, ["inputs", key], broken)
    if meta is None:
        return
    if meta.dtype not in (*DTYPE_NAMES, *REFERENCE_DTYPES):
        msg = f"{key} must be {', '.join(DTYPE_NAMES[:-1])} or {DTYPE_NAMES[-1]}, or f64 with options.reference"
        wrong = broken_rule(["inputs", key, "dtype"], msg, "unsupported_dtype")
        inputs.unsupported = inputs.unsupported or wrong
        broken.append(wrong)
        return
    if inputs.dtype is None:
        inputs.dtype = meta.dtype
    elif meta.dtype != inputs.dtype:
        first = next(iter(inputs.metas))
        msg = f"{key} must be {inputs.dtype} like {inputs.spelled[first]}, but is {meta.dtype}"
        broken.append(broken_rule(["inputs", key, "dtype"], msg, "mixed_dtypes"))
    _check_sizes(name, key, meta.shape, ranks, broken)
    inputs.metas[name] = meta


def _check_sizes(name: str, key: str, shape: tuple[int, ...], ranks: tuple[int, ...], broken: list[BrokenRule]) -> None:
    if len(shape) not in ranks:
        *others, last = map(str, ranks)
        rule = f"{', '.join(others)} or {last} dimensions" if others else f"{last} dimension"
        broken.append(broken_rule(["inputs", key, "shape"], f"{key} must have {rule}, but has {len(shape)}", "rank"))
        return
    # The batch alone may be empty: it is the leading axis in either data format.
    first = 1 if name in ("src", "diff_dst") else 0
    for axis in range(first, len(shape)):
        if shape[axis] == 0:
            msg = f"{key} must have at least 1 element on axis {axis}, but has 0; only the batch may be empty"
            broken.append(broken_rule(["inputs", key, "shape", axis], msg, "empty"))


def _shape_values(value: object, key: str, may_be_empty: bool, broken: list[BrokenRule]) -> tuple[int, ...] | None:
    """Return the values of a shape input, or None if they are absent, unknown or invalid."""
    loc: list[str | int] = ["inputs", key]
    if isinstance(value, list | tuple):
        return _listed(value, key, 0 if may_be_empty else 1, broken)
    meta = read_meta(value, loc, broken)
    if meta is not None and meta.dtype != "s32":
        broken.append(broken_rule([*loc, "dtype"], f"{key} must be s32, or a JSON list of integers", "shape_dtype"))
    if meta is not None and len(meta.shape) != 1:
        msg = f"{key} must have 1 dimension, but has {len(meta.shape)}"
        broken.append(broken_rule([*loc, "shape"], msg, "rank"))
    return None


def _listed(
    value: list[object] | tuple[object, ...], key: str, least: int, broken: list[BrokenRule]
) -> tuple[int, ...] | None:
    if len(value) > MAX_DIMS:
        msg = f"{key} must have at most {MAX_DIMS} values, but has {len(value)}"
        broken.append(broken_rule(["inputs", key], msg, "too_long"))
        return None
    sizes: list[int] = []
    for axis, size in enumerate(value):
        if type(size) is not int:
            broken.append(broken_rule(["inputs", key, axis], f"{key}[{axis}] must be an integer", "int_type"))
        elif not 0 <= size <= INT32_MAX:
            msg = f"{key}[{axis}] must be from {least} to {INT32_MAX}, but is {number(size)}"
            broken.append(broken_rule(["inputs", key, axis], msg, "range"))
        else:
            sizes.append(size)
    # oneDNN writes an absent shape as zeros.
    return tuple(sizes) if len(sizes) == len(value) and any(sizes) else None
