"""Read a JSON body as it arrives: long tensor strings are decoded into segments, the rest is parsed at the end.

A body with tensors is nearly all base64, in members named `data` or `npy`. A string in one of them that is longer than
`DIVERT_OVER` bytes never becomes a Python string: it is decoded piece by piece into a segment and replaced by a mark.
The rest, the skeleton, is small, limited in size, and parsed by the standard parser.

The scanner only has to know where strings begin and end. It executes no Python per byte: one possessive regular
expression (linear time, no backtracking) skips everything up to the next place of interest.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any

from app.intake.inline import InlineTensor, declared_bytes
from app.intake.sinks import Lease
from app.intake.strict_json import BOM, leading_members, parse_document
from convgrad._errors import ConvgradError, ParseError, TooLarge

__all__ = ["DIVERT_OVER", "MAX_SKELETON", "JsonIntake"]

DIVERT_OVER = 512
"""A `data` or `npy` string of more raw bytes than this is decoded while it arrives."""

MAX_SKELETON = 256 * 1024
"""The largest skeleton: bytes of a document without its long tensor strings."""

# Steps before other requests get a turn: each takes a few microseconds.
_STEPS = 64

# Bytes of a string with escapes that are processed in one step, which may take a millisecond.
_ESCAPED_STEP = 16 * 1024

# A document of this size is parsed in about a millisecond at most.
_PARSE_INLINE = 32 * 1024

# Replaces a diverted string. It can't be forged: the scanner rejects N and I outside strings.
_MARK = b"NaN"
_QUOTE = 0x22
_KEYS = (b'"data"', b'"npy"')

# Complete strings and everything between them, up to: a tensor key (or what may become one with the next chunk), an
# unfinished string, or an N or I outside strings (JSON has neither; Python's parser would read NaN and Infinity). The
# outer loop is not possessive, which does not change what it matches here: before Python 3.11.5 a possessive loop
# around other groups loses its position (python/cpython issue 106052).
_SKIP = re.compile(
    rb'(?:[^"NI]++|"(?!(?:data|npy)"[ \t\r\n]*+(?::[ \t\r\n]*+)?+(?:"|\Z))(?:[^"\\]++|\\.)*+")*', re.DOTALL
)
_KEY = re.compile(rb'"(data|npy)"[ \t\r\n]*+:[ \t\r\n]*+"')
_KEY_CUT = re.compile(rb'"(data|npy)"[ \t\r\n]*+(:)?+[ \t\r\n]*+\Z')
_GAP = re.compile(rb"[ \t\r\n]*+(:)?+[ \t\r\n]*+")
_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
# Like _STRING, but stops before an incomplete or invalid escape.
_ESCAPED = re.compile(rb'(?:[^"\\]++|\\u[0-9A-Fa-f]{4}|\\["\\/bfnrt])*+')
_ESCAPE_CUT = re.compile(rb"\\(?:u[0-9A-Fa-f]{0,3})?\Z")
_ASCII_ESCAPE = re.compile(rb"\\u00([2-7][0-9A-Fa-f])")

_State = Callable[[bytes, int], int]


class JsonIntake:
    """Receive a JSON document in chunks of any size; `finish` returns it with `InlineTensor` in place of long strings.

    `length` is the declared size of the body, if known: it limits how long a string can still get. Raises `ParseError`
    for invalid JSON, and `TooLarge` if the skeleton has more than `max_skeleton` bytes. A fault inside one tensor's
    string is kept in its `InlineTensor`, so that it affects only the call that the tensor belongs to. With a `refusal`
    no tensor is received: each is skipped and has that fault. `begun` is called once, with the members that are
    complete while a tensor is still arriving; it rejects the document by raising.
    """

    def __init__(
        self,
        lease: Lease,
        *,
        length: int | None = None,
        max_skeleton: int = MAX_SKELETON,
        refusal: ConvgradError | None = None,
        begun: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        self._lease = lease
        self._begun = begun
        self._refusal = refusal
        self._remaining = length
        self._max_skeleton = max_skeleton
        self._skeleton = bytearray()
        self._marks: list[tuple[int, int]] = []
        self._inline: list[InlineTensor] = []
        self._supplied = 0  # diverted strings that have all their memory
        self._state: _State = self._between
        self._held = b""  # the beginning of what may become a tensor key
        self._escaped = False  # the last byte of an ordinary string was a backslash
        self._key = ""
        self._colon = False
        self._value = bytearray()  # the beginning of a tensor string, until it ends or is long enough to divert
        self._cut_escape = b""
        self._removed = 0
        self._slow = False  # the last step took longer than most

    def feed(self, chunk: bytes) -> None:
        """Process the next bytes of the body without yielding."""
        for _ in self._steps(chunk):
            pass

    async def take(self, chunk: bytes) -> None:
        """Process the next bytes of the body; yield to other requests when that takes many steps."""
        for _ in self._steps(chunk):
            await self.supply()
            await asyncio.sleep(0)
        self._tell()
        await self.supply()

    def _tell(self) -> None:
        if self._begun is None or self._state not in (self._in_long_value, self._in_short_value):
            return
        begun, self._begun = self._begun, None
        if len(self._skeleton) <= _PARSE_INLINE:
            begun(leading_members(bytes(self._skeleton)))

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
        """Allocate the memory that the bytes so far need; to be awaited between calls of `feed`."""
        for inline in self._inline[self._supplied :]:
            await inline.supply()
        self._supplied = max(0, len(self._inline) - 1)  # the last one may still be open

    def finish(self) -> Any:
        """Parse the skeleton; the whole body must have been processed."""
        if self._held or self._state not in (self._between, self._after_key):
            raise ParseError("the JSON document ends inside a string")
        return parse_document(bytes(self._skeleton), self._inline, self._marks)

    async def finish_async(self) -> Any:
        """Parse the skeleton, in a thread if it is large."""
        if len(self._skeleton) <= _PARSE_INLINE:
            return self.finish()
        return await asyncio.to_thread(self.finish)

    # Each state processes the chunk from a position and returns the position where the next state continues.

    def _between(self, chunk: bytes, start: int) -> int:
        end = _end(_SKIP, chunk, start)
        self._keep(chunk[start:end])
        if end == len(chunk):
            return end
        if chunk[end] != _QUOTE:
            raise ParseError("the body is not JSON: NaN, Infinity or a stray capital letter outside a string")
        if key := _KEY.match(chunk, end):
            self._keep(chunk[end : key.end() - 1])
            return self._open_value(key[1], key.end())
        if key := _KEY_CUT.match(chunk, end):
            self._keep(chunk[end:])
            self._key, self._colon, self._state = key[1].decode(), key[2] is not None, self._after_key
            return len(chunk)
        if any(key.startswith(chunk[end:]) for key in _KEYS):
            self._held = chunk[end:]
            return len(chunk)
        self._keep(b'"')
        self._state = self._in_string
        return end + 1

    def _in_string(self, chunk: bytes, start: int) -> int:
        end = start + 1 if self._escaped else start
        self._escaped = False
        end = _end(_STRING, chunk, end)
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
        if self._colon and chunk[end] == _QUOTE:
            return self._open_value(self._key.encode(), end + 1)
        self._state = self._between
        return end

    def _open_value(self, key: bytes, start: int) -> int:
        self._key = key.decode()
        self._value = bytearray()
        self._state = self._in_short_value
        return start

    def _in_short_value(self, chunk: bytes, start: int) -> int:
        before = len(self._value)
        self._value += chunk[start : start + DIVERT_OVER + 1 - before]
        end = _end(_STRING, self._value)
        if end < len(self._value) and self._value[end] == _QUOTE:
            self._keep(b'"' + self._value[: end + 1])
            self._state = self._between
            return start + end + 1 - before
        consumed = start + len(self._value) - before
        if len(self._value) > DIVERT_OVER:
            self._divert(len(chunk) - consumed)
        return consumed

    def _divert(self, unread: int) -> None:
        raw = bytes(self._value)
        bound = None if self._remaining is None else self._remaining + unread + len(raw)
        expected = declared_bytes(self._skeleton) if self._key == "data" else None
        inline = InlineTensor(self._key, self._lease, expected=expected, raw_bound=bound, refusal=self._refusal)
        self._inline.append(inline)
        self._cut_escape = b""
        self._removed = 0
        self._state = self._in_long_value
        position = 0
        while position < len(raw):
            position = self._in_long_value(raw, position)

    def _in_long_value(self, chunk: bytes, start: int) -> int:
        quote = chunk.find(b'"', start)
        stop = len(chunk) if quote < 0 else quote
        if self._cut_escape or chunk.find(b"\\", start, stop) >= 0:
            return self._in_escaped_value(chunk, start)
        self._inline[-1].write(memoryview(chunk)[start:stop])
        self._removed += stop - start
        return stop if quote < 0 else self._close_value(stop)

    def _in_escaped_value(self, chunk: bytes, start: int) -> int:
        self._slow = True
        cut = self._cut_escape
        region = cut + chunk[start : start + _ESCAPED_STEP]
        quote = region.find(b'"')
        end = len(region) if quote < 0 else quote
        text = _plain(region[:end])
        if b"\\" in text:
            # Another escape, an incomplete one, an escaped quote, or no base64 at all.
            end = _end(_ESCAPED, region)
            text = _ASCII_ESCAPE.sub(lambda found: bytes((int(found[1], 16),)), _plain(region[:end]))
        self._inline[-1].write(text)  # which rejects a remaining backslash
        self._removed += end
        self._cut_escape = b""
        if end < len(region):
            if region[end] == _QUOTE:
                return self._close_value(start + end - len(cut))
            if not _ESCAPE_CUT.match(region, end):
                raise ParseError("the body is not JSON: a string has an escape that JSON does not know")
            self._cut_escape = region[end:]
        return start + len(region) - len(cut)

    def _close_value(self, quote: int) -> int:
        self._inline[-1].close()
        self._marks.append((len(self._skeleton), self._removed + 2 - len(_MARK)))
        self._keep(_MARK)
        self._state = self._between
        return quote + 1

    def _keep(self, piece: bytes | bytearray) -> None:
        if not self._skeleton:
            piece = _checked_start(piece)
        self._skeleton += piece
        if len(self._skeleton) > self._max_skeleton:
            raise TooLarge(
                f"JSON may have {self._max_skeleton} bytes beside its tensors' data and npy strings",
                data={"reason": "head", "limit": self._max_skeleton},
            )


def _end(pattern: re.Pattern[bytes], data: bytes | bytearray, start: int = 0) -> int:
    """Return where a pattern that matches at least the empty string ends."""
    found = pattern.match(data, start)
    assert found is not None
    return found.end()


def _plain(text: bytes) -> bytes:
    """Undo the escapes that encoders use within base64: PHP's for a slash, .NET's for a plus.

    Of two backslashes in a row, which base64 can't have, at least one remains.
    """
    text = text.replace(b"\\/", b"/")
    return text.replace(b"\\u002B", b"+").replace(b"\\u002b", b"+") if b"\\" in text else text


def _checked_start(piece: bytes | bytearray) -> bytes | bytearray:
    """Reject binary data at its first byte instead of after the size limit."""
    start = piece.removeprefix(BOM).lstrip(b" \t\r\n")[:1]
    if start and start not in b'{["-0123456789tfn\xef':
        raise ParseError("the body is not JSON")
    return piece
