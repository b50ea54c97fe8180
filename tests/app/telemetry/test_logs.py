"""Log lines."""

from __future__ import annotations

import json
import logging
import sys

from app.telemetry.logs import JsonFormatter, TextFormatter


def record(message: str, **extra: object) -> logging.LogRecord:
    """Make a log record."""
    made = logging.LogRecord("convgrad", logging.INFO, "x.py", 1, message, (), None)
    made.__dict__.update(extra)
    return made


def test_a_text_line_stays_one_line() -> None:
    """A line break that a caller smuggled in is shown, not obeyed; the facts are at the end."""
    line = TextFormatter().format(record("GET /a\nFAKE line", request_id="r1", status=404))
    assert "\n" not in line
    assert line.endswith("request_id=r1 status=404")


def test_a_json_line_is_an_object() -> None:
    """Time, level, message and the facts are members; an exception too."""
    try:
        raise ValueError("x")
    except ValueError:
        made = record("a\nb", outcome="ok")
        made.exc_info = sys.exc_info()
    found = json.loads(JsonFormatter().format(made))
    assert (found["message"], found["level"], found["outcome"]) == ("a\nb", "info", "ok")
    assert "ValueError" in found["exception"]
