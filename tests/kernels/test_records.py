"""Records: rows with names, the same to NumPy, to compiled code and to emitted code."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.emit.compiler import row_of
from kernels.gradient.tiles.records import Block, Box, Slab


def test_records_lie_inside_records() -> None:
    """A slab holds the boxes of both tensors, each with its own names."""
    assert Slab.dtype["vector"] == Slab.dtype["scalar"] == Box.dtype
    slabs = np.zeros(2, Slab.dtype)
    slabs["vector"]["first"][1] = 1, 2, 3, 4
    assert slabs[1]["vector"]["first"].tolist() == [1, 2, 3, 4]


def test_a_row_names_every_field() -> None:
    """A field that is left out is an error, whatever order the others come in."""
    row = row_of(Block, panel=6, acc=5, lane=4, vectors=3, valid=2, first=1)
    assert row.tolist() == [(1, 2, 3, 4, 5, 6)]
    with pytest.raises(AssertionError):
        row_of(Block, first=1)
