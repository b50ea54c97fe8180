"""Sums that workers may share out: a power of two of chunks, each summed by itself, added up as a balanced tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.blocks import SUMS

__all__ = ["chunks_of", "sum_tree"]


def chunks_of(most: int) -> int:
    """Return the number of chunks of a sum that may have up to `most`."""
    return 1 << (max(1, min(most, SUMS.chunks)).bit_length() - 1)


def sum_tree(pieces: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Add up the sums of all chunks, rows of a table."""
    with np.errstate(over="ignore", invalid="ignore"):  # as compiled sums
        while len(pieces) > 1:
            pieces = pieces[0::2] + pieces[1::2]
    found: npt.NDArray[Any] = pieces[0]
    return found
