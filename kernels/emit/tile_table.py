"""The register tiles of this processor, compiled once each and called by address.

A Numba function that calls another one is linked and optimised together with it. The tiles are C callbacks behind
addresses instead, so that two dozen of them are compiled once, whatever calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from kernels.emit.compiler import emitted_entry
from kernels.emit.depthwise import LINE_TAPS, lane_taps
from kernels.emit.register_tiles import fma_tile
from kernels.target import target

__all__ = ["FROM_MEMORY", "LANEWISE", "LANE_ROWS", "LINES_KEPT", "tile_entries", "tile_table"]

FROM_MEMORY = 2
"""Rows of the table from the tiles of one and two vectors to those of vectors that are in no cache yet."""

LANEWISE = {"f32": 5, "bf16": 6} | ({"f16": 7} if target().converts_f16 else {})
"""Rows of the table with the tiles of `kernels.emit.depthwise.lane_taps`, by what they read; of f16 that takes an
instruction for it."""

LANE_ROWS = 9
"""Rows of the tallest lanewise tile without kept lines: a 3x3 kernel."""

LINES_KEPT = LANE_ROWS // LINE_TAPS if target().registers == 32 else 0
"""Kernel lines up to which direct tiles keep values in registers, where there are 32; the table has them last."""


def _entry(kind: int, rows: int) -> Callable[[], int]:
    """List one tile for compiling; return what gives its address."""
    stored = next((dtype for dtype, row in LANEWISE.items() if row == kind), None)
    if stored:
        kept, taps = (2, LINE_TAPS * (rows - LANE_ROWS)) if rows > LANE_ROWS else (0, rows)
        emit = lane_taps(taps, target().registers // 16 or 1, target().lanes, stored, kept)
        return emitted_entry(f"taps_{rows}_{stored}", emit, 5)
    ahead = kind > FROM_MEMORY
    vectors = kind - FROM_MEMORY * ahead
    return emitted_entry(f"tile_{rows}x{vectors}{'_ahead' * ahead}", fma_tile(rows, vectors, target().lanes, ahead), 5)


def tile_entries() -> list[tuple[int, int]]:
    """List kind and rows of each tile that this target has."""
    far = {FROM_MEMORY + vectors: rows for vectors, rows in target().rows.items()}
    most = {**target().rows, **far, **dict.fromkeys(LANEWISE.values(), LANE_ROWS + LINES_KEPT)}
    return [(kind, rows) for kind in sorted(most) for rows in range(1, most[kind] + 1)]


_ENTRIES = {entry: _entry(*entry) for entry in tile_entries()}


@cache
def tile_table() -> npt.NDArray[np.int64]:
    """Return the tiles' addresses as [kind][rows], compiling what is missing.

    Kinds are one vector, two vectors, both FROM_MEMORY, and those of LANEWISE.
    """
    table = np.zeros((5 + len(LANEWISE), LANE_ROWS + LINES_KEPT + 1), np.int64)
    for entry, address in _ENTRIES.items():
        table[entry] = address()
    return table
