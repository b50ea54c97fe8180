"""The `traceparent` header of W3C Trace Context."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Self

__all__ = ["TraceParent"]

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceParent:
    """Identify a span: trace id and span id of 32 and 16 hexadecimal digits, and the flags."""

    trace_id: str
    span_id: str
    flags: int = 0

    @classmethod
    def read(cls, header: str) -> Self | None:
        """Parse a header; None when it is malformed and, by the standard, has to be ignored."""
        match = _FORM.fullmatch(header.strip())
        if match is None:
            return None
        version, trace_id, span_id, flags, more = match.groups()
        # Later versions may add fields, version 00 may not; an id of zeros is invalid.
        if version == "ff" or (version == "00" and more) or not (int(trace_id, 16) and int(span_id, 16)):
            return None
        return cls(trace_id, span_id, int(flags, 16) & 1)

    def child(self) -> TraceParent:
        """Return a new span whose parent is this one."""
        return TraceParent(self.trace_id, secrets.token_hex(8), self.flags)

    def header(self) -> str:
        """Return the header's value."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"
