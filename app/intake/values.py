"""The tensors of a JSON document: base64 in long strings named `data` or `npy`, or lists of numbers named `data`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from app.intake.inline import InlineTensor
from app.intake.lease import Lease
from app.intake.numbers import Numbers
from app.intake.strict_json import end_of, members_before, string_end
from convgrad._dtypes import DTYPES, DType
from convgrad._errors import ConvgradError, ParseError, TooLarge
from schemas.rows import MAX_DIMS
from schemas.tensors import MAX_NUMBERS

__all__ = ["LONG_STRING", "TensorValues", "ValueReader", "declared_size", "declared_tensor"]

LONG_STRING = 512
"""A `data` or `npy` string of more raw bytes than this is decoded while it arrives."""

# Long strings and lists of a document, each of which takes one or two kilobytes besides its bytes: more than four in
# each call of a batch.
_MOST_TENSORS = 4096

# Bytes of a string with escapes that are processed in one step, which may take a millisecond.
_ESCAPED_STEP = 16 * 1024

_QUOTE = 0x22
# The text of a string, up to an incomplete or invalid escape.
_ESCAPED = re.compile(rb'(?:[^"\\]++|\\u[0-9A-Fa-f]{4}|\\["\\/bfnrt])*+')
_ESCAPE_CUT = re.compile(rb"\\(?:u[0-9A-Fa-f]{0,3})?\Z")
_ASCII_ESCAPE = re.compile(rb"\\u00([2-7][0-9A-Fa-f])")

_DTYPES = DTYPES | {entry.oip: entry for entry in DTYPES.values()}


class TensorValues:
    """Decode tensors into segments while they arrive; in the document each becomes an `InlineTensor` or a `Numbers`.

    A fault inside a tensor is kept there, so that it affects only the call that the tensor belongs to. With a `refusal`
    no tensor is received: each is skipped and has that fault. With `only_lists` strings stay in the document, and lists
    may have any length. Raises `TooLarge` for too many tensors.
    """

    def __init__(self, lease: Lease, refusal: ConvgradError | None = None, *, only_lists: bool = False) -> None:
        self.names: tuple[str, ...] = ("data",) if only_lists else ("data", "npy")
        self.openings = b"[" if only_lists else b'"['
        self.plural = "the lists of its tensors' data" if only_lists else "its tensors' data and npy"
        self._most = None if only_lists else MAX_NUMBERS
        self._lease = lease
        self._refusal = refusal
        self._count = 0

    def open(self, name: str, opening: int, skeleton: bytearray, bound: int | None) -> ValueReader:
        """Begin a string or a list."""
        if opening == _QUOTE:
            return _String(self, name, skeleton, bound)
        self._add()
        declared = declared_tensor(members_before(skeleton))
        return Numbers(self._lease, declared, bound=bound, most=self._most, refusal=self._refusal)

    def begin_long(self, name: str, skeleton: bytearray, bound: int | None) -> InlineTensor:
        """Begin to decode a string; dtype and shape, if they come before it, give its length."""
        self._add()
        expected = declared_size(members_before(skeleton)) if name == "data" else None
        return InlineTensor(name, self._lease, expected=expected, raw_bound=bound, refusal=self._refusal)

    def _add(self) -> None:
        self._count += 1
        if self._count > _MOST_TENSORS:
            msg = f"the document has more than {_MOST_TENSORS} tensors"
            raise TooLarge(msg, data={"reason": "head", "limit": _MOST_TENSORS})


def declared_tensor(members: Mapping[str, Any]) -> tuple[DType, tuple[int, ...]] | None:
    """Return the dtype and shape that the members of a tensor declare, or None if one is missing or invalid."""
    name, shape = members.get("dtype", members.get("datatype")), members.get("shape")
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None or not isinstance(shape, list) or len(shape) > MAX_DIMS:
        return None
    return (dtype, tuple(shape)) if all(type(size) is int and 0 <= size < 2**63 for size in shape) else None


def declared_size(members: Mapping[str, Any]) -> int | None:
    """Return the bytes of a tensor by the dtype and shape that its members declare, or None."""
    declared = declared_tensor(members)
    return None if declared is None else prod(declared[1]) * declared[0].itemsize


class _String:
    """Read one string after its opening quote.

    `slow` is whether the last piece took about a millisecond, so that others should get a turn.
    """

    __slots__ = ("_begin", "_bound", "_cut_escape", "_name", "_skeleton", "_tensor", "_text", "_values", "slow")

    def __init__(self, values: TensorValues, name: str, skeleton: bytearray, bound: int | None) -> None:
        self.slow = False
        self._values = values
        self._name = name
        self._skeleton = skeleton
        self._bound = bound
        self._begin = bytearray()  # until the string ends or is long enough to be decoded
        self._text = b""
        self._tensor: InlineTensor | None = None
        self._cut_escape = b""

    def result(self) -> InlineTensor | bytes:
        """Return the tensor, or the text of a short string."""
        return self._text if self._tensor is None else self._tensor

    async def supply(self) -> None:
        """Allocate the memory that the decoded bytes need."""
        if self._tensor is not None:
            await self._tensor.supply()

    def write(self, chunk: bytes, start: int) -> tuple[int, bool]:
        """Read the next bytes of the string."""
        self.slow = False
        if self._tensor is not None:
            return self._decode(self._tensor, chunk, start)
        before = len(self._begin)
        self._begin += chunk[start : start + LONG_STRING + 1 - before]
        end = string_end(self._begin, 0)
        if end < len(self._begin) and self._begin[end] == _QUOTE:
            self._text = b'"' + self._begin[: end + 1]
            return start + end + 1 - before, True
        if len(self._begin) > LONG_STRING:
            raw, position = bytes(self._begin), 0
            self._tensor = self._values.begin_long(self._name, self._skeleton, self._bound)
            while position < len(raw):
                position, _ = self._decode(self._tensor, raw, position)
        return start + len(self._begin) - before, False

    def _decode(self, tensor: InlineTensor, chunk: bytes, start: int) -> tuple[int, bool]:
        quote = chunk.find(b'"', start)
        stop = len(chunk) if quote < 0 else quote
        if self._cut_escape or chunk.find(b"\\", start, stop) >= 0:
            return self._decode_escaped(tensor, chunk, start)
        tensor.write(memoryview(chunk)[start:stop])
        return (stop, False) if quote < 0 else self._close(tensor, stop)

    def _decode_escaped(self, tensor: InlineTensor, chunk: bytes, start: int) -> tuple[int, bool]:
        self.slow = True
        cut = self._cut_escape
        region = cut + chunk[start : start + _ESCAPED_STEP]
        quote = region.find(b'"')
        end = len(region) if quote < 0 else quote
        text = _plain(region[:end])
        if b"\\" in text:
            # Another escape, an incomplete one, an escaped quote, or no base64 at all.
            end = end_of(_ESCAPED, region)
            text = _ASCII_ESCAPE.sub(lambda escape: bytes((int(escape[1], 16),)), _plain(region[:end]))
        tensor.write(text)  # which rejects a remaining backslash
        self._cut_escape = b""
        if end < len(region):
            if region[end] == _QUOTE:
                return self._close(tensor, start + end - len(cut))
            if not _ESCAPE_CUT.match(region, end):
                raise ParseError("the body is not JSON: a string has an invalid escape")
            self._cut_escape = region[end:]
        return start + len(region) - len(cut), False

    def _close(self, tensor: InlineTensor, quote: int) -> tuple[int, bool]:
        tensor.close()
        return quote + 1, True


def _plain(text: bytes) -> bytes:
    """Undo the escapes that encoders use within base64: PHP's for a slash, .NET's for a plus.

    Of two backslashes in a row, which base64 can't have, at least one remains.
    """
    text = text.replace(b"\\/", b"/")
    return text.replace(b"\\u002B", b"+").replace(b"\\u002b", b"+") if b"\\" in text else text


ValueReader = _String | Numbers
"""Reads one value, from the byte after its first."""
