"""Sealed checks in the API documents: what each method takes and returns, for OpenAPI and OpenRPC alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CHECK_METHODS", "CheckMethod"]

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckMethod:
    """A method: what it does, the schemas of its params and which are required, and members of its result."""

    summary: str
    params: Mapping[str, Schema]
    required: tuple[str, ...]
    returns: Mapping[str, Schema]

    @property
    def result(self) -> Schema:
        """The schema of the result."""
        return {"type": "object", "required": [*self.returns], "properties": dict(self.returns)}


def _of(kind: str | list[str], description: str, **more: Any) -> Schema:
    return {"type": kind, "description": description, **more}


_CHECK = _of("string", "Id of the check.")
_CASE = _of(["integer", "null"], "Number of the case, from 0 on; null after the last.")
_CASES = _of("integer", "Number of cases of the check, by default 50.", minimum=1)
_TAKES = (
    "What the kernel takes: lists `ops`, `dtypes`, `ranks`, `data_formats`, `weights_formats`; flags `strides`, "
    "`dilations`, `pads`, `uneven_pads`, `groups`, `bias`, `empty`. By default everything but f64."
)
_RESULT = "The result, under the name of the output."
_OUTCOME = "In place of a result, if the kernel has none."
_KEY_ID = _of("string", "Id of the key that signs.")

CHECK_METHODS: dict[str, CheckMethod] = {
    "check.begin": CheckMethod(
        "Begin a sealed check of a kernel.",
        {"takes": _of("object", _TAKES), "cases": _CASES, "label": _of("string", "What is checked.", maxLength=200)},
        (),
        {"check": _CHECK, "cases": _CASES, "key_id": _KEY_ID},
    ),
    "check.next": CheckMethod(
        "Return the next case: the same one until it is answered or late.",
        {
            "check": _CHECK,
            "send": _of("string", "The inputs, or the seed that convgrad makes them from.", enum=["tensors", "seed"]),
            "options": _of("object", "`encoding` of the inputs, as in a call."),
        },
        ("check",),
        {"check": _CHECK, "case": _CASE, "cases": _CASES},
    ),
    "check.submit": CheckMethod(
        "Judge the kernel's result of the case that is open, or note that it has none.",
        {
            "check": _CHECK,
            "case": _of("integer", "Number of the case.", minimum=0),
            "inputs": _of("object", _RESULT),
            "outcome": _of("string", _OUTCOME, enum=["unsupported", "failed"]),
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
            "counts": _of("object", "Number of cases by status."),
            "cases": _of("array", "Status, seed and SHA-256 of the result of each case.", items={"type": "object"}),
            "signature": _of("object", "`algorithm`, `key_id` and `value`."),
        },
    ),
    "check.drop": CheckMethod("Forget a check.", {"check": _CHECK}, ("check",), {"check": _CHECK}),
    "check.verify_signature": CheckMethod(
        "Say whether this service signed a document.",
        {"document": _of("object", "What check.finish returned.")},
        ("document",),
        {
            "valid": {"type": "boolean"},
            "reason": {"enum": ["not_signed", "other_key", "changed", None]},
            "key_id": _KEY_ID,
        },
    ),
}
"""The methods by name."""
