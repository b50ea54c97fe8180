"""A progress bar for terminals."""

from __future__ import annotations

import shutil
from types import TracebackType
from typing import Self, TextIO

from convgrad._events import Event, Progress

__all__ = ["ProgressBar"]

_LONGEST = 40
_FULL, _EMPTY = "█", "░"
_CLEAR = "\r\x1b[K"


class ProgressBar:
    """Draw the progress of a call on one line, which is cleared at the end."""

    def __init__(self, stream: TextIO, label: str, begins: str = "sending") -> None:
        self._stream = stream
        self._label = label
        self._begins = begins
        self._drawn = ""

    def __enter__(self) -> Self:
        self._draw(f"{self._label}: {self._begins}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.write(_CLEAR)
        self._stream.flush()

    def show(self, event: Event) -> None:
        """Draw the bar if the event is `Progress`."""
        if isinstance(event, Progress):
            done = round(event.share * self._width())
            bar = _FULL * done + _EMPTY * (self._width() - done)
            self._draw(f"{self._label}: {bar} {event.done}/{event.total}")

    def _width(self) -> int:
        return max(5, min(_LONGEST, shutil.get_terminal_size().columns - len(self._label) - 20))

    def _draw(self, line: str) -> None:
        if line != self._drawn:
            self._drawn = line
            self._stream.write(_CLEAR + line)
            self._stream.flush()
