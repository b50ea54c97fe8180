"""Scratch memory of one thread, kept between calls: fresh pages cost more than the copies made into them."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MOST_BYTES", "address", "arena", "arena_address", "arena_bytes", "arena_trim"]

_addressof: Any = ctypes.addressof
_first_byte: Any = ctypes.c_char.from_buffer

MOST_BYTES = 64 << 20
"""Scratch that a thread may keep from one unit to the next: what the largest unit of a real layer needs."""

_LINE = 16
"""f32 values of a cache line."""


class _Local(threading.local):
    """What a thread holds: each array with its address, which NumPy takes a microsecond to say."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[npt.NDArray[np.float32], int]] = {}
        self.nbytes = 0


_local = _Local()


def arena(name: str, floats: int) -> npt.NDArray[np.float32]:
    """Return this thread's f32 scratch called `name`, at least `floats` long plus one line, aligned to a cache line.

    Its content is undefined. It stays the caller's until the next request for the same name.
    """
    return _hold(name, floats)[0]


def address(array: npt.NDArray[Any]) -> int:
    """Return the address of an array's first value."""
    try:
        return int(_addressof(_first_byte(array)))  # NumPy takes two to nine microseconds to describe an array
    except (TypeError, ValueError):  # an array that is read-only, or empty
        return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


def arena_address(name: str, floats: int) -> int:
    """Return the address of `arena`."""
    return _hold(name, floats)[1]


def _hold(name: str, floats: int) -> tuple[npt.NDArray[np.float32], int]:
    found = _local.held.get(name)
    if found is None or found[0].size < floats + _LINE:
        raw = np.empty(floats + 2 * _LINE, np.float32)
        start = (-raw.ctypes.data // 4) % _LINE
        array = raw[start : start + floats + _LINE]
        _local.nbytes += array.nbytes - (found[0].nbytes if found else 0)
        found = _local.held[name] = array, array.ctypes.data
    return found


def arena_bytes() -> int:
    """Return the bytes of scratch that this thread holds."""
    return _local.nbytes


def arena_trim() -> None:
    """Free this thread's scratch if it is more than `MOST_BYTES`; nothing may use it."""
    if _local.nbytes > MOST_BYTES:
        _local.held.clear()
        _local.nbytes = 0
