"""Log lines for people (`text`) or for machines (`json`), one a line, on standard error."""

from __future__ import annotations

import json
import logging
import logging.config
import time
from datetime import UTC, datetime
from typing import Any, Literal

__all__ = ["JsonFormatter", "TextFormatter", "configure", "logging_config"]

_EXTRA = ("request_id", "key", "address", "status", "outcome", "ms", "trace_id")


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _EXTRA if hasattr(record, name)}


class JsonFormatter(logging.Formatter):
    """Write a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """Write a record as a line of text with `name=value` at its end."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")
        self._second, self._time = -1, ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - the base class's name
        """Write the time; most lines share their second with the one before."""
        if int(record.created) != self._second:
            self._second = int(record.created)
            self._time = time.strftime(datefmt or self.default_time_format, time.localtime(self._second))
        return f"{self._time},{int(record.msecs):03d}"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as above
        """Format the line of one record."""
        # What a caller sent, such as a path, must not start a line of its own.
        line = super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")
        return " ".join([line, *(f"{name}={value}" for name, value in _extra(record).items())])


def configure(form: Literal["text", "json"]) -> None:
    """Set the logging of the process up."""
    # No line names its place in the source, its thread or its process: to find them takes half the time of a line.
    logging._srcfile = None  # the way that the logging HOWTO gives
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.config.dictConfig(logging_config(form))


def logging_config(form: Literal["text", "json"]) -> dict[str, Any]:
    """Build the `logging.config.dictConfig` of the service; uvicorn's own access lines are ours instead."""
    formatter = "app.telemetry.logs.JsonFormatter" if form == "json" else "app.telemetry.logs.TextFormatter"
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": formatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"level": "INFO", "handlers": ["stderr"]},
        "loggers": {"uvicorn.access": {"level": "WARNING"}},
    }
