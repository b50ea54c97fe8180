"""Scratch memory of one thread, kept between calls: fresh pages cost more than the copies made into them."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

__all__ = ["arena", "arena_bytes"]

_LINE = 16
"""f32 values of a cache line."""

_local = threading.local()


def _held() -> dict[str, npt.NDArray[np.float32]]:
    if not hasattr(_local, "held"):
        _local.held = {}
    held: dict[str, npt.NDArray[np.float32]] = _local.held
    return held


def arena(name: str, floats: int) -> npt.NDArray[np.float32]:
    """Give this thread's f32 scratch called `name`, at least `floats` long plus one line, aligned to a cache line.

    Its content is undefined. It stays the caller's until the next request for the same name.
    """
    held = _held()
    found = held.get(name)
    if found is None or found.size < floats + _LINE:
        raw = np.empty(floats + 2 * _LINE, np.float32)
        start = (-raw.ctypes.data // 4) % _LINE
        found = held[name] = raw[start : start + floats + _LINE]
    return found


def arena_bytes() -> int:
    """Give the bytes of scratch that this thread holds."""
    return sum(array.nbytes for array in _held().values())
