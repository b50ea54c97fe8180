"""The part of the OpenAPI document that is made from the tables: three paths for each operation, with their own bodies.

The routes are those of `rest.py` for any operation. A body has the plain form of a call, which generated clients can
type: the names of the new edition, no wrapped values. The service accepts the others too, and OpenRPC describes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from schemas.rows import Operation
from schemas.tables import OPERATIONS, CalledOperation, find_operation, verified
from schemas.wire import request_model, validate_model, verify_model

__all__ = ["any_parts", "operation_models", "operation_paths"]

_FILE = {"type": "string", "format": "binary"}
_KINDS = {
    "": (request_model, "", "{summary}\n\n{formula}"),
    "/validate": (validate_model, "validate_", "Check a call of {name} without computing it."),
    "/verify": (verify_model, "verify_", "Compare results of {name} with the float64 reference."),
}


def operation_models() -> list[type[BaseModel]]:
    """Return the models of the bodies of all operations."""
    return [make(_called(row), plain=True) for make, _, _ in _KINDS.values() for row in OPERATIONS]


def operation_paths(responses: Mapping[str, Mapping[Any, Any]], *, ref: str) -> dict[str, Any]:
    """Return the paths of all operations.

    `responses` are those of `""`, `/validate` and `/verify`, by status; `ref` is the reference to a model by name.
    """
    paths = {}
    for row in OPERATIONS:
        for suffix, (make, prefix, text) in _KINDS.items():
            words = {"summary": row.summary, "formula": row.formula, "name": row.name}
            summary, _, description = text.format(**words).partition("\n\n")
            model = make(_called(row), plain=True)
            paths[f"/v1/ops/{row.name}{suffix}"] = {
                "post": {
                    "tags": ["operations"],
                    "summary": summary,
                    "description": description or row.summary,
                    "operationId": prefix + _snake(row.name),
                    "requestBody": {
                        "required": True,
                        "content": {
                            "application/json": {"schema": {"$ref": ref.format(model=model.__name__)}},
                            "multipart/form-data": _parts(verified(_called(row)) if suffix else _called(row)),
                        },
                    },
                    "responses": {str(status): answer for status, answer in responses[suffix].items()},
                }
            }
    return paths


def any_parts() -> dict[str, Any]:
    """Describe the multipart form of a call of any operation, with tensors in either spelling."""
    names = {name: None for row in OPERATIONS for name in verified(_called(row)).operation.input_spellings}
    return _form(list(names))


def _parts(called: CalledOperation) -> dict[str, Any]:
    """Describe the multipart form of a call: the request object first, then a `.npy` file for each tensor."""
    return _form([row.name for row in called.operation.inputs])


def _form(names: list[str]) -> dict[str, Any]:
    request = {"type": "object", "description": "Attributes, options, and the inputs that are no part of the form."}
    return {
        "schema": {
            "type": "object",
            "required": ["request"],
            "properties": {"request": request, **dict.fromkeys(names, _FILE)},
        },
        "encoding": {
            "request": {"contentType": "application/json"},
            **{name: {"contentType": "application/x-npy, application/octet-stream"} for name in names},
        },
    }


def _called(row: Operation) -> CalledOperation:
    return find_operation(row.name)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
