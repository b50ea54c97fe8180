"""What running work yields: the boxes of an output, as bytes."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from app.calls.work import TileReady

Box = tuple[slice, ...]


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((64,), np.s_[3:40]),
        ((3, 3, 512, 512), np.s_[:, :, :, 256:]),
        ((3, 3, 512, 512), np.s_[1:, :, :, :]),
        ((5, 7, 11), np.s_[1:4, 2:6, 3:9]),
        ((2, 700_000), np.s_[:, 1:]),
        ((2, 3, 90_000), np.s_[:, 1:, :]),
        ((0, 4), np.s_[:, :]),
        ((4, 4), np.s_[:, 2:2]),
    ],
)
def test_a_box_is_copied_in_small_pieces(shape: tuple[int, ...], box: Box) -> None:
    """The pieces of a box are its elements in C order, and what is copied of it at a time is small."""
    output = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    array = output[box]
    tile = TileReady(cast("Any", None), 0, (), array.shape, array)
    joined = b""
    for piece in tile.pieces():
        is_view = np.shares_memory(np.frombuffer(piece, np.uint8), output)
        assert is_view or len(piece) <= 256 << 10
        joined += piece
    assert joined == array.tobytes()
