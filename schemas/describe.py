"""The tables as plain JSON, for `ops.list`, `ops.describe` and `GET /v1/ops`."""

from __future__ import annotations

import re
from typing import Any

from schemas.examples import call_example, described
from schemas.rows import DTYPE_NAMES, REFERENCE_DTYPES, WEIGHTS_FORMATS, AttributeRow, TensorRow
from schemas.tables import OPERATIONS, CalledOperation, find_operation

__all__ = ["describe", "example", "list_operations", "weights_layouts"]

_NAME = re.compile(r"`(\w+)`")
_DATA_LAYOUTS = {"NXC": "(N, X, channels)", "NCX": "(N, channels, X)"}


def list_operations() -> list[dict[str, Any]]:
    """Return a short entry for each operation, with all of its names."""
    return [
        {
            "op": operation.name,
            "aliases": operation.aliases,
            "summary": operation.summary,
            "inputs": [row.name for row in operation.inputs],
            "outputs": [row.name for row in operation.outputs],
            "dtypes": list(DTYPE_NAMES),
        }
        for operation in OPERATIONS
    ]


def describe(op: str) -> dict[str, Any]:
    """Return the table of an operation, in the dialect of the name or alias given.

    Raises `UnknownOperation`.
    """
    called = find_operation(op)
    operation = called.operation
    return {
        "op": called.called_as,
        "operation": operation.name,
        "dialect": called.dialect,
        "names": list(operation.names),
        "summary": operation.summary,
        "formula": operation.formula,
        "attributes": [_attribute(called, row) for row in operation.attributes],
        "inputs": [_tensor(called, row, index) for index, row in enumerate(operation.inputs)],
        "outputs": [_tensor(called, row, index) for index, row in enumerate(operation.outputs)],
        "dtypes": list(DTYPE_NAMES),
        "reference_dtypes": list(REFERENCE_DTYPES),
        "ranks": list(operation.ranks),
        "layouts": {
            "data": dict(_DATA_LAYOUTS),
            "weights": weights_layouts(called),
        },
        "pages": list(operation.pages),
        "example": call_example(called),
    }


def _attribute(called: CalledOperation, row: AttributeRow) -> dict[str, Any]:
    return {
        "name": row.spelled(called.dialect),
        "aliases": row.others(called.dialect),
        "type": row.kind,
        "required": row.required,
        "default": row.default_in(called.dialect),
        "minimum": row.minimum,
        "values": list(row.choices) or None,
        "description": _respelled(called, row.doc),
    }


def _tensor(called: CalledOperation, row: TensorRow, index: int) -> dict[str, Any]:
    return {
        "index": index,
        "name": row.spelled(called.dialect),
        "aliases": row.others(called.dialect),
        "required": row.required,
        **({} if row.only_for is None else {"only_for": called.wire_names[row.only_for]}),
        "dtypes": list(DTYPE_NAMES) if row.dtypes == "T" else ["s32"],
        "description": _respelled(called, row.doc),
    }


def _respelled(called: CalledOperation, text: str) -> str:
    """Replace the names in a text by their spelling in the dialect called."""
    return _NAME.sub(lambda found: f"`{called.wire_names.get(found[1], found[1])}`", text)


def weights_layouts(called: CalledOperation) -> dict[str, dict[str, str]]:
    """Return the shapes of each weights format, by the axis that groups divide, oneDNN's own reading first.

    An operation without weights has none.
    """
    if not called.operation.convolves:
        return {}
    divided = ("O", "I") if called.operation.transposed else ("I",)
    return {
        name: {
            axis: "(" + ", ".join(f"{letter}/g" if letter == axis else letter for letter in name) + ")"
            for axis in divided
        }
        for name in WEIGHTS_FORMATS
    }


def example(called: CalledOperation) -> dict[str, Any]:
    """Return the small call without the data of its tensors, as `ops.validate` takes it."""
    call = call_example(called)
    return {"attributes": call["attributes"], "inputs": described(call["inputs"])}
