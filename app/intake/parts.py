"""Split a multipart/form-data body into its parts as it arrives, without copying them.

The next boundary is found with one `bytes.find` per chunk. Unlike python-multipart's parser, this one accepts all that
RFC 2046 allows around boundaries.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from convgrad._errors import ParseError

__all__ = ["PartEvent", "PartReader"]

_MAX_HEADERS = 8
# A field name, a colon, and text without control characters.
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]++):([^\x00-\x08\x0a-\x1f\x7f]*+)")

# White space that a mail system may have added to a boundary (RFC 2046).
_PADDING = re.compile(rb"[ \t]*+")


PartEvent = dict[bytes, bytes] | memoryview | None
"""The headers of a part, by lower-case name, then any number of pieces of its data, then None at its end."""


class PartReader:
    """Parse a body from chunks of any size; `ended` once its closing boundary has arrived, whatever follows.

    Raises `ParseError` when it is not multipart with this boundary, when the headers of a part are malformed, more than
    eight, or longer than `max_header_bytes`, and when the text before the first part is longer than that.
    """

    def __init__(self, boundary: bytes, *, max_header_bytes: int) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._events: list[PartEvent] = []
        self._max_header_bytes = max_header_bytes
        self._rest = b""  # bytes that can't be interpreted before more arrive
        self._state = self._start
        self.ended = False

    @property
    def in_body(self) -> bool:
        """Whether the next bytes belong to the open part unless they are a boundary."""
        return self._state == self._body and not self._rest

    def feed(self, chunk: bytes) -> Iterator[PartEvent]:
        """Parse the next bytes; yield what is in them."""
        data, start, after = self._rest + chunk if self._rest else chunk, 0, 0
        while start < len(data) and after >= 0 and not self.ended:
            after = self._state(data, start)
            start = max(start, after)
            yield from self._events
            self._events.clear()
        self._rest = b"" if self.ended else data[start:]

    # Each state parses the bytes from a position and returns the position after them, or -1 if it needs more.

    def _start(self, data: bytes, start: int) -> int:
        first, most = self._delimiter[2:], self._max_header_bytes
        if not data.startswith(first, start):  # RFC 2046 allows text before the first part
            before = data.find(b"\n" + first, start, start + most)
            if before < 0 and len(data) - start < most:
                return -1
            if before < 0:
                raise _not_multipart()
            start = before + 1
        self._state = self._after_delimiter
        return start + len(first)

    def _after_delimiter(self, data: bytes, start: int) -> int:
        if data.startswith(b"--", start):
            self.ended = True
            return start + 2
        padding = _PADDING.match(data, start, start + self._max_header_bytes)
        assert padding is not None
        if data.startswith(b"\r\n", padding.end()):
            self._state = self._headers
            return padding.end() + 2
        if data[padding.end() :] in (b"", b"\r") or data[start:] == b"-":
            return -1
        raise _not_multipart()

    def _headers(self, data: bytes, start: int) -> int:
        if data.startswith(b"\r\n", start):  # no headers at all
            block, after = [], start + 2
        else:
            end = data.find(b"\r\n\r\n", start, start + self._max_header_bytes)
            if end < 0:
                if len(data) - start >= self._max_header_bytes:
                    raise _not_multipart()
                return -1
            block, after = data[start:end].split(b"\r\n"), end + 4
        lines = [_HEADER.fullmatch(line) for line in block]
        if len(lines) > _MAX_HEADERS or not all(lines):
            raise _not_multipart()
        self._events.append({line[1].lower(): line[2].strip(b" \t") for line in lines if line})
        self._state = self._body
        return after

    def _body(self, data: bytes, start: int) -> int:
        end = data.find(self._delimiter, start)
        if end >= 0:
            if end > start:
                self._events.append(memoryview(data)[start:end])
            self._events.append(None)
            self._state = self._after_delimiter
            return end + len(self._delimiter)
        # The last bytes may be the beginning of a delimiter, which has only one line break.
        end = data.rfind(b"\r", max(start, len(data) - len(self._delimiter) + 1))
        if end < 0 or not self._delimiter.startswith(data[end:]):
            end = len(data)
        if end > start:
            self._events.append(memoryview(data)[start:end])
            return end
        return -1


def _not_multipart() -> ParseError:
    return ParseError("the body is not valid multipart/form-data with the declared boundary")
