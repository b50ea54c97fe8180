"""A thread for those of Ray's calls that may block, made one after the other."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable

__all__ = ["Aside"]

_STUCK_S, _SLOW_RATE = 10.0, 50e6
"""Seconds after which a call of Ray's is taken to block for good, and bytes a second that it copies at least."""


class Aside:
    """Call what is put into it, in order, in a thread; `on_error` is called there where something raises."""

    def __init__(self, on_error: Callable[[], object]) -> None:
        self._on_error = on_error
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], float]] = queue.SimpleQueue()
        self._until: float | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def __call__(self, call: Callable[[], object], nbytes: int = 0) -> None:
        """Add a call, which may copy so many bytes."""
        self._calls.put((call, _STUCK_S + nbytes / _SLOW_RATE))

    @property
    def stuck(self) -> bool:
        """Whether a call has taken so long that it will not return."""
        until = self._until
        return until is not None and time.monotonic() > until

    def _run(self) -> None:
        while True:
            call, allowed = self._calls.get()
            self._until = time.monotonic() + allowed
            try:
                call()
            except Exception:  # noqa: BLE001 - whatever Ray raises
                traceback.print_exc()
                self._on_error()
            self._until = None
            del call  # it may keep a job's memory
