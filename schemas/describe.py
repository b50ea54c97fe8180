"""The tables as plain JSON, for `ops.list`, `ops.describe` and `GET /v1/ops`."""

from __future__ import annotations

import re
from typing import Any

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
            "aliases": list(operation.names[1:]),
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
        "example": example(called),
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
    """Return a small valid call: attributes, and inputs as dtype and shape, as for `ops.validate`."""
    names = called.wire_names
    attributes: dict[str, Any] = {"data_format": "NCX"}
    if called.operation.convolves:
        attributes = {
            "strides": [2, 2],
            "pads_begin": [1, 1],
            "pads_end": [1, 1],
            "dilations": [1, 1],
            **attributes,
            names["weights_format"]: "IOX" if called.operation.transposed else "OIX",
        }
    # The same layer in both directions: the transposed convolution turns 4 x 4 into 8 x 8.
    large, small, weights = [1, 8, 8, 8], [1, 16, 4, 4], [16, 8, 4, 4]
    src, dst = (small, large) if called.operation.transposed else (large, small)
    shapes = {"src": src, "diff_dst": dst, "weights": weights}
    if called.operation.name == "BiasAdd":
        shapes["bias"] = src[1:2]
    given: dict[str, Any] = {name: {"dtype": "f32", "shape": shape} for name, shape in shapes.items()}
    given |= {"weights_shape": weights, "dst_shape": src}
    rows = [row for row in called.operation.inputs if row.only_for is None]
    inputs = {names[row.name]: given[row.name] for row in rows if row.name in given}
    return {"attributes": attributes, "inputs": inputs}
