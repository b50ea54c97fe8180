"""Sums that workers may share out: a power of two of chunks, each summed by itself, added up as a balanced tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.arena import arena
from kernels.blocks import CACHES, SUMS
from kernels.emit.compiler import Floats, jit

__all__ = ["chunks_of", "sum_chunks", "sum_tree"]


def chunks_of(most: int, nbytes: int = 0) -> int:
    """Return the number of chunks of a sum that may have up to `most`; its accumulators take so many bytes."""
    limit = SUMS.large_chunks if nbytes > 2 * CACHES.l2 else SUMS.chunks
    return 1 << (max(1, min(most, limit)).bit_length() - 1)


@jit
def add_floats(total: Floats, part: Floats) -> None:
    for i in range(total.size):
        total[i] += part[i]


def sum_chunks(low: int, high: int, floats: int, leaf: Callable[[int, Floats], bool], depth: int = 0) -> Floats | None:
    """Sum chunks ``low..high`` as the same tree, so that any aligned split among workers gives the same bits.

    `leaf` writes the sums of one chunk; where it returns False, so that there are none, the result is None. It is this
    thread's scratch, of so many `floats`.
    """
    if high - low == 1:
        sums = arena(f"acc{depth}", floats)[:floats]
        return sums if leaf(low, sums) else None
    middle = (low + high) // 2
    total = sum_chunks(low, middle, floats, leaf, depth)
    part = None if total is None else sum_chunks(middle, high, floats, leaf, depth + 1)
    if total is None or part is None:
        return None
    add_floats(total, part)
    return total


def sum_tree(pieces: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Add up the sums of all chunks, rows of a table."""
    with np.errstate(over="ignore", invalid="ignore"):  # as compiled sums
        while len(pieces) > 1:
            pieces = pieces[0::2] + pieces[1::2]
    found: npt.NDArray[Any] = pieces[0]
    return found
