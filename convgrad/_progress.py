"""A progress bar for terminals."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from convgrad._events import Event, Health, Progress

__all__ = ["ProgressBar"]

_MAX_WIDTH = 40
_FULL, _EMPTY = "█", "░"
_CLEAR = "\r\x1b[K"


class ProgressBar:
    """Draw the phases of a call on one line, which is cleared at the end: upload, queue, computation.

    Each phase begins at 0 %; the time left is estimated from its own speed. `clock` returns seconds.
    """

    def __init__(self, stream: TextIO, label: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._label = label
        self._clock = clock
        self._phase = ""
        self._begun = 0.0, 0.0
        self._drawn = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.write(_CLEAR)
        self._stream.flush()

    def uploading(self, sent: int, total: int) -> None:
        """Draw the progress of an upload; once it is complete, that the call is queued."""
        self._show("uploading", sent / total)
        if sent >= total:
            self._draw(f"{self._label}: queued")

    def computing(self, event: Event) -> None:
        """Draw the progress of the computation; other events are ignored."""
        if isinstance(event, Progress):
            self._show("computing", event.share)

    def trying(self, what: str, share: float) -> None:
        """Draw how far a check is, and what it tries."""
        self._show("", share, what)

    def waiting(self, health: Health | None) -> None:
        """Draw the state of a service that is not ready; None while there is no connection."""
        if health is None:
            self._draw(f"{self._label}: waiting for a connection")
            return
        share = health.detail.get("progress")
        if isinstance(share, float | int):
            self._show(str(health.detail.get("status")), share)

    def _show(self, phase: str, share: float, after: str = "") -> None:
        if phase != self._phase or not self._drawn:
            self._phase = phase
            self._begun = self._clock(), share
        words = f"{self._label}: {phase} " if phase else f"{self._label}: "
        numbers = f" {math.floor(share * 100):3} %{self._left(share)}"
        columns = shutil.get_terminal_size().columns
        width = max(5, min(_MAX_WIDTH // (2 if after else 1), columns - len(words) - 20))
        done = math.floor(share * width)
        line = words + _FULL * done + _EMPTY * (width - done) + numbers
        self._draw(f"{line}  {after}"[: columns - 1] if after else line)

    def _left(self, share: float) -> str:
        """Return the time left in words, once there is progress to estimate it from."""
        since, first = self._begun
        if not first < share < 1:
            return ""
        seconds = math.ceil((self._clock() - since) * (1 - share) / (share - first))
        return f", {seconds // 60}:{seconds % 60:02} left"

    def _draw(self, line: str) -> None:
        if line != self._drawn:
            self._drawn = line
            self._stream.write(_CLEAR + line)
            self._stream.flush()
