"""Tensor elements written as JSON numbers: parsed in slices as they arrive, straight into a segment.

As Python objects a list of numbers takes several times the memory of its elements, so it is never one list: the text is
cut at commas, and each slice goes through the standard parser to the tensor's sink.
"""

from __future__ import annotations

import asyncio
import json
import re
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from app.intake.sinks import Lease, RawSink, TensorFault
from app.pool.buffers import Segment
from convgrad._dtypes import DType

__all__ = ["NUMBER_SLICE", "Numbers"]

NUMBER_SLICE = 16 << 10
"""Bytes of text that are parsed at a time: about a millisecond."""

_ALPHABET = b"0123456789+-.eE, \t\r\n[]"
_BLANK = b" \t\r\n,"
_NO_BRACKETS = bytes.maketrans(b"[]", b"  ")
# Errors that would be lost when brackets are replaced by white space: `[1[2]]`, `[,]`.
_MISPLACED = re.compile(rb"[0-9.eE\]][ \t\r\n]*+\[|\][ \t\r\n]*+[^,\] \t\r\n]|[\[,][ \t\r\n]*+,|,[ \t\r\n]*+\]")
# Most characters of a number.
_LONGEST_NUMBER = 512
_DEEPEST = 16
_FLOATS = ("f32", "f16", "bf16", "f64")
# Converting this much takes about a millisecond.
_INLINE = 1 << 20


class Numbers:
    """Read the numbers of one JSON array, flat or nested, after its opening bracket.

    If dtype and number of elements are `declared` before the numbers, elements are converted as they arrive; otherwise
    they are kept as float64. `bound` is the most text that can still arrive. Raises `TensorFault` for anything but
    numbers.
    """

    def __init__(self, lease: Lease, declared: tuple[DType, int] | None = None, *, bound: int | None = None) -> None:
        if declared is not None and bound is not None and declared[1] > bound // 2 + 1:
            raise TensorFault(f"has a shape of {declared[1]} elements, more than the body can contain", "size")
        self._lease = lease
        kind = declared[0] if declared is not None and declared[0].name in _FLOATS else None
        self._kind: np.dtype[Any] = np.dtype(np.float64) if kind is None else kind.numpy
        expected = declared[1] * self._kind.itemsize if declared is not None else None
        self._sink = RawSink(lease, expected=expected, bound=None)
        self._text = b""
        self._before = b"["  # the last character that is not white space
        self._depth = 1
        self._lists = np.zeros(_DEEPEST + 1, np.int64)
        self._lists[1] = 1
        self._blank = False  # whether there were commas without numbers, as between empty lists
        self.count = 0

    def write(self, chunk: bytes, start: int) -> tuple[int, bool]:
        """Parse at most one slice of the text from `start`; return where it stopped and whether the array has ended."""
        piece = chunk[start : start + NUMBER_SLICE]
        stop = self._brackets(piece)
        over = stop is not None
        # within a flat list the parser itself reports extra commas
        if over or not self.count or self._depth > 1 or b"[" in piece or b"]" in piece:
            around = self._before + (piece if stop is None else piece[: stop + 1])
            if _MISPLACED.search(around):
                raise TensorFault("has a bracket or a comma in the wrong place", "nesting")
        self._before = piece.rstrip(b" \t\r\n")[-1:] or self._before
        piece = piece[:stop]
        if piece.translate(None, _ALPHABET):
            raise TensorFault("must hold finite numbers only: send NaN and infinity as binary data", "number_type")
        text = self._text + piece.translate(_NO_BRACKETS)
        cut = len(text) if over else text.rfind(b",")
        if cut >= 0:
            self._parse(text[:cut])
            text = text[cut + 1 :]
        if len(text) > _LONGEST_NUMBER:
            text = text.strip(b" \t\r\n")  # white space of any length is JSON
            if len(text) > _LONGEST_NUMBER:
                raise TensorFault("has a number with too many digits", "number_type")
        self._text = text
        if over:
            self._sink.complete()
        return start + len(piece) + over, over

    async def supply(self) -> None:
        """Allocate the memory that the numbers so far need."""
        await self._sink.supply()

    def check(self, shape: tuple[int, ...]) -> None:
        """Check that the numbers, and the nesting of their lists, fit a tensor of this shape."""
        if self.count != prod(shape):
            raise TensorFault(f"has {self.count} numbers, but the shape needs {prod(shape)}", "size")
        depth = int(np.flatnonzero(self._lists)[-1])
        if depth == 1 or not self.count:
            return
        wanted = [prod(shape[:axis]) for axis in range(len(shape))]
        if depth != len(shape) or list(self._lists[1 : depth + 1]) != wanted:
            raise TensorFault("must be flat, or nested like its shape", "nesting")

    def integers(self) -> list[int]:
        """Return the values of a small tensor of integers."""
        values = np.frombuffer(self._sink.content(), self._kind)
        if any(float(value) != int(value) for value in values):
            raise TensorFault("must hold integers", "int_type")
        return [int(value) for value in values]

    async def collect(self, dtype: DType) -> Segment:
        """Collect all elements in one segment, as `dtype`."""
        segment = await self._sink.collect()
        if self._kind == dtype.numpy:
            return segment
        target = await self._lease.acquire_async(self.count * dtype.itemsize)
        if self.count * self._kind.itemsize <= _INLINE:
            self._convert(segment, target, dtype)
        else:
            await asyncio.to_thread(self._convert, segment, target, dtype)
        self._lease.release(segment)
        return target

    def _brackets(self, piece: bytes) -> int | None:
        """Count the lists of a slice by depth; return where the array ends, if it does."""
        close = piece.find(b"]")
        if b"[" not in piece and (self._depth == 1 or close < 0):
            return None if close < 0 else close
        codes = np.frombuffer(piece, np.uint8)
        at = np.flatnonzero((codes == 0x5B) | (codes == 0x5D))
        opens = codes[at] == 0x5B
        depths = self._depth + np.cumsum(np.where(opens, 1, -1))
        ends = np.flatnonzero(depths == 0)
        count = int(ends[0]) if len(ends) else len(at)
        reached = depths[:count]
        if len(reached):
            if reached.max() > _DEEPEST:
                raise TensorFault(f"must have at most {_DEEPEST} nested lists", "nesting")
            self._lists += np.bincount(reached[opens[:count]], minlength=_DEEPEST + 1)
            self._depth = int(reached[-1])
        return int(at[count]) if len(ends) else None

    def _parse(self, text: bytes) -> None:
        if not text.strip(_BLANK) and self.count == 0:
            # Empty lists of a tensor without elements.
            self._blank = True
            return
        if self._blank:
            raise TensorFault("has empty lists among its numbers", "nesting")
        try:
            values = np.array(json.loads(b"[" + text + b"]", parse_int=float), np.float64)
        except ValueError:
            raise TensorFault("has something other than a number between its commas", "number_type") from None
        if not len(values):
            raise TensorFault("has an extra comma", "number_type")
        self.count += len(values)
        self._sink.write(_bytes_of(_cast(values, self._kind)))

    def _convert(self, source: Segment, target: Segment, dtype: DType) -> None:
        values = np.frombuffer(source.view, self._kind, self.count)
        into = np.frombuffer(target.view, dtype.numpy, self.count)
        for start in range(0, self.count, _INLINE):
            into[start : start + _INLINE] = _cast(values[start : start + _INLINE], dtype.numpy)


def _cast(values: npt.NDArray[Any], kind: np.dtype[Any]) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):
        made = values.astype(kind)
    if not np.isfinite(made).all():
        raise TensorFault("has a number outside the range of its datatype", "range")
    return made


def _bytes_of(values: npt.NDArray[Any]) -> memoryview:
    return values.view(np.uint8).data
