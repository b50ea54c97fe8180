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

import ml_dtypes
import numpy as np
import numpy.typing as npt

from app.intake.sinks import Lease, RawSink, TensorFault
from app.pool.buffers import Segment
from convgrad._dtypes import DTYPES, DType
from convgrad._errors import ConvgradError

__all__ = ["NUMBER_SLICE", "Numbers"]

NUMBER_SLICE = 16 << 10
"""Bytes of text that are parsed at a time: about a millisecond."""

_OPEN, _CLOSE, _COMMA, _NUMBER = b"[],0"
_SPACE = b" \t\r\n"
# The outline of a text: 0 for what numbers consist of, x for what no list of numbers has.
_OUTLINE = bytes(
    byte if byte in b"[]," + _SPACE else 0x30 if byte in b"0123456789+-.eE" else 0x78 for byte in range(256)
)
_NO_BRACKETS = bytes.maketrans(b"[]", b"  ")
# Values that JSON has no numbers for; the standard parser reads them without the quotes.
_WORD = re.compile(rb'"(NaN|-?Infinity)"')
_WORDS = (b'"NaN"', b'"Infinity"', b'"-Infinity"')
# A string, or its beginning: then the group is no quote.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*("|\\?\Z)', re.DOTALL)
# Most characters of a number.
_LONGEST_NUMBER = 512
_DEEPEST = 16
_FLOATS = ("f32", "f16", "bf16", "f64")
# Converting this much takes about a millisecond.
_INLINE = 1 << 20
_NESTED = "must be flat, or nested like its shape"
_BF16 = DTYPES["bf16"].numpy
_NAMES = {each.numpy: each.name for each in DTYPES.values()}


class Numbers:
    """Read the numbers of one JSON array, flat or nested, after its opening bracket.

    If dtype and shape are `declared` before the numbers, elements are converted as they arrive; otherwise they are kept
    as float64. `bound` is the most text that can still arrive, `most` the most numbers that are allowed. A fault does
    not stop the document: it is kept in `fault`, the memory is given back, the rest of the array is skipped. With a
    `refusal` all of it is.
    """

    slow = True  # it reads a slice at a time

    def __init__(
        self,
        lease: Lease,
        declared: tuple[DType, tuple[int, ...]] | None = None,
        *,
        bound: int | None = None,
        most: int | None = None,
        refusal: ConvgradError | None = None,
    ) -> None:
        dtype, shape = declared or (None, None)
        self._dtype: DType | None = dtype
        self._shape: tuple[int, ...] | None = shape
        self._kind = dtype.numpy if dtype is not None and dtype.name in _FLOATS else np.dtype(np.float64)
        self._most = most
        self._lease = lease
        self._text = b""
        self._word = b""  # the beginning of a word at the end of the last slice
        self._before = b"["  # the last character that is not white space
        self._any = False  # whether there is anything but brackets and commas
        self._depth = self._deepest = 1
        # By depth: lists so far, their entries, the commas of the one that is open, the length of the first.
        self._lists = [0, 1] + [0] * _DEEPEST
        self._entries = [0] * (_DEEPEST + 2)
        self._commas = [0] * (_DEEPEST + 2)
        self._lengths: list[int | None] = [None] * (_DEEPEST + 2)
        self._peak, self._whole = 0.0, True  # the largest magnitude, and whether all are integers
        self._rest = self._skipper()
        self._sink = RawSink(lease, expected=None, bound=None)
        self.count = 0
        self.fault: TensorFault | ConvgradError | None = refusal
        if refusal is None and shape is not None:
            try:
                self._check_bounds(shape, bound)
            except TensorFault as fault:
                self._fail(fault, self._rest)
            else:
                self._sink = RawSink(lease, expected=prod(shape) * self._kind.itemsize, bound=None)

    @classmethod
    def of(
        cls, values: list[Any], lease: Lease, declared: tuple[DType, tuple[int, ...]], *, most: int | None = None
    ) -> Numbers:
        """Read a list that was not taken out of its document, because its name was written with escapes."""
        numbers, text = cls(lease, declared, most=most), json.dumps(values).encode()
        at, over = 1, False
        while not over:
            at, over = numbers.write(text, at)
        return numbers

    def write(self, chunk: bytes, start: int) -> tuple[int, bool]:
        """Parse at most one slice of the text from `start`; return where it stopped and whether the array has ended."""
        if self.fault is None:
            rest = self._skipper()
            try:
                return self._read(chunk, start)
            except TensorFault as fault:
                self._fail(fault, rest)
        return self._rest.write(chunk, start)

    def result(self) -> Numbers:
        """Return itself: the value that the array has in the document."""
        return self

    async def supply(self) -> None:
        """Allocate the memory that the numbers so far need."""
        if self.fault is None:
            try:
                await self._sink.supply()
            except ConvgradError as fault:
                self._fail(fault, self._skipper())

    def check(self, dtype: DType, shape: tuple[int, ...]) -> None:
        """Check that the numbers, and the nesting of their lists, fit a tensor; raises its fault."""
        self._check_bounds(shape)
        if self.fault is not None:
            raise self.fault.with_traceback(None)
        if self._deepest > 1:
            self._check_nesting(shape)
        if self.count != prod(shape):
            raise TensorFault(f"has {self.count} numbers, but the shape needs {prod(shape)}", "size")
        if dtype.numpy.kind == "i" and not self._whole:
            raise TensorFault("must hold integers", "int_type")
        _cast(np.array([self._peak]), dtype.numpy)
        self._dtype = dtype

    def content(self) -> bytes:
        """Return the elements of a small tensor as the dtype that `check` was given."""
        assert self._dtype is not None
        return _cast(np.frombuffer(self._sink.content(), self._kind), self._dtype.numpy).tobytes()

    async def collect(self) -> Segment:
        """Collect all elements in one segment, as the dtype that `check` was given."""
        assert self._dtype is not None
        segment = await self._sink.collect()
        if self._kind == self._dtype.numpy:
            return segment
        target = await self._lease.acquire_async(self.count * self._dtype.itemsize)
        if self.count * self._kind.itemsize <= _INLINE:
            self._convert(segment, target, self._dtype)
        else:
            await asyncio.to_thread(self._convert, segment, target, self._dtype)
        self._lease.release(segment)
        return target

    def _skipper(self) -> _Rest:
        return _Rest(self._depth, in_string=bool(self._word))

    def _fail(self, fault: TensorFault | ConvgradError, rest: _Rest) -> None:
        # The traceback would keep the frames, and what they hold of the chunk, alive until the reply is sent.
        self.fault, self._rest = fault.with_traceback(None), rest
        self._sink.discard()
        self._text = self._word = b""

    def _check_bounds(self, shape: tuple[int, ...], bound: int | None = None) -> None:
        count = prod(shape)
        if self._most is not None and count > self._most:
            raise _too_many(f"has {count} numbers by its shape", self._most)
        if bound is not None and count > bound // 2 + 1:
            raise TensorFault(f"has a shape of {count} elements, more than the body can contain", "size")

    def _check_nesting(self, shape: tuple[int, ...]) -> None:
        deepest = self._deepest
        if deepest > len(shape):
            raise _too_deep(len(shape))
        for depth in range(1, deepest + 1):
            if self._lengths[depth] != shape[depth - 1]:
                raise _wrong_length([0] * (depth - 1), self._lengths[depth], shape[depth - 1])
            if depth < deepest and self._entries[depth] != self._lists[depth + 1]:
                raise TensorFault(f"{_NESTED}: it has numbers beside lists", "nesting")
        if deepest < len(shape) and self.count:
            raise TensorFault(f"{_NESTED}: its {deepest} levels are fewer than {len(shape)} dimensions", "nesting")

    def _read(self, chunk: bytes, start: int) -> tuple[int, bool]:
        stop = min(start + NUMBER_SLICE, len(chunk))
        text = self._word + chunk[start:stop]
        plain, self._word = text, b""
        if b'"' in text:
            plain = _WORD.sub(_zeros, text)
            quote = plain.rfind(b'"')
            if quote >= 0 and any(word.startswith(plain[quote:]) for word in _WORDS):
                text, plain, self._word = text[:quote], plain[:quote], plain[quote:]
        outline = plain.translate(_OUTLINE)
        foreign = outline.find(b"x")  # usually in what follows the array
        end = self._structure(outline if foreign < 0 else outline[:foreign])
        if end is not None:
            stop -= len(text) + len(self._word) - end - 1
            text, self._word = text[:end], b""
        elif foreign >= 0:
            raise TensorFault('must hold only numbers, or the strings "NaN", "Infinity" and "-Infinity"', "number_type")
        self._take(_WORD.sub(rb" \1 ", text) if b'"' in text else text, over=end is not None)
        return stop, end is not None

    def _take(self, piece: bytes, *, over: bool) -> None:
        """Parse what is complete of a slice."""
        text = self._text + piece.translate(_NO_BRACKETS)
        cut = len(text) if over else text.rfind(b",")
        if cut >= 0:
            self._parse(text[:cut])
            text = text[cut + 1 :]
        if len(text) > _LONGEST_NUMBER:
            text = text.strip(_SPACE)  # white space of any length is JSON
            if len(text) > _LONGEST_NUMBER:
                raise TensorFault("has a number with too many digits", "number_type")
        self._text = text
        if over:
            self._sink.complete()

    def _structure(self, outline: bytes) -> int | None:
        """Check the brackets and commas of a slice; return where the array ends, if it does."""
        brackets, end = b"[" in outline or b"]" in outline, None
        if brackets or not self._any:  # where there are only numbers the parser itself reports extra commas
            _check_order(self._before + outline)
        self._any = self._any or b"0" in outline
        if brackets:
            end = self._lists_of(outline)
        else:
            self._commas[self._depth] += outline.count(b",")
        self._before = outline.rstrip(_SPACE)[-1:] or self._before
        return end

    def _lists_of(self, outline: bytes) -> int | None:
        """Check the lengths of the lists that end in a slice; return where the array ends, if it does."""
        codes = np.frombuffer(outline, np.uint8)
        at = np.flatnonzero((codes == _OPEN) | (codes == _CLOSE) | (codes == _COMMA))
        marks = codes[at]
        opens, closes = marks == _OPEN, marks == _CLOSE
        depths = self._depth + np.cumsum(opens.astype(np.int64) - closes)
        over = np.flatnonzero(depths == 0)
        if len(over):
            size = int(over[0]) + 1
            at, marks, depths, opens, closes = at[:size], marks[:size], depths[:size], opens[:size], closes[:size]
        within = depths + closes  # the depth of the list that a mark begins, continues or ends
        self._go_deeper(int(within.max()))
        faults = []
        for depth in range(1, self._deepest + 1):
            here = within == depth
            commas, ends = np.flatnonzero(here & (marks == _COMMA)), np.flatnonzero(here & closes)
            self._lists[depth] += int(np.count_nonzero(here & opens))
            if not len(ends):
                continue
            lengths = np.diff(np.searchsorted(commas, ends), prepend=-self._commas[depth]) + int(self._any)
            if not self._any:  # a list without commas is empty, or has one list
                previous = np.where(ends > 0, marks[ends - 1], self._before[0])
                lengths += previous != _OPEN
            self._entries[depth] += int(lengths.sum())
            wanted = self._wanted(depth)
            self._lengths[depth] = int(lengths[0]) if wanted is None else wanted
            wrong = np.flatnonzero(lengths != self._lengths[depth])
            if len(wrong):
                faults.append((int(ends[wrong[0]]), depth, int(lengths[wrong[0]])))
        if faults:
            where, depth, length = min(faults)
            index = [self._count_commas(marks, within, where, above) for above in range(1, depth)]
            raise _wrong_length(index, length, self._lengths[depth])
        for depth in range(1, self._deepest + 1):
            self._commas[depth] = self._count_commas(marks, within, len(marks), depth)
        self._depth = int(depths[-1])
        return int(at[-1]) if len(over) else None

    def _go_deeper(self, depth: int) -> None:
        if self._shape is not None and depth > max(1, len(self._shape)):
            raise _too_deep(len(self._shape))
        if depth > _DEEPEST:
            raise TensorFault(f"must have at most {_DEEPEST} nested lists", "nesting")
        self._deepest = max(self._deepest, depth)

    def _wanted(self, depth: int) -> int | None:
        """Return how long the lists of a depth must be: as the shape says, or all like the first one."""
        if self._shape is not None and self._deepest > 1:
            return self._shape[depth - 1]
        return self._lengths[depth]

    def _count_commas(self, marks: npt.NDArray[Any], within: npt.NDArray[Any], stop: int, depth: int) -> int:
        """Count the commas of the list of a depth that is open before a mark."""
        here = within[:stop] == depth
        ends = np.flatnonzero(here & (marks[:stop] == _CLOSE))
        first = int(ends[-1]) + 1 if len(ends) else 0
        commas = int(np.count_nonzero(here[first:] & (marks[first:stop] == _COMMA)))
        return commas + (0 if len(ends) else self._commas[depth])

    def _parse(self, text: bytes) -> None:
        if not self._any:
            return  # empty lists of a tensor without elements
        try:
            values = np.array(json.loads(b"[" + text + b"]", parse_int=float), np.float64)
        except ValueError:
            raise TensorFault("has something other than a number between its commas", "number_type") from None
        if not len(values):
            raise TensorFault("has an extra comma", "number_type")
        infinite = int(np.isinf(values).sum())
        if infinite and infinite != text.count(b"Infinity"):
            raise TensorFault("has a number outside the range of f64", "range")
        if self._dtype is None or self._dtype.numpy != self._kind:  # for `check`, where the dtype is known
            finite = values[np.isfinite(values)]
            self._whole = self._whole and len(finite) == len(values) and bool((finite == np.trunc(finite)).all())
            self._peak = max(self._peak, float(np.abs(finite).max(initial=0)))
        self.count += len(values)
        if self._most is not None and self.count > self._most:
            raise _too_many(f"has more than {self._most} numbers", self._most)
        if self._shape is not None and self.count > prod(self._shape):
            raise TensorFault(f"has more numbers than the {prod(self._shape)} of its shape", "size")
        self._sink.write(_cast(values, self._kind).view(np.uint8).data)

    def _convert(self, source: Segment, target: Segment, dtype: DType) -> None:
        values = np.frombuffer(source.view, self._kind, self.count)
        into = np.frombuffer(target.view, dtype.numpy, self.count)
        for start in range(0, self.count, _INLINE):
            into[start : start + _INLINE] = _cast(values[start : start + _INLINE], dtype.numpy)


class _Rest:
    """Find the end of an array that is not read, whatever it holds."""

    def __init__(self, depth: int, *, in_string: bool = False) -> None:
        self._depth = depth
        self._string = b'"' if in_string else b""  # what the next bytes continue: a string, maybe after a backslash

    def write(self, chunk: bytes, start: int) -> tuple[int, bool]:
        """Skip the next bytes; return where it stopped and whether the array has ended."""
        piece = chunk[start : start + NUMBER_SLICE]
        codes = np.frombuffer(self._outside(piece), np.uint8)
        at = np.flatnonzero((codes == _OPEN) | (codes == _CLOSE))
        depths = self._depth + np.cumsum(np.where(codes[at] == _OPEN, 1, -1))
        ends = np.flatnonzero(depths == 0)
        if len(ends):
            return start + int(at[ends[0]]) + 1, True
        self._depth = int(depths[-1]) if len(at) else self._depth
        return start + len(piece), False

    def _outside(self, piece: bytes) -> bytes:
        """Return a piece with blanks for its strings."""
        before, self._string = self._string, b""
        if not before and b'"' not in piece:
            return piece

        def blanks(string: re.Match[bytes]) -> bytes:
            if string[1] != b'"':
                self._string = b'"' + string[1]
            return b" " * len(string[0])

        return _STRING.sub(blanks, before + piece)[len(before) :]


def _check_order(outline: bytes) -> None:
    """Find the errors that are lost when brackets are replaced by white space, such as `[1[2]]` and `[,]`."""
    for space in (b" ", b"\t", b"\r", b"\n"):
        outline = outline.replace(space, b"")
    codes = np.frombuffer(outline, np.uint8)
    before, after = codes[:-1], codes[1:]
    opened, closed, comma = before == _OPEN, before == _CLOSE, before == _COMMA
    wrong = (
        ((after == _OPEN) & ~(opened | comma))
        | ((after == _COMMA) & (opened | comma))
        | ((after == _CLOSE) & comma)
        | ((after == _NUMBER) & closed)
    )
    if wrong.any():
        raise TensorFault("has a bracket or a comma in the wrong place", "nesting")


def _zeros(match: re.Match[bytes]) -> bytes:
    return b"0" * len(match[0])


def _cast(values: npt.NDArray[Any], kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """Round to a dtype, once, to nearest even; infinity only comes from infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        made = (_odd(values) if kind == _BF16 else values).astype(kind)
    lost = made != values if kind.kind == "i" else np.isfinite(made) != np.isfinite(values)
    if lost.any():
        limits = np.iinfo if kind.kind == "i" else ml_dtypes.finfo  # NumPy's finfo does not take bf16
        end = float(limits(kind).max)
        raise TensorFault(f"has a number outside the range of {_NAMES[kind]}, which ends at {end:.8g}", "range")
    return made


def _odd(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Round to float32 so that rounding to bf16 gives what rounding float64 would: inexact values get an odd last bit.

    ml_dtypes rounds float64 to float32, to nearest, and then again.
    """
    made = values.astype(np.float32)
    bits = made.view(np.int32)
    bits -= np.abs(made) > np.abs(values)
    bits |= np.not_equal(made, values, where=np.isfinite(values), out=np.zeros(len(values), bool))
    return made


def _too_many(what: str, most: int) -> TensorFault:
    binary = "as base64 in data or npy, or to /v1 as a .npy part of multipart/form-data"
    return TensorFault(f"{what}, but a list may have {most}: send it {binary}", "too_long")


def _too_deep(rank: int) -> TensorFault:
    return TensorFault(f"{_NESTED}: it has more nested lists than {rank} dimensions", "nesting")


def _wrong_length(index: list[int], length: int | None, wanted: int | None) -> TensorFault:
    where = f"the list at {index}" if index else "the outermost list"
    return TensorFault(f"{_NESTED}: {where} has {length} entries, not {wanted}", "nesting")
