"""Normalise a call's attributes: canonical names and plain values, from either spelling, wrapped or not.

Only names, wrappers and absent values are handled here; `schemas.attributes` validates the values. `advice` explains
unknown names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from schemas.broken_rules import BrokenRule, broken_rule, safe_key
from schemas.frameworks import name_here
from schemas.rows import MAX_DIMS, AttributeRow
from schemas.tables import CalledOperation, near_miss

__all__ = ["advice", "canonical", "check_members", "same_value"]


def canonical(called: CalledOperation, given: Any) -> tuple[dict[str, Any], dict[str, str], list[BrokenRule]]:
    """Return the values by canonical name, the spelling used for each, and what is wrong with the names."""
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    broken: list[BrokenRule] = []
    wrong: set[str] = set()
    spellings = called.operation.attribute_spellings
    for key, raw in given.items():
        name = spellings.get(key) if isinstance(key, str) else None
        if name is None:
            broken.append(_unknown(called, key))
            continue
        value = raw
        if isinstance(raw, Mapping):
            value, mistake = _unwrapped(called.operation.attribute[name], key, raw)
            if mistake is not None:
                broken.append(mistake)
                wrong.add(name)
        value = _normalised(name, value)
        if value is None:
            continue
        if name in values and not same_value(values[name], value):
            msg = f"{key} is another spelling of {spelled[name]}, and the two have different values"
            broken.append(broken_rule(["attributes", key], msg, "conflict"))
            continue
        values[name] = value
        spelled[name] = key
    broken.extend(_missing(called, values, wrong))
    return values, spelled, broken


def _unknown(called: CalledOperation, key: object) -> BrokenRule:
    name = safe_key(key)
    msg = f"{'this attribute' if name == '?' else name} is not an attribute of {called.called_as}"
    return broken_rule(["attributes", name], msg + advice(called, key, "attribute"), "unknown_attribute")


def advice(called: CalledOperation, name: object, kind: Literal["attribute", "input", "output"]) -> str:
    """Return the end of the message about an unknown name: its kind if it is another, or its name here."""
    operation = called.operation
    spellings = {
        "attribute": operation.attribute_spellings,
        "input": operation.input_spellings,
        "output": operation.output_spellings,
    }
    others = [other for other, names in spellings.items() if name in names]
    if others:
        return f"; it is an {others[0]}"
    here = name_here(name)
    if here is None:
        hint = near_miss(name, spellings[kind])
        return f"; did you mean {hint}?" if hint else ""
    notes = [here.note, here.transposed if operation.transposed else ""]
    note = f" ({'; '.join(filter(None, notes))})" if any(notes) else ""
    for names in map(str.split, here.names):
        if all(each in called.wire_names for each in names):
            use = " and ".join(called.wire_names[each] for each in names)
            other = next(other for other in (kind, *spellings) if names[0] in spellings[other].values())
            return f"; use {use}{'' if other == kind else f', an {other}'}{note}"
    if not here.names:
        return f"; {here.note}"
    return f"; it is {here.names[0].replace(' ', ' and ')} here, which {called.called_as} does not have"


def _unwrapped(row: AttributeRow, key: str, raw: Mapping[Any, Any]) -> tuple[Any, BrokenRule | None]:
    if set(raw) != {"type", "value"}:
        msg = f'{key} must be a plain value, or {{"type": "{row.kind}", "value": ..}}'
        return None, broken_rule(["attributes", key], msg, "wrapped_value")
    if raw["type"] != row.kind:
        return None, broken_rule(["attributes", key, "type"], f"the type of {key} is {row.kind}", "wrapped_type")
    return raw["value"], None


def _normalised(name: str, value: Any) -> Any:
    """Turn the values that mean "not given" into None, and `auto_pad` into lower case."""
    if name == "auto_pad" and isinstance(value, str):
        folded = value.lower() if len(value) <= 16 else value
        # ONNX writes NOTSET for explicit padding.
        return "none" if folded == "notset" else folded
    if name in ("weights_shape", "dst_shape", "output_padding") and isinstance(value, list | tuple):
        # oneDNN's own default is twelve zeros. A shorter list of zeros is a real output padding, but no
        # shape.
        unset = len(value) in (0, MAX_DIMS) or (name != "output_padding" and len(value) < MAX_DIMS)
        return None if unset and all(type(item) is int and item == 0 for item in value) else value
    return value


def same_value(first: Any, second: Any) -> bool:
    """Whether the values of two spellings of one attribute are the same."""
    # Nested lists are not compared: they are wrong anyway, and deep ones would exhaust the stack.
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) <= MAX_DIMS and all(
            type(a) is type(b) is int and a == b for a, b in zip(first, second, strict=True)
        )
    return isinstance(first, str | int) and type(first) is type(second) and bool(first == second)


def _missing(called: CalledOperation, values: Mapping[str, Any], wrong: set[str]) -> Iterator[BrokenRule]:
    needs_pads = values.get("auto_pad", "none") == "none" and "auto_pad" not in wrong
    for row in called.operation.attributes:
        if row.name in values or row.name in wrong:
            continue
        if row.required == "yes":
            yield broken_rule(["attributes", row.name], f"{row.name} is required", "missing")
        elif row.required == "unless auto_pad" and needs_pads:
            msg = f"{row.name} is required while auto_pad is none; [] means no padding"
            yield broken_rule(["attributes", row.name], msg, "missing")


def check_members(request: Mapping[str, Any], members: tuple[str, ...], rule: str, broken: list[BrokenRule]) -> None:
    """Append the rule that each unknown member of a request breaks."""
    for name in request:
        if name not in members:
            hint = near_miss(name, members, broken)
            message = f"{rule}; did you mean {hint}?" if hint else rule
            broken.append(broken_rule([safe_key(name)], message, "unknown_member"))
