"""Tensor elements written as JSON numbers: parsed in slices as they arrive, straight into a segment.

As Python objects a list of numbers takes several times the memory of its elements, so it is never one list: the text is
cut at commas, and each slice goes through the standard parser to the tensor's sink.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from app.intake.inline import ReceivedData
from app.intake.lease import Lease
from app.intake.sinks import RawSink, TensorFault
from app.pool.buffers import Segment
from app.threads import in_thread_if
from convgrad._dtypes import DTYPES, DType
from convgrad._errors import ConvgradError, ParseError

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
_WORDS_TEXT = '"NaN", "Infinity" and "-Infinity"'
# What the other values of JSON begin with.
_OTHER_VALUES = b'"{tfn'
# A string, or its beginning: then the group is no quote.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*("|\\?\Z)', re.DOTALL)
# Bytes of an element, at most.
_WIDEST = 8
# Most characters of a number.
_LONGEST_NUMBER = 512
_DEEPEST = 16
# Most brackets and commas of a list without numbers.
_MOST_BLANK = 1 << 16
_FLOATS = ("f32", "f16", "bf16", "f64")
# Converting this much takes about a millisecond.
_INLINE = 1 << 20
_NESTED = "must be flat, or nested like its shape"
_BF16 = DTYPES["bf16"].numpy
_NAMES = {each.numpy: each.name for each in DTYPES.values()}


class Numbers(ReceivedData):
    """Read the numbers of one JSON array, flat or nested, after its opening bracket.

    If dtype and shape are `declared` before the numbers, elements are converted as they arrive; otherwise they are kept
    as float64. `bound` is the most text that can still arrive, `most` the most numbers that are allowed. With a
    `refusal` the whole array is skipped. For text that is not JSON `write` raises `ParseError` instead.
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
        super().__init__(RawSink(lease, bound=None if bound is None else (bound // 2 + 1) * _WIDEST), refusal)
        dtype, shape = declared or (None, None)
        self._dtype: DType | None = dtype
        self._shape: tuple[int, ...] | None = shape
        self._kind = dtype.numpy if dtype is not None and dtype.name in _FLOATS else np.dtype(np.float64)
        self._most = most
        self._lease = lease
        self._text = b""
        self._word = b""  # the beginning of a word at the end of the last slice
        self._before = b"["  # the last character that is not white space
        self._comma = b""  # one at the end of the last slice: what follows it may not be JSON
        self._depth = 1  # lists that are open
        self._levels = 0  # lists around each number; 0 until there is one
        self._sizes: list[int] = []  # numbers in a list of each level, from 1 for a number itself outwards; 0: unknown
        self._blank = b"["  # the brackets and commas so far while there is no number
        self._separated = 0  # numbers that a comma follows
        self._peak, self._whole = 0.0, True  # the largest magnitude, and whether all are integers
        self._rest = _Rest(self._depth)
        self.count = 0
        if refusal is None and shape is not None:
            try:
                self._check_bounds(shape, bound)
                self.sink.expect(prod(shape) * self._kind.itemsize, None)
            except TensorFault as fault:
                self.fail(fault)

    @classmethod
    def of(
        cls, values: list[Any], lease: Lease, declared: tuple[DType, tuple[int, ...]], *, most: int | None = None
    ) -> Numbers:
        """Read a list that was not taken out of its document, because its name was written with escapes."""
        numbers, text = cls(lease, declared, most=most), json.dumps(values).encode()
        position, over = 1, False
        while not over:
            position, over = numbers.write(text, position)
        return numbers

    def write(self, chunk: bytes, start: int) -> tuple[int, bool]:
        """Parse at most one slice of the text from `start`; return where it stopped and whether the array has ended."""
        if self.fault is None:
            before = self._depth, self._word
            try:
                return self._read(chunk, start)
            except TensorFault as fault:
                self._depth, self._word = before
                self.fail(fault)
        return self._rest.write(chunk, start)

    def result(self) -> Numbers:
        """Return this object, as the value of the array in the document."""
        return self

    def check(self, dtype: DType, shape: tuple[int, ...]) -> None:
        """Check that the numbers, and the nesting of their lists, fit a tensor; raises its fault."""
        self._check_bounds(shape)
        if self.fault is not None:
            raise self.fault.with_traceback(None)
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
        return _cast(np.frombuffer(self.sink.content(), self._kind), self._dtype.numpy).tobytes()

    async def collect(self) -> Segment:
        """Collect all elements in one segment, as the dtype that `check` was given."""
        assert self._dtype is not None
        segment = await self.sink.collect()
        if self._kind == self._dtype.numpy:
            return segment
        target = await self._lease.acquire_async(self.count * self._dtype.itemsize)
        large = self.count * self._kind.itemsize > _INLINE
        await in_thread_if(large, self._convert, segment, target, self._dtype)
        self._lease.release(segment)
        return target

    def fail(self, fault: TensorFault | ConvgradError) -> None:
        """Keep the fault, give the memory back, and skip what follows the last slice."""
        super().fail(fault)
        self._rest = _Rest(self._depth, in_string=bool(self._word))
        self._text = self._word = b""

    def _check_bounds(self, shape: tuple[int, ...], bound: int | None = None) -> None:
        count = prod(shape)
        if self._most is not None and count > self._most:
            raise _too_many(f"has {count} numbers by its shape", self._most)
        if bound is not None and count > bound // 2 + 1:
            raise TensorFault(f"has a shape of {count} elements, more than the body can contain", "size")

    def _check_nesting(self, shape: tuple[int, ...]) -> None:
        """Check that the lists, unless they are one flat list, are nested like the shape."""
        if not self._levels:
            try:
                lengths = np.array(json.loads(self._blank)).shape
            except ValueError:
                raise TensorFault(f"{_NESTED}: its empty lists are not nested alike", "nesting") from None
        else:
            lengths = tuple([outer // inner for outer, inner in pairwise(reversed(self._sizes))])
        if len(lengths) > 1:
            self._check_levels(len(lengths), shape)
            for depth, (length, wanted) in enumerate(zip(lengths, shape, strict=False)):
                if length != wanted:
                    raise _wrong_length([0] * depth, length, wanted)

    def _check_levels(self, levels: int, shape: tuple[int, ...]) -> None:
        if levels > max(1, len(shape)) or 1 < self._levels < len(shape):
            rule = f"the lists are nested {levels} deep, but the shape has {len(shape)} dimensions"
            raise TensorFault(f"{_NESTED}: {rule}", "nesting")

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
            if plain[foreign] not in _OTHER_VALUES:
                raise _not_json(f"contains what is not JSON; NaN and infinities are the strings {_WORDS_TEXT}")
            raise TensorFault(f"must hold only numbers, or the strings {_WORDS_TEXT}", "number_type")
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
            self.sink.complete()

    def _structure(self, outline: bytes) -> int | None:
        """Check the brackets and commas of a slice; return where the array ends, if it does."""
        held, outline = len(self._comma), (self._comma + outline).rstrip(_SPACE)
        self._comma = b"," if outline.endswith(b",") else b""
        outline = outline.removesuffix(b",")
        codes = np.frombuffer(outline, np.uint8)
        depths = self._depth + np.cumsum((codes == _OPEN).astype(np.int8) - (codes == _CLOSE), dtype=np.int64)
        closed = depths == 0
        end = int(closed.argmax()) if closed.any() else None
        if end is not None:
            outline, codes, depths = outline[: end + 1], codes[: end + 1], depths[: end + 1]
        numbers = codes == _NUMBER
        if not self._levels or b"[" in outline or b"]" in outline:  # in plain numbers the parser finds extra commas
            _check_order(self._before + outline, empty_lists=not (self._levels or numbers.any()))
            self._check_depth(int(depths.max(initial=0)))
        if not self._levels:
            self._begin(outline, numbers, depths)
        if self._levels > 1:
            if (depths[numbers] != self._levels).any():
                raise TensorFault(f"{_NESTED}: it mixes numbers and lists", "nesting")
            closing = self._levels - depths[codes == _COMMA]
            self._check_lengths(closing if end is None else np.append(closing, self._levels))
        self._before = outline.rstrip(_SPACE)[-1:] or self._before
        self._depth = int(depths[-1]) if len(depths) else self._depth
        return end if end is None else end - held

    def _check_depth(self, deepest: int) -> None:
        if self._shape is not None:
            self._check_levels(deepest, self._shape)
        if deepest > _DEEPEST:
            raise TensorFault(f"must have at most {_DEEPEST} nested lists", "nesting")

    def _begin(self, outline: bytes, numbers: npt.NDArray[Any], depths: npt.NDArray[Any]) -> None:
        """Find the first number, and with it how deep all numbers are."""
        first = int(numbers.argmax()) if numbers.any() else len(outline)
        self._blank += outline[:first].translate(None, _SPACE)
        if first == len(outline):
            if len(self._blank) > _MOST_BLANK:
                raise TensorFault("has too many empty lists", "nesting")
            return
        if b"]" in self._blank:
            raise TensorFault(f"{_NESTED}: it has an empty list beside numbers", "nesting")
        levels = self._levels = int(depths[first])
        self._sizes = [1] + [0] * levels
        if self._shape is not None and levels > 1:
            self._check_levels(levels, self._shape)
            self._sizes = [prod(self._shape[level:]) for level in range(levels, -1, -1)]
            if not self._sizes[-1]:
                raise TensorFault("has more numbers than the 0 of its shape", "size")

    def _check_lengths(self, closed: npt.NDArray[Any]) -> None:
        """Check that all lists of a level have the same number of numbers.

        `closed` is how many lists end after each number of the slice that a comma or the end of the array follows.
        """
        counts = self._separated + 1 + np.arange(len(closed))  # numbers up to there
        self._separated += len(closed)
        faults = np.zeros((self._levels + 1, len(closed)), bool)
        for level in range(1, self._levels + 1):
            ends = closed >= level
            if not self._sizes[level] and ends.any():
                self._sizes[level] = int(counts[ends.argmax()])
            if size := self._sizes[level]:
                faults[level] = ends != (counts % size == 0)
        if faults.any():
            place = int(faults.any(axis=0).argmax())
            level = int(faults[:, place].argmax())
            raise self._wrong_list(int(counts[place]), level, too_short=bool(closed[place] >= level))

    def _wrong_list(self, count: int, level: int, *, too_short: bool) -> TensorFault:
        """Return the fault of the list of a level that the number `count` is in."""
        size, inner = self._sizes[level], self._sizes[level - 1]
        wanted, index, rest = size // inner, [], count - 1
        for outer in reversed(self._sizes[level : self._levels]):
            position, rest = divmod(rest, outer) if outer else (0, rest)
            index.append(position)
        return _wrong_length(index, count % size // inner if too_short else wanted + 1, wanted)

    def _parse(self, text: bytes) -> None:
        if not self._levels:
            return  # empty lists of a tensor without elements
        try:
            values = np.array(json.loads(b"[" + text + b"]", parse_int=float), np.float64)
        except ValueError:
            raise _not_json("has something other than a number between its commas") from None
        if not len(values):
            raise _not_json("has an extra comma")
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
        self.sink.write(_cast(values, self._kind).view(np.uint8).data)

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
        brackets = np.flatnonzero((codes == _OPEN) | (codes == _CLOSE))
        depths = self._depth + np.cumsum(np.where(codes[brackets] == _OPEN, 1, -1))
        ends = np.flatnonzero(depths == 0)
        if len(ends):
            return start + int(brackets[ends[0]]) + 1, True
        self._depth = int(depths[-1]) if len(brackets) else self._depth
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


def _check_order(outline: bytes, *, empty_lists: bool) -> None:
    """Find the errors that are lost when brackets are replaced by white space, such as `[1[2]]` and `[,]`."""
    codes = np.frombuffer(outline.translate(None, _SPACE), np.uint8)
    before, after = codes[:-1], codes[1:]
    opened, closed, comma = before == _OPEN, before == _CLOSE, before == _COMMA
    wrong = (
        ((after == _OPEN) & ~(opened | comma))
        | ((after == _COMMA) & (opened | comma))
        | ((after == _CLOSE) & comma)
        | ((after == _NUMBER) & closed)
    )
    if wrong.any():
        raise _not_json("has a bracket or a comma in the wrong place")
    if not empty_lists and (opened & (after == _CLOSE)).any():
        raise TensorFault(f"{_NESTED}: it has an empty list beside numbers", "nesting")


def _zeros(match: re.Match[bytes]) -> bytes:
    return b"0" * len(match[0])


def _cast(values: npt.NDArray[Any], kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """Round to a dtype, once, to nearest even; infinity only comes from infinity."""
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


def _not_json(what: str) -> ParseError:
    return ParseError(f"the body is not JSON: a list of numbers {what}")


def _too_many(what: str, most: int) -> TensorFault:
    binary = "as base64 in data or npy, or to /v1 as a .npy part of multipart/form-data"
    return TensorFault(f"{what}, but a list may have {most}: send it {binary}", "too_long")


def _wrong_length(index: list[int], length: int, wanted: int) -> TensorFault:
    where = f"the list at {index}" if index else "the outermost list"
    has = "more" if length > wanted else length
    return TensorFault(f"{_NESTED}: {where} must have length {wanted}, but has {has}", "nesting")
