"""Memory: what the C library keeps is given back, and who goes first when there is none left."""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["give_back", "kill_first"]

_OOM_SCORE = 500


@cache
def _trim() -> Any:
    """Find glibc's function; others have none, or need none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back() -> None:
    """Give free memory of the heap back."""
    if (trim := _trim()) is not None:
        trim(0)


def kill_first(pid: int | str = "self") -> None:
    """Put a process, and those that it will start, before the server on the out-of-memory killer's list."""
    with contextlib.suppress(OSError):  # a container may hide or lock /proc; nothing depends on it
        score = Path(f"/proc/{pid}/oom_score_adj")
        inherited = int(score.read_text(encoding="ascii"))
        score.write_text(str(min(1000, inherited + _OOM_SCORE)), encoding="ascii")
