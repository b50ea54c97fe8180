"""Log lines."""

from __future__ import annotations

import json
import logging
import re
import sys

import pytest

from app.telemetry.logs import JsonFormatter, TextFormatter


def record(message: str, **extra: object) -> logging.LogRecord:
    """Return a log record."""
    made = logging.LogRecord("convgrad", logging.INFO, "x.py", 1, message, (), None)
    made.facts = extra  # as `extra` does
    return made


def test_a_text_record_is_one_line() -> None:
    """A line break in a caller's text is escaped; the extra fields are at the end."""
    line = TextFormatter().format(record("GET /a\nFAKE line", request_id="r1", status=404))
    assert "\n" not in line
    assert line.endswith("request_id=r1 status=404")


NASTY = "\0\x1b[31m\x7f\x85\x9b\u2028\u2029\t\r\n"


def test_control_characters_are_shown() -> None:
    """No character breaks the line or controls a terminal, wherever it stands; letters stay as they are."""
    line = TextFormatter().format(record(f"GET /é{NASTY}", key=NASTY))
    escaped = r"\u0000\u001b[31m\u007f\u0085\u009b\u2028\u2029\t\r\n"
    assert line.endswith(f"GET /é{escaped} key={escaped}")
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_tracebacks_have_no_control_characters(formatter: logging.Formatter) -> None:
    """Text in an exception is escaped too; the traceback keeps its lines."""
    made = record("fault")
    try:
        raise ValueError(NASTY.strip())
    except ValueError:
        made.exc_info = sys.exc_info()
    text = formatter.format(made)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]", text)
    assert "test_logs.py" in text


def test_a_json_line_is_an_object() -> None:
    """Time, level, message and the extra fields are members, and so is an exception."""
    try:
        raise ValueError("x")
    except ValueError:
        made = record("a\nb", outcome="ok")
        made.exc_info = sys.exc_info()
    found = json.loads(JsonFormatter().format(made))
    assert (found["message"], found["level"], found["outcome"]) == ("a\nb", "info", "ok")
    assert "ValueError" in found["exception"]
