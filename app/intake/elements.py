"""What holds the elements of a tensor: memory that they are received in, base64, or numbers in JSON."""

from __future__ import annotations

import binascii
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pybase64

from app.intake.lease import Lease
from app.pool.buffers import Segment
from convgrad._dtypes import DTYPES, DType
from convgrad._errors import InvalidParams
from convgrad._npy import NpyHeader

__all__ = ["Base64", "Elements", "Numbers", "Sink", "TensorFault", "elements_of", "npy_dtype"]

# A tensor up to this size, that of the smallest segment, gets one only when a worker needs it.
_SMALL = 64 << 10


class TensorFault(Exception):  # noqa: N818 - becomes an error where the tensor's name is known
    """A fault in the bytes of one tensor, without the tensor's place in the call."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind


class Elements(ABC):
    """What holds the elements of a tensor, or will when they have arrived."""

    @abstractmethod
    def content(self) -> bytes | bytearray | memoryview:
        """Return all bytes; raises `TensorFault`. Takes a while for large tensors."""

    def fill(self, target: memoryview) -> None:
        """Write all bytes into memory of their size."""
        # NumPy copies without the GIL
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(self.content(), np.uint8))


class Sink(Elements):
    """Receive the `nbytes` bytes of a tensor: on the heap if they are few, otherwise in a segment."""

    def __init__(self, lease: Lease, nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self.received = 0
        self.segment: Segment | None = None
        """Where the bytes are, if they are many."""
        self.small = bytearray()
        """Those of a small tensor."""
        self._lease = lease
        self._begun = False

    @property
    def missing(self) -> int:
        """How many bytes have not arrived."""
        return self.nbytes - self.received

    async def write(self, data: bytes | memoryview) -> None:
        """Receive the next bytes, at most those that are missing.

        Raises what allocating their memory raises.
        """
        if not self._begun:
            self._begun = True
            if self.nbytes > _SMALL or not self._lease.on_heap(self.nbytes):
                self.segment = await self._lease.acquire(self.nbytes)
        if self.segment is None:
            self.small += data
        else:
            self.segment.view[self.received : self.received + len(data)] = data
        self.received += len(data)

    def room(self) -> memoryview:
        """Return the memory for the bytes that are still to come, who writes them counts; empty if not allocated."""
        return memoryview(b"") if self.segment is None else self.segment.view[self.received : self.nbytes]

    def content(self) -> bytearray:
        """Return all bytes."""
        return self.small if self.segment is None else bytearray(self.segment.view[: self.nbytes])


@dataclass(frozen=True, slots=True)
class Base64(Elements):
    """Elements as text: base64 of the standard alphabet, padded, after `skipped` bytes that are not elements."""

    text: str
    skipped: int = 0

    @property
    def nbytes(self) -> int:
        """Number of bytes of the elements."""
        return len(self.text) // 4 * 3 - self.text[-2:].count("=") - self.skipped

    def content(self) -> bytearray:
        """Decode all of them."""
        return self.decoded(len(self.text))[self.skipped :] if self.skipped else self.decoded(len(self.text))

    def decoded(self, length: int) -> bytearray:
        """Decode the first `length` characters, a multiple of 4, of which the last group may end the text."""
        text = self.text[:length]
        if len(text) % 4:
            raise TensorFault("base64 ends in the middle of a group of four characters", "base64")
        try:
            done = pybase64.b64decode_as_bytearray(text, validate=True)
        except (binascii.Error, ValueError):
            raise TensorFault("base64 has a character outside its alphabet, or misplaced padding", "base64") from None
        if text.endswith("=") and pybase64.b64encode_as_string(done[len(done) // 3 * 3 :]) != text[-4:]:
            raise TensorFault("base64 has bits after its last byte that are not zero", "base64")
        return done


@dataclass(frozen=True, slots=True)
class Numbers(Elements):
    """Elements as numbers in JSON."""

    values: list[Any]
    dtype: DType
    shape: tuple[int, ...]

    def content(self) -> memoryview:
        """Convert all of them."""
        return memoryview(elements_of(self.values, self.dtype, self.shape).view(np.uint8))  # type: ignore[arg-type]


def npy_dtype(header: NpyHeader, declared: str | None) -> DType:
    """Return the dtype by the header; raises `TensorFault` unless it is the `declared` one."""
    try:
        return header.dtype(declared)
    except InvalidParams as error:
        raise TensorFault(error.errors[0]["msg"], error.errors[0]["type"]) from None


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
