"""Read a JSON body as it arrives: the long values of tensors go to their readers, the rest is parsed at the end.

A body with tensors is nearly all base64 or numbers, in members of known names. Such a value never becomes a Python
object: its reader takes it piece by piece, and a mark stands in its place. The rest, the skeleton, is small, limited in
size, and parsed by the standard parser.

The scanner only has to know where strings begin and end. It executes no Python per byte: one possessive regular
expression (linear time, no backtracking) skips everything up to the next place of interest.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from app.intake.strict_json import BOM, end_of, parse_document, partial_document, string_end
from app.intake.values import TensorValues, ValueReader
from app.threads import in_thread_if
from convgrad._errors import ParseError, TooLarge

__all__ = ["JsonIntake"]

# Steps before other requests get a turn: each takes a few microseconds.
_STEPS = 64

# Bytes without long values that are scanned in about a millisecond.
_SCAN = 32 * 1024

# A document of this size is parsed in about a millisecond at most.
_PARSE_INLINE = 32 * 1024
# So is as much of a document that is still arriving, in all.
_MOST_BEGUN = 64 * 1024

# Replaces a value. It can't be forged: the scanner rejects N and I outside strings.
_MARK = b"NaN"
_QUOTE = 0x22

_GAP = re.compile(rb"[ \t\r\n]*+(:)?+[ \t\r\n]*+")


_State = Callable[[bytes, int], int]


class JsonIntake:
    """Receive a JSON document in chunks of any size; `finish` returns it, its long values as their readers left them.

    `length` is the declared size of the body, if known: it limits how long a value can still get. Raises `ParseError`
    for invalid JSON, `TooLarge` if the skeleton has more than `max_skeleton` bytes, and what `values` raise.
    """

    def __init__(
        self,
        values: TensorValues,
        *,
        length: int | None = None,
        max_skeleton: int,
    ) -> None:
        self._values = values
        self._patterns = _patterns(values.names, values.openings)
        self._begun = 0, False  # what had arrived at the last call of `begun`
        self._parsed = 0  # bytes that `begun` has parsed in all
        self._remaining = length
        self._max_skeleton = max_skeleton
        self._skeleton = bytearray()
        self._marks: list[tuple[int, int]] = []
        self._readers: list[ValueReader] = []
        self._supplied = 0  # readers that have all their memory
        self._state: _State = self._between
        self._held = b""  # the beginning of what may become the name of a value
        self._escaped = False  # the last byte of an ordinary string was a backslash
        self._name = ""
        self._colon = False
        self._removed = 0  # bytes of the open value
        self._slow = False

    async def take(self, chunk: bytes) -> None:
        """Process the next bytes of the body; yield to other requests when that takes many steps.

        To be followed by `supply`.
        """
        for _ in self._steps(chunk):
            await self.supply()
            await asyncio.sleep(0)

    async def begun(self) -> Any:
        """Return what has arrived of the document (`partial_document`); None if that is no more than at the last call.

        Also None once the whole body has arrived, or when parsing it early has cost enough: it may arrive byte by byte.
        """
        length = len(self._skeleton)
        open_value = self._readers[-1].result() if self._state == self._in_value else None
        arrived = length, isinstance(open_value, bytes)  # bytes: a value that may still be too short to be taken out
        if self._remaining == 0 or arrived == self._begun or self._parsed + length > _MOST_BEGUN:
            return None
        self._begun, self._parsed = arrived, self._parsed + length
        skeleton, values = bytes(self._skeleton), [*self._closed(), open_value]
        return await in_thread_if(length > _PARSE_INLINE, partial_document, skeleton, values)

    def _closed(self) -> list[object]:
        """Return the values that have been taken out and are complete."""
        return [reader.result() for reader in self._readers[: len(self._marks)]]

    def _steps(self, chunk: bytes) -> Iterator[None]:
        if self._remaining is not None:
            self._remaining -= len(chunk)
        if self._held:
            chunk = self._held + chunk
            self._held = b""
        position, steps = 0, 0
        while position < len(chunk):
            position = self._state(chunk, position)
            steps += 1
            if self._slow or steps % _STEPS == 0:
                self._slow = False
                yield

    async def supply(self) -> None:
        """Allocate the memory that the bytes so far need; to be awaited between calls of `take`."""
        for reader in self._readers[self._supplied :]:
            await reader.supply()
        self._supplied = max(0, len(self._readers) - 1)  # the last one may still be open

    def finish(self) -> Any:
        """Parse the skeleton; the whole body must have been processed."""
        if self._state == self._in_value:
            raise ParseError("the JSON document ends in the middle of a tensor's data")
        if self._held or self._state == self._in_string:
            raise ParseError("the JSON document ends inside a string")
        return parse_document(bytes(self._skeleton), self._closed(), self._marks)

    async def finish_async(self) -> Any:
        """Parse the skeleton, in a thread if it is large."""
        return await in_thread_if(len(self._skeleton) > _PARSE_INLINE, self.finish)

    # Each state processes the chunk from a position and returns the position where the next state continues.

    def _between(self, chunk: bytes, start: int) -> int:
        patterns = self._patterns
        stop = min(len(chunk), start + _SCAN)
        end = end_of(patterns.skip, chunk, start, stop)
        self._keep(chunk[start:end])
        if end == stop:
            self._slow = stop < len(chunk)
            return end
        if chunk[end] != _QUOTE:
            raise ParseError("the body is not JSON: it has an N or I outside a string, and JSON has no NaN or Infinity")
        if key := patterns.key.match(chunk, end):
            self._keep(chunk[end : key.end() - 1])
            return self._open(key[1].decode(), chunk, key.end())
        if key := patterns.key_cut.match(chunk, end):
            self._keep(chunk[end:])
            self._name, self._colon, self._state = key[1].decode(), key[2] is not None, self._after_key
            return len(chunk)
        if any(key.startswith(chunk[end:]) for key in patterns.keys):
            self._held = chunk[end:]
            return len(chunk)
        self._keep(b'"')
        self._state = self._in_string
        return end + 1

    def _in_string(self, chunk: bytes, start: int) -> int:
        end = start + 1 if self._escaped else start
        self._escaped = False
        end = string_end(chunk, end)
        if end < len(chunk):
            if chunk[end] == _QUOTE:
                self._state = self._between
            else:
                self._escaped = True
            end += 1
        self._keep(chunk[start:end])
        return end

    def _after_key(self, chunk: bytes, start: int) -> int:
        gap = _GAP.match(chunk, start)
        assert gap is not None
        end = gap.end()
        self._keep(chunk[start:end])
        if self._colon and gap[1]:
            self._state = self._between
            return end
        self._colon = self._colon or gap[1] is not None
        if end == len(chunk):
            return end
        if self._colon and chunk[end] in self._values.openings:
            return self._open(self._name, chunk, end + 1)
        self._state = self._between
        return end

    def _open(self, name: str, chunk: bytes, start: int) -> int:
        bound = None if self._remaining is None else self._remaining + len(chunk) - start
        self._readers.append(self._values.open(name, chunk[start - 1], self._skeleton, bound))
        self._removed = 0
        self._state = self._in_value
        return start

    def _in_value(self, chunk: bytes, start: int) -> int:
        reader = self._readers[-1]
        end, over = reader.write(chunk, start)
        self._slow = reader.slow
        self._removed += end - start
        if over:
            self._close(reader.result())
        return end

    def _close(self, result: object) -> None:
        if isinstance(result, bytes):
            del self._readers[-1]
            self._keep(result)
        else:
            self._marks.append((len(self._skeleton), self._removed + 1 - len(_MARK)))
            self._keep(_MARK)
        self._state = self._between

    def _keep(self, piece: bytes) -> None:
        if not self._skeleton:
            piece = _checked_start(piece)
        self._skeleton += piece
        if len(self._skeleton) > self._max_skeleton:
            raise TooLarge(
                f"without {self._values.plural} the JSON may have at most {self._max_skeleton} bytes",
                data={"reason": "head", "limit": self._max_skeleton},
            )


class _Patterns:
    """What the scanner looks for, by the names of the values and the bytes that they begin with."""

    def __init__(self, names: tuple[str, ...], openings: bytes) -> None:
        name, opens = "|".join(names).encode(), b"[%b]" % re.escape(openings)
        self.keys = [b'"%b"' % key.encode() for key in names]
        # Complete strings and everything between them, up to: the name of a value (or what may become one with the next
        # chunk), an unfinished string, or an N or I outside strings (JSON has neither; Python's parser would read NaN
        # and Infinity). The outer loop is not possessive, which does not change what it matches here: before Python
        # 3.11.5 a possessive loop around other groups loses its position (python/cpython issue 106052).
        self.skip = re.compile(
            rb'(?:[^"NI]++|"(?!(?:%b)"[ \t\r\n]*+(?::[ \t\r\n]*+)?+(?:%b|\Z))(?:[^"\\]++|\\.)*+")*' % (name, opens),
            re.DOTALL,
        )
        self.key = re.compile(rb'"(%b)"[ \t\r\n]*+:[ \t\r\n]*+%b' % (name, opens))
        self.key_cut = re.compile(rb'"(%b)"[ \t\r\n]*+(:)?+[ \t\r\n]*+\Z' % name)


_patterns = cache(_Patterns)


def _checked_start(piece: bytes) -> bytes:
    """Reject binary data at its first byte instead of after the size limit."""
    start = piece.removeprefix(BOM).lstrip(b" \t\r\n")[:1]
    if start and start not in b'{["-0123456789tfn\xef':
        raise ParseError("the body is not JSON")
    return piece
