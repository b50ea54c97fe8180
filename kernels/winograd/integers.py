"""Whether tensors hold integers only, and how large they are: Winograd's sums of small ones are exact."""

from __future__ import annotations

import numpy as np

from kernels.emit.compiler import jit
from kernels.emit.intrinsics import stored_size
from kernels.emit.winograd import integer_peak

__all__ = ["EXACT", "largest_integer"]

EXACT = 1 << 24
"""Magnitude up to which f32 holds every integer."""

SCANNED = 1 << 13
"""Values between two looks at whether they are integers."""


@jit
def largest_integer(kind: int, address: int, count: int) -> np.float32:
    """Return the largest magnitude of `count` (at least 8) values, or -1 where they are not all integers.

    It looks no farther than the first that is none.
    """
    size, most = stored_size(kind), np.float32(0)
    for first in range(0, count, SCANNED):
        # the last vector may start earlier
        some = min(SCANNED, count - first)
        found = np.float32(0)
        if some >= 8:
            found = np.float32(integer_peak(kind, address + first * size, some // 8))
        if found >= 0 and some % 8 != 0:
            last = np.float32(integer_peak(kind, address + (count - 8) * size, 1))
            found = last if last < 0 else max(found, last)
        if found < 0:
            return np.float32(-1)
        most = max(most, found)
    return most
