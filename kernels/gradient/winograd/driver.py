"""The compiled loops of a Winograd weight gradient: transform a slab of tiles, multiply, turn sums into taps.

Everything is addresses, byte steps and tables (`kernels.gradient.winograd.records`) that
`kernels.gradient.winograd.layout` has laid out; nothing is checked here.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.compiler import Floats, Halves, Rows, Table, Vector, jit
from kernels.emit.intrinsics import add_run, address_of, all_finite, call_tile, fill_zero
from kernels.emit.winograd import FACTORS, TAPS, count_taps, integer_peak, transform_line
from kernels.gradient.tiles.driver import store
from kernels.gradient.tiles.records import Block, Tile, Walk, Weights
from kernels.gradient.winograd.records import Channels, Side, TileSlab
from kernels.pack.panels import F16, F32, KINDS, PANEL, pack_panels
from kernels.target import target

__all__ = ["PRODUCTS", "STAGED_LINE", "TAKEN_ROWS", "add_products", "add_sums", "largest_integer", "write_taps"]

WIDTH = target().lanes

PRODUCTS = FACTORS * FACTORS

STAGED_LINE = 8 * WIDTH
"""Bytes of a staged position: two vectors."""

TAKEN_ROWS = 64
"""Rows of sums that are turned into taps at a time."""

SCANNED = 1 << 13
"""Values between two looks at whether they are integers."""

WALK = Walk.dtype

_peak_f32, _peak_f16, _peak_bf16 = (integer_peak(kind) for kind in KINDS)
_wide_1, _wide_2 = (transform_line(True, vectors) for vectors in (1, 2))
_narrow_1, _narrow_2 = (transform_line(False, vectors) for vectors in (1, 2))


@jit
def _peak(kind: int, address: int, count: int) -> float:
    if kind == F32:
        return _peak_f32(address, count)  # type: ignore[no-any-return]
    if kind == F16:
        return _peak_f16(address, count)  # type: ignore[no-any-return]
    return _peak_bf16(address, count)  # type: ignore[no-any-return]


@jit
def largest_integer(kind: int, address: int, count: int) -> np.float32:
    """Return the largest magnitude of `count` (at least 8) values, or -1 where they are not all integers.

    It looks no farther than the first that is none.
    """
    size, most = 4 if kind == F32 else 2, np.float32(0)
    for first in range(0, count, SCANNED):
        # the last vector may start earlier
        some = min(SCANNED, count - first)
        found = np.float32(0)
        if some >= 8:
            found = np.float32(_peak(kind, address + first * size, some // 8))
        if found >= 0 and some % 8 != 0:
            last = np.float32(_peak(kind, address + (count - 8) * size, 1))
            found = last if last < 0 else max(found, last)
        if found < 0:
            return np.float32(-1)
        most = max(most, found)
    return most


@jit
def _frame(side: Side, tensor: int, frame: int) -> int:
    """Return the address of position (0, 0) of a frame."""
    depth = (side.first + frame % side.frames) * side.stride + side.shift
    address: int = tensor + side.start + frame // side.frames * side.strides[0] + depth * side.strides[1]
    return address


@jit
def _window(side: Side, slab: TileSlab, window: Vector) -> None:
    """Find the lines and columns of a side that a slab reads: low and high of each, then the bytes of a frame."""
    for axis in range(2):
        size = side.lines if axis == 0 else side.columns
        low = 2 * slab.low[1 + axis] - side.pad[axis]
        high = 2 * slab.high[1 + axis] - side.pad[axis] + (2 if side.wide else 0)
        window[2 * axis] = min(max(low, 0), size)
        window[2 * axis + 1] = max(min(high, size), window[2 * axis])
    window[4] = (window[1] - window[0]) * (window[3] - window[2]) * STAGED_LINE


@jit
def _stage(side: Side, channels: Rows[Channels], slab: TileSlab, window: Vector, tensor: int, stage: int) -> None:
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
def _transform(
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


@jit
def add_products(
    table: Table, sides: Rows[Side], lanes: Rows[Channels], scalars: Rows[Channels], slabs: Rows[TileSlab],
    tiles: Rows[Tile], firsts: Vector, begins: bool, segment: int, tensors: Vector, rooms: Vector,
    sums: int,
) -> None:  # fmt: skip
    """Add slabs of tiles to the sums of all products; the first slab `begins` them.

    `sides` are that of the lanes and that of the scalars, `tensors` their addresses. `rooms` has the addresses of
    staged lines and panels of both and of two vectors of zeros. Register tiles of one vector begin at the first and
    those of two at the second of `firsts`, which ends with the end.
    """
    windows = np.zeros((2, 5), np.int64)
    walks = np.zeros(1, WALK)
    walk = walks[0]
    walk.acc_step, walk.segment, walk.panel[2], walk.scalars[2] = 1, segment, 1, STAGED_LINE
    walk.counts[0], walk.counts[1] = 1, 1
    for s in range(slabs.shape[0]):
        slab, new = slabs[s], begins and s == 0
        for i in range(2):
            _window(sides[i], slab, windows[i])
            if sides[i].staged:
                _stage(sides[i], lanes if i == 0 else scalars, slab, windows[i], tensors[i], rooms[i])
        frames, columns = slab.high[0] - slab.low[0], slab.high[2] - slab.low[2]
        for y in range(FACTORS):
            lines = slab.high[1] - slab.low[1] - (1 if y == 3 and slab.odd[0] else 0)
            for i in range(2 if lines > 0 else 0):
                _transform(
                    sides[i], lanes if i == 0 else scalars, slab, windows[i], tensors[i], rooms[i], rooms[2 + i],
                    rooms[4], y, lines,
                )  # fmt: skip
            for x in range(FACTORS):
                walk.counts[2] = frames * lines * (columns - (1 if x == 3 and slab.odd[1] else 0))
                panel, scalar = rooms[2] + x * sides[0].plane, rooms[3] + x * sides[1].plane
                for b in range(lanes.shape[0]):
                    block = lanes[b]
                    to = sums + block.sums + (FACTORS * y + x) * block.plane
                    for t in range(firsts[block.vectors - 1], firsts[block.vectors]):
                        tile = tiles[t]
                        place = to + tile.row * block.line
                        if new:
                            fill_zero(place, tile.rows * block.line)
                        if walk.counts[2] > 0:
                            call_tile(
                                table[block.vectors, tile.rows], address_of(walk), panel + block.panel, scalar,
                                address_of(tile.offsets), place,
                            )  # fmt: skip


@jit
def add_sums(total: int, part: int, count: int) -> None:
    """Add `count` partial sums to others."""
    add_run(total, part, count)


@jit
def write_taps(
    lanes: Rows[Channels], blocks: Rows[Block], layouts: Rows[Weights], sums: int, taps: Floats, out32: Floats,
    out16: Halves,
) -> bool:  # fmt: skip
    """Turn sums into taps and write them to the one layout of the weights, rounding once.

    `blocks` are the lanes as `kernels.gradient.tiles.driver.store` takes them, `taps` is scratch. Returns whether all
    are finite, before they are rounded.
    """
    weights, finite = layouts[0], True
    start, rows = weights.start, weights.channels
    tap_major = weights.channel_rows == 1
    for b in range(lanes.shape[0]):
        block, vectors = lanes[b], lanes[b].vectors
        for first in range(0, rows, TAKEN_ROWS):
            count = min(TAKEN_ROWS, rows - first)
            row_step, tap_step = (block.line, count * block.line) if tap_major else (9 * block.line, block.line)
            place, to = sums + block.sums + first * block.line, taps.ctypes.data
            if tap_major:
                count_taps(place, block.plane, vectors * count, to, tap_step)
            else:
                for row in range(count):
                    count_taps(place + row * block.line, block.plane, vectors, to + row * row_step, tap_step)
            finite = all_finite(to, TAPS * TAPS * count * block.line // 32) and finite
            weights.start, weights.channels = start + first * weights.channel_step, count
            weights.tap_rows = count if tap_major else 1
            store(taps, blocks[b : b + 1], layouts, out32, out16)
    weights.start, weights.channels = start, rows
    return finite
