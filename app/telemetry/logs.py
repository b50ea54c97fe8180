"""Log records on standard error, one per line, as text for people or as JSON for machines, with their `facts`."""

from __future__ import annotations

import json
import logging
import logging.config
import re
from datetime import UTC, datetime
from typing import Any, Literal

__all__ = ["JsonFormatter", "TextFormatter", "configure"]

# Text from a caller, such as a path, must not start a new line or control a terminal. Escaped are control characters,
# among them NEL (U+0085), and the line and paragraph separators.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# Those that JSON does not escape; and all but the line breaks that a traceback has.
_CONTROL_IN_JSON = re.compile("[\x7f-\x9f\u2028\u2029]")
_CONTROL_IN_TRACEBACK = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def _escaped(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1] if match[0] < "\x7f" else f"\\u{ord(match[0]):04x}"


class JsonFormatter(logging.Formatter):
    """Write a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return _CONTROL_IN_JSON.sub(_escaped, json.dumps(entry, ensure_ascii=False, default=str))


class TextFormatter(logging.Formatter):
    """Write a record as a line of text with `name=value` at its end."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        """Format the line of one record."""
        facts: dict[str, Any] = getattr(record, "facts", {})
        line = " ".join([super().formatMessage(record), *(f"{name}={value}" for name, value in facts.items())])
        return _CONTROL.sub(_escaped, line)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - as above
        """Format a traceback, whose last line may contain text from a caller."""
        return _CONTROL_IN_TRACEBACK.sub(_escaped, super().formatException(ei))


def configure(form: Literal["text", "json"]) -> None:
    """Configure the logging of the process."""
    # Lines don't name source, thread or process: finding these takes half the time of a line.
    logging._srcfile = None  # as the logging HOWTO recommends
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    formatter = JsonFormatter if form == "json" else TextFormatter
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": {"()": formatter}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
            "root": {"level": "INFO", "handlers": ["stderr"]},
            "loggers": {"uvicorn.access": {"level": "WARNING"}},  # our access lines replace these
        }
    )
