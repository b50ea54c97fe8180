"""Memory for measurements: warm, as a service and a training step have it, and aligned as theirs is."""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["aligned", "empty", "keep_memory"]

_LINE = 64  # bytes; PyTorch aligns its tensors to them, the service to pages, NumPy to 16 bytes

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # malloc.h


def keep_memory() -> None:
    """Keep freed memory in this process, for its next allocations. Call this before allocating anything large.

    Otherwise a result of some MiB is measured with the page faults of its memory, which may take longer than a layer
    with few channels. Only glibc can do this; elsewhere nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an array of undefined values that begins at a cache line."""
    kind = np.dtype(dtype)
    nbytes = prod(shape) * kind.itemsize
    memory = np.empty(nbytes + _LINE, np.uint8)
    begin = -memory.ctypes.data % _LINE
    return memory[begin : begin + nbytes].view(kind).reshape(shape)


def aligned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a contiguous copy that begins at a cache line."""
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    return copy
