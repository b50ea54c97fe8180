"""The element types, with their names in oneDNN, the Open Inference Protocol, NumPy and `.npy` files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from convgrad._errors import Unsupported

__all__ = ["DTYPES", "MAX_RANK", "DType", "dtype", "dtype_of_array", "dtype_of_oip"]

MAX_RANK = 64
"""Axes that an array of NumPy may have."""


@dataclass(frozen=True, slots=True)
class DType:
    """An element type under all of its names; `itemsize` is in bytes."""

    name: str
    oip: str
    numpy: np.dtype[Any]
    npy: str
    itemsize: int


DTYPES: dict[str, DType] = {
    entry.name: entry
    for entry in (
        DType("f32", "FP32", np.dtype("<f4"), "<f4", 4),
        DType("f16", "FP16", np.dtype("<f2"), "<f2", 2),
        # NumPy has no bfloat16: ml_dtypes writes it as two void bytes.
        DType("bf16", "BF16", np.dtype(ml_dtypes.bfloat16), "<V2", 2),
        # Only the reference kernel computes f64.
        DType("f64", "FP64", np.dtype("<f8"), "<f8", 8),
        DType("s32", "INT32", np.dtype("<i4"), "<i4", 4),
        # Only the Open Inference Protocol API uses s64, for shapes.
        DType("s64", "INT64", np.dtype("<i8"), "<i8", 8),
    )
}

_BY_OIP = {entry.oip: entry for entry in DTYPES.values()}
_BY_NUMPY = {entry.numpy: entry for entry in DTYPES.values()}
_NUMPY_NAMES = [str(entry.numpy) for entry in DTYPES.values()]


def dtype(name: str) -> DType:
    """Return the element type with oneDNN's name, such as `bf16`; raises `Unsupported` for an unknown name."""
    return _found(DTYPES.get(name), list(DTYPES))


def dtype_of_oip(name: str) -> DType:
    """Return the element type with the Open Inference Protocol's name, such as `BF16`; raises `Unsupported`."""
    return _found(_BY_OIP.get(name), list(_BY_OIP))


def dtype_of_array(array: np.ndarray[Any, Any]) -> DType:
    """Return the element type of a NumPy array of either byte order; raises `Unsupported`."""
    found = _BY_NUMPY.get(array.dtype.newbyteorder("<"))
    if found is None and array.dtype.kind == "f":
        raise Unsupported(
            f"the dtype must be one of {', '.join(_NUMPY_NAMES)}, but is {array.dtype}: convert it, for example with"
            " .astype(numpy.float32)",
            data={"supported": _NUMPY_NAMES},
        )
    return _found(found, _NUMPY_NAMES)


def _found(entry: DType | None, known: list[str]) -> DType:
    if entry is None:
        raise Unsupported(f"the dtype must be one of {', '.join(known)}", data={"supported": known})
    return entry
