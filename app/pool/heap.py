"""Memory that the C library keeps: given back to the system when much of it was in use for a short time."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

__all__ = ["give_back"]


@cache
def _trim() -> Any:
    """Find glibc's function; others have none, or need none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back() -> None:
    """Give free memory of the heap back."""
    if (trim := _trim()) is not None:
        trim(0)
