"""How fast a processor runs the f32 micro-kernel alone: a limit for every kernel that is made of it."""

from __future__ import annotations

import ctypes
import time

import numpy as np

from kernels.emit.brgemm import MICRO, ROWS, Batch, Element, micro_table
from kernels.target import target

__all__ = ["TileLoop", "tile_gflops"]

_STEPS = 32
_TILE = ctypes.CFUNCTYPE(None, ctypes.c_int64)


class TileLoop:
    """The tallest tile of two vectors on panels that stay in L1; `flops` are those of one step."""

    def __init__(self) -> None:
        rows, width = ROWS["f32"][2], target().lanes
        self._tile = _TILE(int(micro_table()[MICRO["f32"] + 1]))
        self._b = np.full(_STEPS * 2 * width, 1e-9, np.float32)
        self._a = np.full(_STEPS * rows, 1e-9, np.float32)
        self._sums = np.zeros(rows * 2 * width, np.float32)
        self._batch = np.zeros(1, Batch.dtype)
        for name, value in {
            "rows": rows, "a": self._a.ctypes.data, "a_row": 4 * _STEPS, "a_step": 4, "b": self._b.ctypes.data,
            "b_vector": 4 * width, "b_step": 8 * width, "c": self._sums.ctypes.data, "c_row": 8 * width,
            "next": self._sums.ctypes.data, "start": self._sums.ctypes.data, "valid": width,
        }.items():  # fmt: skip
            self._batch[name] = value
        self.flops = 2 * rows * 2 * width

    def __call__(self, count: int) -> None:
        """Sum about `count` steps; the same ones again and again."""
        elements = np.zeros(max(1, count // _STEPS), Element.dtype)
        elements["steps"] = _STEPS
        self._batch["elements"], self._batch["count"] = elements.ctypes.data, len(elements)
        self._tile(self._batch.ctypes.data)


def tile_gflops(rounds: int = 10, steps: int = 1 << 14) -> float:
    """Return the GFLOP/s of f32 of this thread: the best of some rounds of about a millisecond of processor time."""
    loop = TileLoop()

    def once() -> float:
        begin = time.thread_time()
        loop(steps)
        return loop.flops * steps / (time.thread_time() - begin) / 1e9

    return max(once() for _ in range(rounds))
