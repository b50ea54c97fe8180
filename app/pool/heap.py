"""Return free heap memory to the system, and choose what the out-of-memory killer takes first."""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["give_back", "prefer_for_oom_kill"]

_OOM_SCORE = 500


@cache
def _trim() -> Any:
    """Return glibc's `malloc_trim`; None with other C libraries."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back() -> None:
    """Return free heap memory to the system."""
    if (trim := _trim()) is not None:
        trim(0)


def prefer_for_oom_kill(pid: int | str = "self") -> None:
    """Make the out-of-memory killer choose this process, and those it starts, before the server."""
    with contextlib.suppress(OSError):  # a container may hide or lock /proc; nothing depends on it
        score = Path(f"/proc/{pid}/oom_score_adj")
        inherited = int(score.read_text(encoding="ascii"))
        score.write_text(str(min(1000, inherited + _OOM_SCORE)), encoding="ascii")
