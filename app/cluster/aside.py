"""A thread for those of Ray's calls that may block, made one after the other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

__all__ = ["Aside"]

_STUCK_S = 10.0
"""Seconds after which a call of Ray's is taken to block for good: copying to its memory takes one per gigabyte."""


class Aside:
    """Call what is put into it, in order, in a thread; `on_error` is called there where something raises."""

    def __init__(self, on_error: Callable[[], object]) -> None:
        self._on_error = on_error
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._since: float | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def __call__(self, call: Callable[[], object]) -> None:
        """Add a call."""
        self._calls.put(call)

    @property
    def stuck(self) -> bool:
        """Whether a call has taken so long that it will not return."""
        since = self._since
        return since is not None and time.monotonic() - since > _STUCK_S

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            self._since = time.monotonic()
            try:
                call()
            except Exception:  # noqa: BLE001 - whatever Ray raises
                self._on_error()
            self._since = None
            del call  # it may keep a job's memory
