"""The compiled loops that transform 4x4 or 2x2 tiles of a tensor, in any layout, into panels: the packer of Winograd.

Everything is addresses, byte steps and tables (`kernels.winograd.records`); nothing is checked here.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.compiler import Rows, Vector, inlined, jit
from kernels.emit.intrinsics import address_of, local
from kernels.emit.winograd import FACTORS, TileLine, transform_line
from kernels.pack.panels import PANEL, Values, pack_panels
from kernels.target import target
from kernels.winograd.records import Channels, Room, Side, TileSlab

__all__ = ["STAGED_LINE", "find_window", "stage_lines", "tiles_along", "transform_tiles"]

WIDTH = target().lanes

STAGED_LINE = 8 * WIDTH
"""Bytes of a staged position: two vectors."""

LINE = TileLine.dtype


@inlined
def tiles_along(slab: TileSlab, axis: int, product: int) -> int:
    """Count the lines (0) or columns (1) of tiles that have a product along them: an odd last one lacks the fourth."""
    tiles: int = slab.high[1 + axis] - slab.low[1 + axis]
    return tiles - 1 if product == FACTORS - 1 and slab.odd[axis] else tiles


@inlined
def _frame(side: Side, tensor: int, frame: int) -> int:
    """Return the address of position (0, 0) of a frame."""
    depth = (side.first + frame % side.frames) * side.stride + side.shift
    address: int = tensor + side.start + frame // side.frames * side.strides[0] + depth * side.strides[1]
    return address


@inlined
def find_window(side: Side, slab: TileSlab, room: Room) -> None:
    """Find the lines and columns of a side that a slab reads."""
    window = room.window
    for axis in range(2):
        size = side.lines if axis == 0 else side.columns
        low = 2 * slab.low[1 + axis] - side.pad[axis]
        high = 2 * slab.high[1 + axis] - side.pad[axis] + (2 if side.wide else 0)
        window[2 * axis] = min(max(low, 0), size)
        window[2 * axis + 1] = max(min(high, size), window[2 * axis])
    room.frame = (window[1] - window[0]) * (window[3] - window[2]) * STAGED_LINE


@jit
def stage_lines(side: Side, channels: Rows[Channels], slab: TileSlab, room: Room) -> None:
    """Copy what a slab reads of a side as f32: [channels][frame][line][column][two vectors]."""
    parts, sizes, steps = np.empty(channels.shape[0], PANEL), np.ones(4, np.int64), np.zeros(4, np.int64)
    window = room.window
    sizes[2], sizes[3] = window[1] - window[0], window[3] - window[2]
    steps[2], steps[3] = sizes[3], 1
    if room.frame == 0:
        return
    for frame in range(slab.low[0], slab.high[0]):
        for b in range(channels.shape[0]):
            block, part = channels[b], parts[b]
            part.lanes, part.valid, part.unit = block.vectors * WIDTH, block.valid, STAGED_LINE
            part.source = block.first * side.channel
            part.address = room.stage + block.stage + (frame - slab.low[0]) * room.frame
        source = _frame(side, room.tensor, frame) + window[0] * side.strides[2] + window[2] * side.strides[3]
        src = Values(side.kind, source, side.strides[:], side.channel, room.tensor + side.nbytes)
        pack_panels(src, parts, sizes, steps)


@inlined
def _rows_of(wide: bool, product: int, rows: Vector) -> int:
    """Give the two lines of a tile that a vertical product takes, the second -1 for none, and the second's sign."""
    if wide:
        rows[0], rows[1] = product, 2 if product < 2 else 1
    else:
        rows[0], rows[1] = product // 3, 1 if product == 1 or product == 2 else -1
    return 1 if product == 1 else -1


@jit
def transform_tiles(
    side: Side, channels: Rows[Channels], slab: TileSlab, room: Room, product: int, lines: int, to: int
) -> None:
    """Transform `lines` lines of tiles of each frame of a slab, for one vertical product, to panels from `to` on.

    Tiles lie line after line, or where the last column is odd column after column, so that it can be left out.
    """
    rows, begins, table = np.empty(2, np.int64), np.empty(2, np.int64), local(LINE)
    tiles, window = table[0], room.window
    columns = slab.high[2] - slab.low[2]
    across, along = (1, (slab.high[0] - slab.low[0]) * lines) if slab.odd[1] else (columns, 1)
    row, pixel, left = side.strides[2], side.strides[3], 0
    tiles.sign, tiles.columns = _rows_of(side.wide, product, rows), side.columns
    tiles.first, tiles.count, tiles.zero, tiles.plane = 2 * slab.low[2] - side.pad[1], columns, room.zeros, side.plane
    if side.staged:
        row, pixel = (window[3] - window[2]) * STAGED_LINE, STAGED_LINE
        tiles.columns, left = window[3], window[2]
    number = 0
    for frame in range(slab.low[0], slab.high[0]):
        source = _frame(side, room.tensor, frame)
        if side.staged:
            source = room.stage + (frame - slab.low[0]) * room.frame - window[0] * row - left * pixel
        for line in range(slab.low[1], slab.low[1] + lines):
            for i in range(2):
                y = 2 * line - side.pad[0] + rows[i]
                inside = rows[i] >= 0 and 0 <= y < side.lines
                begins[i], tiles.steps[i] = (source + y * row, pixel) if inside else (room.zeros, 0)
            for b in range(channels.shape[0]):
                block = channels[b]
                more = block.stage if side.staged else block.first * side.channel
                for i in range(2):
                    tiles.rows[i] = begins[i] + (more if tiles.steps[i] != 0 else 0)
                tiles.to, tiles.step = to + block.panel + number * across * block.line, along * block.line
                transform_line(side.wide, block.vectors, address_of(tiles))
            number += 1
