"""Sealed checks in the API documents: what each method takes, for OpenAPI and OpenRPC alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from convgrad._check.problems import DTYPES, Takes

__all__ = ["CHECK_METHODS", "CheckMethod"]

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckMethod:
    """A method: what it does, the schemas of its params, the required ones, and the members of its result."""

    summary: str
    params: Mapping[str, Schema]
    required: tuple[str, ...]
    result: Mapping[str, Schema]


def _string(description: str, *values: str) -> Schema:
    return {"type": "string", "description": description, **({"enum": list(values)} if values else {})}


def _integer(description: str) -> Schema:
    return {"type": "integer", "minimum": 0, "description": description}


def _object(description: str) -> Schema:
    return {"type": "object", "description": description}


def _taken(name: str, default: Any) -> Schema:
    if isinstance(default, bool):
        return {"type": "boolean"}
    values = list(DTYPES if name == "dtypes" else default)
    kind = "integer" if isinstance(values[0], int) else "string"
    items = {"type": kind} if name == "ops" else {"type": kind, "enum": values}
    return {"type": "array", "minItems": 1, "items": items}


_CHECK = _string("Id of the check.")
_CASE = _integer("Number of the case, from 0 on; null after the last.")
_CASES = _integer("Number of cases of the check.")
_TAKES: Schema = {
    "type": "object",
    "description": "What the kernel takes; all by default, but not f64.",
    "properties": {each.name: _taken(each.name, each.default) for each in fields(Takes)},
    "additionalProperties": False,
}

CHECK_METHODS: dict[str, CheckMethod] = {
    "check.begin": CheckMethod(
        "Begin a sealed check of a kernel.",
        {
            "takes": _TAKES,
            "cases": {"type": "integer", "minimum": 1, "description": "Number of cases, by default 50."},
            "label": _string("What is checked, for the signed document: at most 200 characters of ASCII."),
        },
        (),
        {"check": _CHECK, "cases": _CASES, "key_id": _string("Id of the key that will sign.")},
    ),
    "check.next": CheckMethod(
        "Return the next case, or the last one again until it is answered or late.",
        {
            "check": _CHECK,
            "send": _string("Inputs, or what to generate them from with convgrad.", "tensors", "seed"),
            "options": _object("`encoding` of the inputs, as in a call."),
        },
        ("check",),
        {
            "check": _CHECK,
            "case": {"type": ["integer", "null"], "description": "Null after the last."},
            "cases": _CASES,
        },
    ),
    "check.submit": CheckMethod(
        "Judge the kernel's result of the case that is open, or note that it has none.",
        {
            "check": _CHECK,
            "case": _CASE,
            "inputs": _object("The result, under the name of the output."),
            "outcome": _string("In place of a result, if the kernel has none.", "unsupported", "failed"),
        },
        ("check", "case"),
        {"check": _CHECK, "case": _CASE},
    ),
    "check.finish": CheckMethod(
        "End a check and return its signed document.",
        {"check": _CHECK},
        ("check",),
        {
            "check": _CHECK,
            "passed": {"type": "boolean"},
            "counts": _object("Number of cases by status."),
            "cases": {"type": "array", "items": _object("A case: its status, seed, and SHA-256 of the result.")},
            "signature": _object("`algorithm`, `key_id` and `value`."),
        },
    ),
    "check.drop": CheckMethod("Forget a check.", {"check": _CHECK}, ("check",), {"check": _CHECK}),
    "check.verify_signature": CheckMethod(
        "Say whether this service signed a document.",
        {"document": _object("What check.finish returned.")},
        ("document",),
        {
            "valid": {"type": "boolean"},
            "reason": {"enum": ["not_signed", "other_key", "changed", None]},
            "key_id": _string("Id of the service's key."),
        },
    ),
}
"""The methods by name."""
