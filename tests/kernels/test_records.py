"""Records: rows with names, the same to NumPy, to compiled code and to emitted code."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.emit.compiler import Record, row_of
from kernels.emit.dots import Walks
from kernels.emit.register_tiles import Walk
from kernels.gradient.tiles.records import Block, Box, Slab


def test_a_walk_begins_with_eleven_integers() -> None:
    """The forward kernels write a walk as integers in this order: steps, counts, then two more."""
    fields = Walk.dtype.fields
    assert fields is not None
    names = ("panel", "scalars", "counts", "acc_step", "segment")
    assert [fields[name][1] for name in names] == [0, 24, 48, 72, 80]


def test_walks_of_products_are_thirteen_integers() -> None:
    """ConvTranspose writes what a block walks over as integers in this order."""
    fields = Walks.dtype.fields
    assert fields is not None
    names = ("b_part", "a_part", "a_line", "acc_line", "count", "starts", "skip", "down")
    assert [fields[name][1] for name in names] == list(range(0, 64, 8))
    assert Walks.dtype.itemsize == 8 * 13


def test_no_two_records_have_one_name() -> None:
    """An annotation is looked up by its name alone, so a second record of that name is an error."""
    with pytest.raises(AssertionError):
        type("Box", (Record,), {"__annotations__": {"first": "int"}})


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
