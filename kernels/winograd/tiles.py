"""The compiled loops that transform 4x4 or 2x2 tiles of a tensor, in any layout, into panels: the packer of Winograd.

Everything is addresses, byte steps and tables (`kernels.winograd.records`); nothing is checked here.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.compiler import Rows, Vector, jit
from kernels.emit.winograd import transform_line
from kernels.pack.panels import PANEL, pack_panels
from kernels.target import target
from kernels.winograd.records import Channels, Side, TileSlab

__all__ = ["STAGED_LINE", "find_window", "stage_lines", "transform_tiles"]

WIDTH = target().lanes

STAGED_LINE = 8 * WIDTH
"""Bytes of a staged position: two vectors."""

_wide_1, _wide_2 = (transform_line(True, vectors) for vectors in (1, 2))
_narrow_1, _narrow_2 = (transform_line(False, vectors) for vectors in (1, 2))


@jit
def _frame(side: Side, tensor: int, frame: int) -> int:
    """Return the address of position (0, 0) of a frame."""
    depth = (side.first + frame % side.frames) * side.stride + side.shift
    address: int = tensor + side.start + frame // side.frames * side.strides[0] + depth * side.strides[1]
    return address


@jit
def find_window(side: Side, slab: TileSlab, window: Vector) -> None:
    """Find the lines and columns of a side that a slab reads: low and high of each, then the bytes of a frame."""
    for axis in range(2):
        size = side.lines if axis == 0 else side.columns
        low = 2 * slab.low[1 + axis] - side.pad[axis]
        high = 2 * slab.high[1 + axis] - side.pad[axis] + (2 if side.wide else 0)
        window[2 * axis] = min(max(low, 0), size)
        window[2 * axis + 1] = max(min(high, size), window[2 * axis])
    window[4] = (window[1] - window[0]) * (window[3] - window[2]) * STAGED_LINE


@jit
def stage_lines(side: Side, channels: Rows[Channels], slab: TileSlab, window: Vector, tensor: int, stage: int) -> None:
    """Copy what a slab reads of a side as f32: [channels][frame][line][column][two vectors]."""
    parts, sizes, steps = np.empty(channels.shape[0], PANEL), np.ones(4, np.int64), np.zeros(4, np.int64)
    sizes[2], sizes[3] = window[1] - window[0], window[3] - window[2]
    steps[2], steps[3] = sizes[3], 1
    if window[4] == 0:
        return
    for frame in range(slab.low[0], slab.high[0]):
        for b in range(channels.shape[0]):
            block, part = channels[b], parts[b]
            part.lanes, part.valid, part.unit = block.vectors * WIDTH, block.valid, STAGED_LINE
            part.source = block.first * side.channel
            part.address = stage + block.stage + (frame - slab.low[0]) * window[4]
        source = _frame(side, tensor, frame) + window[0] * side.strides[2] + window[2] * side.strides[3]
        pack_panels(
            side.kind, parts, sizes, steps, source, side.strides[:], side.channel, tensor + side.nbytes
        )  # fmt: skip


@jit
def _rows_of(wide: bool, product: int, rows: Vector) -> np.float32:
    """Give the two lines of a tile that a vertical product takes, the second -1 for none, and the second's sign."""
    if wide:
        rows[0], rows[1] = product, 2 if product < 2 else 1
        return np.float32(1 if product == 1 else -1)
    rows[0], rows[1] = product // 3, 1 if product == 1 or product == 2 else -1
    return np.float32(1 if product == 1 else -1)


@jit
def transform_tiles(
    side: Side, channels: Rows[Channels], slab: TileSlab, window: Vector, tensor: int, stage: int, panels: int,
    zero: int, product: int, lines: int,
) -> None:  # fmt: skip
    """Transform `lines` lines of tiles of each frame of a slab, for one vertical product.

    Tiles lie line after line, or where the last column is odd column after column, so that it can be left out.
    """
    rows, at = np.empty(2, np.int64), np.empty(2, np.int64)
    steps = np.empty(2, np.int64)
    sign = _rows_of(side.wide, product, rows)
    columns = slab.high[2] - slab.low[2]
    count = (slab.high[0] - slab.low[0]) * lines
    across, along = (1, count) if slab.odd[1] else (columns, 1)
    first = 2 * slab.low[2] - side.pad[1]
    row, pixel, limit, left = side.strides[2], side.strides[3], side.columns, 0
    if side.staged:
        row, pixel = (window[3] - window[2]) * STAGED_LINE, STAGED_LINE
        limit, left = window[3], window[2]
    number = 0
    for frame in range(slab.low[0], slab.high[0]):
        source = _frame(side, tensor, frame)
        if side.staged:
            source = stage + (frame - slab.low[0]) * window[4] - window[0] * row - left * pixel
        for line in range(slab.low[1], slab.low[1] + lines):
            for i in range(2):
                y = 2 * line - side.pad[0] + rows[i]
                inside = rows[i] >= 0 and 0 <= y < side.lines
                at[i], steps[i] = (source + y * row, pixel) if inside else (zero, 0)
            for b in range(channels.shape[0]):
                block = channels[b]
                more = block.stage if side.staged else block.first * side.channel
                one = at[0] + (more if steps[0] != 0 else 0)
                other = at[1] + (more if steps[1] != 0 else 0)
                to = panels + block.panel + number * across * block.line
                step = along * block.line
                if side.wide and block.vectors == 2:
                    _wide_2(one, other, steps[0], steps[1], sign, first, limit, zero, columns, to, step, side.plane)
                elif side.wide:
                    _wide_1(one, other, steps[0], steps[1], sign, first, limit, zero, columns, to, step, side.plane)
                elif block.vectors == 2:
                    _narrow_2(one, other, steps[0], steps[1], sign, first, limit, zero, columns, to, step, side.plane)
                else:
                    _narrow_1(one, other, steps[0], steps[1], sign, first, limit, zero, columns, to, step, side.plane)
            number += 1
