"""How fast a processor runs the f32 register tile alone: a limit for every kernel that is made of it."""

from __future__ import annotations

import ctypes
import time

import numpy as np

from kernels.emit.register_tiles import Walk
from kernels.emit.tile_table import tile_table
from kernels.target import target

__all__ = ["TileLoop", "tile_gflops"]

_PIXELS = 32
_TILE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)


class TileLoop:
    """The tallest register tile of two vectors on panels that stay in L1; `flops` are those of one pixel."""

    def __init__(self) -> None:
        rows, width = target().rows[2], target().lanes
        self._tile = _TILE(int(tile_table()[2, rows]))
        self._panel = np.full(_PIXELS * 2 * width, 1e-9, np.float32)
        self._scalars = np.full(_PIXELS * rows, 1e-9, np.float32)
        self._offsets = np.arange(rows, dtype=np.int64) * 4 * _PIXELS
        self._sums = np.zeros(rows * 2 * width, np.float32)
        self.flops = 2 * rows * 2 * width

    def __call__(self, count: int) -> None:
        """Sum about `count` pixels."""
        # The panel is read repeatedly: steps of 0 for all but the column, in one segment.
        walk = np.zeros(1, Walk.dtype)
        walk["panel"], walk["scalars"] = (0, 0, 1), (0, 0, 4)
        walk["counts"] = (1, max(1, count // _PIXELS), _PIXELS)
        walk["acc_step"], walk["segment"] = 1, 30
        self._tile(*(each.ctypes.data for each in (walk, self._panel, self._scalars, self._offsets, self._sums)))


def tile_gflops(rounds: int = 10, pixels: int = 1 << 14) -> float:
    """Return the GFLOP/s of f32 of this thread: the best of some rounds of about a millisecond of processor time."""
    loop = TileLoop()

    def once() -> float:
        begin = time.thread_time()
        loop(pixels)
        return loop.flops * pixels / (time.thread_time() - begin) / 1e9

    return max(once() for _ in range(rounds))
