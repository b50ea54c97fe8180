"""Read a JSON document with tensors as lists of numbers, in members named `data`, as it arrives.

The lists are parsed slice by slice into their sinks (`app.intake.numbers`) and replaced by a mark; the rest is small,
limited in size, and parsed by the standard parser.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from app.intake.numbers import Numbers
from app.intake.sinks import Lease, TensorFault
from app.intake.strict_json import parse_document
from convgrad._dtypes import DType, dtype_of_oip
from convgrad._errors import InvalidParams, InvalidRequest, ParseError, TooLarge, Unsupported
from schemas.problems import problem, safe_key
from schemas.tables import MAX_DIMS

__all__ = ["ListsIntake"]

# Strings before other requests get a turn: each takes about a microsecond.
_STEPS = 1000
# A document of this size is parsed in about a millisecond at most.
_PARSE_INLINE = 32 * 1024
_TAIL = 4096
_MOST_LISTS = 64

# Replaces a list. It can't be forged: the scanner rejects N and I outside strings.
_MARK = b"NaN"
_OUTSIDE = re.compile(rb'[^"NI]*+')
_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]*+")
_OPEN_MEMBER = re.compile(rb',?[ \t\r\n]*"data"[ \t\r\n]*:[ \t\r\n]*\Z')
_QUOTE, _COLON, _BRACKET = b'":['

_State = Callable[[bytes, int], int]


class ListsIntake:
    """Receive a JSON document in chunks of any size; `finish` returns it with `Numbers` in place of its `data` lists.

    `length` is the declared size of the document, where it is known. Raises `ParseError` for what is not
    JSON, `TooLarge` when more than `max_skeleton` bytes are left beside the lists, and `InvalidParams` for
    a list that holds anything but numbers, or more than its shape says.
    """

    def __init__(self, lease: Lease, *, length: int | None, max_skeleton: int) -> None:
        self._lease = lease
        self._remaining = length
        self._max_skeleton = max_skeleton
        self._skeleton = bytearray()
        self._lists: list[Numbers] = []
        self._state: _State = self._between
        self._string_at = 0
        self._escaped = False  # the last byte of a string so far was a backslash
        self._colon = False

    async def take(self, chunk: bytes) -> None:
        """Process the next bytes of the document."""
        if self._remaining is not None:
            self._remaining -= len(chunk)
        for _ in self._steps(chunk):
            if self._lists:
                await self._lists[-1].supply()
            await asyncio.sleep(0)
        if self._lists:
            await self._lists[-1].supply()

    async def finish(self) -> Any:
        """Parse the rest; the whole document must have been processed."""
        if self._state not in (self._between, self._after_key):
            raise ParseError("the JSON document ends inside a string or a list")
        skeleton = bytes(self._skeleton)
        if len(skeleton) <= _PARSE_INLINE:
            return parse_document(skeleton, self._lists)
        return await asyncio.to_thread(parse_document, skeleton, self._lists)

    def _steps(self, chunk: bytes) -> Iterator[None]:
        position, steps = 0, 0
        while position < len(chunk):
            position = self._state(chunk, position)
            steps += 1
            if self._state == self._in_list or steps % _STEPS == 0:
                yield

    # Each state processes the chunk from a position and returns the position where the next state continues.

    def _between(self, chunk: bytes, start: int) -> int:
        found = _OUTSIDE.match(chunk, start)
        assert found is not None
        end = found.end()
        if end == len(chunk):
            self._keep(chunk[start:end])
            return end
        if chunk[end] != _QUOTE:
            raise ParseError("the body is not JSON: NaN, Infinity or a stray capital letter outside a string")
        self._keep(chunk[start : end + 1])
        self._string_at, self._state = len(self._skeleton), self._in_string
        return end + 1

    def _in_string(self, chunk: bytes, start: int) -> int:
        end = start + 1 if self._escaped else start
        self._escaped = False
        found = _STRING.match(chunk, end)
        assert found is not None
        end = found.end()
        if end < len(chunk):
            closed = chunk[end] == _QUOTE
            self._escaped = not closed
            end += 1
            self._keep(chunk[start:end])
            if closed:
                is_key = self._skeleton[self._string_at :] == b'data"'
                self._colon, self._state = False, self._after_key if is_key else self._between
            return end
        self._keep(chunk[start:end])
        return end

    def _after_key(self, chunk: bytes, start: int) -> int:
        found = _SPACE.match(chunk, start)
        assert found is not None
        end = found.end()
        self._keep(chunk[start:end])
        if end == len(chunk):
            return end
        if chunk[end] == _COLON and not self._colon:
            self._colon = True
            self._keep(b":")
            return end + 1
        if chunk[end] != _BRACKET or not self._colon:
            self._state = self._between
            return end
        if len(self._lists) == _MOST_LISTS:
            raise InvalidRequest(f"the document has more than {_MOST_LISTS} data lists")
        with _named(self._skeleton):
            bound = None if self._remaining is None else self._remaining + len(chunk) - end
            self._lists.append(Numbers(self._lease, _declared(self._skeleton), bound=bound))
        self._state = self._in_list
        return end + 1

    def _in_list(self, chunk: bytes, start: int) -> int:
        with _named(self._skeleton):
            end, over = self._lists[-1].write(chunk, start)
        if over:
            self._keep(_MARK)
            self._state = self._between
        return end

    def _keep(self, piece: bytes) -> None:
        self._skeleton += piece
        if len(self._skeleton) > self._max_skeleton:
            raise TooLarge(
                f"JSON may have {self._max_skeleton} bytes beside the lists of its tensors' data",
                data={"reason": "head", "limit": self._max_skeleton},
            )


class _named:  # noqa: N801 - reads as a block: with _named(..)
    """Turn a fault of a list into the call's error, with the tensor's name if that came before the list."""

    def __init__(self, skeleton: bytearray) -> None:
        self._skeleton = skeleton

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, TensorFault):
            name = safe_key(_members(self._skeleton).get("name", "an input"))
            message = f"data of {name} {error.message}"
            raise InvalidParams(message, errors=[problem(["inputs", name], message, error.kind)]) from None


def _members(skeleton: bytearray) -> dict[str, Any]:
    """Return the members before `data` in the innermost open object, or nothing if one of them is an object."""
    tail = bytes(skeleton[-_TAIL:])
    head = _OPEN_MEMBER.sub(b"", tail[max(tail.rfind(b"{"), 0) :])
    try:
        members = json.loads(head + b"}")
    except (ValueError, RecursionError):
        return {}
    return members if isinstance(members, dict) else {}


def _declared(skeleton: bytearray) -> tuple[DType, int] | None:
    members = _members(skeleton)
    datatype, shape = members.get("datatype"), members.get("shape")
    if not isinstance(datatype, str) or not isinstance(shape, list) or len(shape) > MAX_DIMS:
        return None
    if not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        return None
    try:
        return dtype_of_oip(datatype), math.prod(shape)
    except Unsupported:
        return None
