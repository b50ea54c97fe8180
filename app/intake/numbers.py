"""Tensor elements that are numbers in JSON: a list, flat or nested like the shape."""

from __future__ import annotations

import sys
from itertools import chain
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from app.intake.sinks import TensorFault
from convgrad._dtypes import DTYPES, DType

__all__ = ["elements_of"]

# Values that JSON has no numbers for.
_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_NUMBERS = frozenset((int, float))
_NESTED = "must be flat, or nested like its shape"
_BF16 = DTYPES["bf16"].numpy
_NAMES = {each.numpy: each.name for each in DTYPES.values()}


def elements_of(values: list[Any], dtype: DType, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return the elements of a tensor in C order; raises `TensorFault` unless they are its numbers."""
    flat = _flat(values, shape)
    kinds = set(map(type, flat))
    if not kinds <= _NUMBERS:
        flat = [_number(value) for value in flat]
    try:
        numbers = np.array(flat, np.float64)
    except OverflowError:
        raise _out_of_range() from None
    if kinds <= _NUMBERS and np.isinf(numbers).any():
        raise _out_of_range()  # 1e400 is read as infinity
    if len(numbers) != prod(shape):
        raise TensorFault(f"has {len(numbers)} numbers, but the shape needs {prod(shape)}", "size")
    return _cast(numbers, dtype.numpy)


def _flat(values: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """Return the numbers of nested lists, which must have the lengths of the shape; those of one list as they are."""
    if len(shape) < 2 or not values or not isinstance(values[0], list):
        return values
    level: list[Any] = [values]
    for depth, length in enumerate(shape):
        for index, entry in enumerate(level):
            if not isinstance(entry, list):
                raise TensorFault(f"{_NESTED}: it mixes numbers and lists", "nesting")
            if len(entry) != length:
                where = f"the list at {_place(index, shape[:depth])}" if depth else "the outermost list"
                raise TensorFault(f"{_NESTED}: {where} must have length {length}, but has {len(entry)}", "nesting")
        level = list(chain.from_iterable(level))
    return level


def _place(index: int, shape: tuple[int, ...]) -> list[int]:
    return [int(at) for at in np.unravel_index(index, shape)]


def _number(value: Any) -> float:
    if type(value) in _NUMBERS:
        if not abs(value) <= sys.float_info.max:
            raise _out_of_range()
        return float(value)
    if isinstance(value, list):
        raise TensorFault(f"{_NESTED}: it mixes numbers and lists", "nesting")
    if not isinstance(value, str) or value not in _WORDS:
        raise TensorFault('must hold only numbers, or the strings "NaN", "Infinity" and "-Infinity"', "number_type")
    return _WORDS[value]


def _out_of_range() -> TensorFault:
    return TensorFault("has a number outside the range of f64", "range")


def _cast(values: npt.NDArray[Any], kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """Round to a dtype, once, to nearest even; infinity only comes from infinity."""
    if kind.kind == "i" and not (np.isfinite(values) & (values == np.trunc(values))).all():
        raise TensorFault("must hold integers", "int_type")
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = (_round_to_odd(values) if kind == _BF16 else values).astype(kind)
    lost = rounded != values if kind.kind == "i" else np.isfinite(rounded) != np.isfinite(values)
    if lost.any():
        limits = np.iinfo if kind.kind == "i" else ml_dtypes.finfo  # NumPy's finfo does not take bf16
        end = float(limits(kind).max)
        raise TensorFault(f"has a number outside the range of {_NAMES[kind]}, which ends at {end:.8g}", "range")
    return rounded


def _round_to_odd(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Round to float32 so that rounding to bf16 gives what rounding float64 would: inexact values get an odd last bit.

    ml_dtypes rounds float64 to float32, to nearest, and then again.
    """
    rounded = values.astype(np.float32)
    bits = rounded.view(np.int32)
    bits -= np.abs(rounded) > np.abs(values)
    bits |= np.not_equal(rounded, values, where=np.isfinite(values), out=np.zeros(len(values), bool))
    return rounded
