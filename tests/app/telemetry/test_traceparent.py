"""The header of W3C Trace Context."""

from __future__ import annotations

import pytest

from app.telemetry.context import TraceParent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_header_is_read_and_written_back() -> None:
    """A header that was read is written with the same ids."""
    header = f"00-{TRACE}-{SPAN}-01"
    read = TraceParent.read(header)
    assert read == TraceParent(TRACE, SPAN, 1)
    assert read.header() == header


def test_a_child_stays_in_the_trace() -> None:
    """A child has the trace and the flags of its parent and its own span id."""
    parent = TraceParent(TRACE, SPAN, 1)
    child = parent.child()
    assert (child.trace_id, child.flags) == (TRACE, 1)
    assert child.span_id != SPAN
    assert TraceParent.read(child.header()) == child


def test_a_later_version_may_have_more_fields() -> None:
    """Fields that a later version adds at the end are ignored."""
    assert TraceParent.read(f"01-{TRACE}-{SPAN}-01-what-else") == TraceParent(TRACE, SPAN, 1)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "junk",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}",
    ],
)
def test_malformed_headers_are_ignored(header: str) -> None:
    """A header that breaks a rule of the standard is ignored."""
    assert TraceParent.read(header) is None
