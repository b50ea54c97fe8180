"""The methods of sealed checks: the params that each takes, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.tables import OPERATIONS

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
_LISTS = {
    "ops": [row.name for row in OPERATIONS],
    "dtypes": ["f32", "f16", "bf16", "f64"],
    "ranks": [1, 2, 3],
    "data_formats": ["NCX", "NXC"],
    "weights_formats": ["OIX", "XIO", "IOX", "XOI"],
}
_FLAGS = ("strides", "dilations", "pads", "uneven_pads", "groups", "bias", "empty")
_TAKES = _of(
    ["object", "null"],
    "What the kernel takes, by default everything but f64.",
    properties={name: {"type": "array", "minItems": 1, "items": {"enum": each}} for name, each in _LISTS.items()}
    | {name: {"type": "boolean"} for name in _FLAGS},
    additionalProperties=False,
)
_LABEL = _of(["string", "null"], "What is checked, for the document.", pattern="^[ -~]{0,200}$")
_DIGEST = _of(["string", "null"], "SHA-256 of the kernel, for the document.", pattern="^(sha256:[0-9a-f]{64})?$")
_ARITHMETIC = _of(["object", "null"], "What the kernel says of its products and sums, as in a verification.")
_KEY_ID = _of("string", "Id of the key that signs.")

CHECK_METHODS: dict[str, CheckMethod] = {
    "check.begin": CheckMethod(
        "Begin a sealed check of a kernel.",
        {"takes": _TAKES, "cases": _CASES | {"type": ["integer", "null"], "maximum": 200}, "label": _LABEL}
        | {"digest": _DIGEST, "arithmetic": _ARITHMETIC},
        (),
        {"check": _CHECK, "cases": _CASES, "key_id": _KEY_ID},
    ),
    "check.next": CheckMethod(
        "Return the next case: the same one until it is answered or late.",
        {
            "check": _CHECK,
            "send": {"description": "The inputs, or a seed to make them from.", "enum": ["tensors", "seed", None]},
            "encoding": {"description": "Of inputs in JSON, as in a call.", "enum": ["base64", "npy", "list", None]},
        },
        ("check",),
        {"check": _CHECK, "case": _CASE, "cases": _CASES},
    ),
    "check.submit": CheckMethod(
        "Judge the kernel's result of the case that is open, or note that it has none.",
        {
            "check": _CHECK,
            "case": _of("integer", "Number of the case.", minimum=0),
            "inputs": _of(["object", "null"], "The result, under the name of the output or as `result`."),
            "outcome": {"description": "In place of a result.", "enum": ["unsupported", "failed", None]},
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
            "verdict": {"enum": ["passed", "incomplete", "failed"]},
            "passed": {"type": "boolean"},
            "counts": _of("object", "Number of cases by status."),
            "cases": _of("array", "Status, seed and SHA-256 of the result of each case.", items={"type": "object"}),
            "signature": _of("object", "`algorithm`, `key_id`, `public_key` and `value`."),
        },
    ),
    "check.drop": CheckMethod("Forget a check.", {"check": _CHECK}, ("check",), {"check": _CHECK}),
    "check.key": CheckMethod(
        "Return the public key that signs the documents.",
        {},
        (),
        {"algorithm": {"const": "Ed25519"}, "key_id": _KEY_ID, "public_key": _of("string", "Base64 of its 32 bytes.")},
    ),
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
