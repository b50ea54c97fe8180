"""End by a signal with a line in place of a traceback, while the service is being imported, which takes seconds."""

from __future__ import annotations

import os
import signal
from types import FrameType

__all__ = ["end_in_one_line"]


def end_in_one_line() -> None:
    """Handle SIGINT and SIGTERM so until the server does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)


def _end(number: int, _: FrameType | None) -> None:
    os.write(2, f"ended by {signal.Signals(number).name}\n".encode())
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(128 + number)  # the first process of a container ignores what it does not handle
