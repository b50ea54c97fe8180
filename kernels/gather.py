"""The compiled loops of ConvTranspose forward: gather every dst pixel's taps, or scatter for few dst channels.

As in `kernels.driver`, everything is addresses, byte steps and integer tables, and nothing is checked.

* planes, lines: for every dst plane or line: first tap, number of taps, first src plane or line.
* tiles: first dst column, rows, first tap, number of taps, first src column: pixels that share their taps.
* runs: first dst column, first and last src column that each tap along a line joins.
* steps: (tap step, src step) of d, of h, of w: from one tap of a dst position to its next; then rows of a tile.
"""

from __future__ import annotations

import numpy as np

from kernels._jit import Floats, Halves, Table, Vector, jit
from kernels.cpu import cpu
from kernels.packing import F16, F32
from kernels.simd import add_run, call_tile, fill_zero, load_value, round_bits, transpose_panel
from kernels.tiles import LANEWISE

__all__ = ["gather", "scatter", "write_block"]

WIDTH = cpu().width

CHUNK = 384
"""Panel lines that one call walks: 24 KB of an L1, the rest is for the scalars."""

_round_f16 = round_bits("f16")
_round_bf16 = round_bits("bf16")
_load_f32, _load_f16, _load_bf16 = load_value("f32"), load_value("f16"), load_value("bf16")
_transpose = transpose_panel("f32")


@jit
def load(kind: int, address: int) -> float:
    """Read one stored value as f32."""
    if kind == F32:
        return _load_f32(address)  # type: ignore[no-any-return]
    if kind == F16:
        return _load_f16(address)  # type: ignore[no-any-return]
    return _load_bf16(address)  # type: ignore[no-any-return]


@jit
def _gather_short(
    table: Table, tile_kind: int, line_bytes: int, level: int, depth: int, first: int, last: int, columns: int,
    lines: Table, tiles: Table, steps: Vector, kernel: Vector, channels: int, src_steps: Vector, weights: int,
    walk: Vector, offsets: Vector, acc: int,
) -> None:  # fmt: skip
    """Sum some dst lines over one plane of the kernel, all its taps in one call: short sums."""
    walk[0], walk[1] = steps[2] * kernel[1] * channels, steps[4] * channels
    walk[3], walk[4] = -steps[3] * src_steps[1], -steps[5] * src_steps[2]
    walk[8] = channels
    for line in range(first, last):
        for t in range(tiles.shape[0] if lines[line, 1] > 0 else 0):
            if tiles[t, 3] == 0:
                continue
            tap = (depth + lines[line, 0]) * kernel[1] + tiles[t, 2]
            walk[6], walk[7] = lines[line, 1], tiles[t, 3]
            call_tile(
                table[tile_kind, tiles[t, 1]], walk.ctypes.data, weights + tap * channels * line_bytes,
                level + lines[line, 2] * src_steps[1] + tiles[t, 4] * src_steps[2], offsets.ctypes.data,
                acc + ((line - first) * columns + tiles[t, 0]) * line_bytes,
            )  # fmt: skip


@jit
def _gather_long(
    table: Table, tile_kind: int, line_bytes: int, level: int, depth: int, first: int, last: int, columns: int,
    lines: Table, runs: Table, steps: Vector, kernel: Vector, channels: int, src_steps: Vector, weights: int,
    walk: Vector, offsets: Vector, acc: int,
) -> None:  # fmt: skip
    """Sum some dst lines over one plane of the kernel tap by tap, so that a tap's weights meet many pixels in L1."""
    walk[6], walk[7] = 1, 1
    for row in range(kernel[0]):
        for part in range(0, channels, CHUNK):
            walk[8] = min(CHUNK, channels - part)
            for r in range(runs.shape[0]):
                tap = (depth + row) * kernel[1] + r
                panel = weights + (tap * channels + part) * line_bytes
                length = runs[r, 2] - runs[r, 1]
                pieces = (length + steps[6] - 1) // steps[6]
                for line in range(first, last):
                    index = row - lines[line, 0]
                    if index < 0 or index % steps[2] != 0 or index // steps[2] >= lines[line, 1]:
                        continue
                    base = level + (lines[line, 2] - index // steps[2] * steps[3]) * src_steps[1] + part * src_steps[3]
                    sums = acc + ((line - first) * columns + runs[r, 0]) * line_bytes
                    for piece in range(pieces):
                        low, high = length * piece // pieces, length * (piece + 1) // pieces
                        call_tile(
                            table[tile_kind, high - low], walk.ctypes.data, panel,
                            base + (runs[r, 1] + low) * src_steps[2], offsets.ctypes.data,
                            sums + low * walk[9] * line_bytes,
                        )  # fmt: skip


@jit
def _round_store(kind: int, value: float, place: int, out32: Floats, out16: Halves) -> None:
    """Round one sum to the output's dtype."""
    if kind == F32:
        out32[place] = value
    elif kind == F16:
        out16[place] = _round_f16(value)
    else:
        out16[place] = _round_bf16(value)


@jit
def write_block(
    kind: int, acc: Floats, pixels: int, lanes: int, valid: int, place: int, steps: Vector, bias: int, bias_step: int,
    out32: Floats, out16: Halves,
) -> None:  # fmt: skip
    """Write `pixels` adjacent dst pixels of `valid` lanes; `steps` are dst elements between pixels and lanes.

    `bias` is the address of the first lane's bias, or 0; it is added before the one rounding.
    """
    if bias != 0:
        for lane in range(valid):
            value = load(kind, bias + lane * bias_step)
            for p in range(pixels):
                acc[p * lanes + lane] += value
    start = 0
    if kind == F32 and steps[0] == 1 and valid % 8 == 0:
        while start + 8 <= pixels:
            to = out32.ctypes.data + 4 * (place + start)
            _transpose(to, 4 * steps[1], acc.ctypes.data + 4 * start * lanes, valid // 8, 4 * lanes, 7)
            start += 8
    for p in range(start, pixels):
        to = place + p * steps[0]
        if kind == F32:
            for lane in range(valid):
                out32[to + lane * steps[1]] = acc[p * lanes + lane]
        else:
            for lane in range(valid):
                _round_store(kind, acc[p * lanes + lane], to + lane * steps[1], out32, out16)


@jit
def gather(
    table: Table, kind: int, lanewise: bool, blocks: Table, most_lines: int, band: Vector, sizes: Vector,
    planes: Table, lines: Table, tiles: Table, runs: Table, steps: Vector, kernel: Vector, channels: int, src: int,
    src_steps: Vector,
    acc: Floats, out_place: int, out_steps: Vector, bias: Vector, out32: Floats, out16: Halves,
) -> None:  # fmt: skip
    """Compute some lane blocks of some lines of one dst image and write them.

    A row of `blocks`: address of its weights [tap][src channel][lanes], first lane, valid lanes, vectors. `band` are
    first and last dst plane and line, `sizes` the dst columns and the stride along a line, `kernel` is (KH, KW).
    `src` is the address of the image's first value, `src_steps` its bytes for (d, h, w, channel). `acc` holds the sums
    of `most_lines` dst lines as [line][column][lanes]. `out_steps` are dst elements for (d, h, w, lane, first lane of
    a block); `bias` is the address of lane 0's bias or 0, then bytes between lanes and between first lanes of blocks.
    """
    offsets, walk = np.empty(9, np.int64), np.zeros(10, np.int64)
    for m in range(9):
        offsets[m] = m * src_steps[2]
    walk[2], walk[5], walk[9] = 1, src_steps[3], sizes[1]
    columns, sums = sizes[0], acc.ctypes.data
    short = kernel[0] * kernel[1] * channels <= CHUNK
    for b in range(blocks.shape[0]):
        tile_kind = LANEWISE if lanewise else blocks[b, 3]
        lanes = WIDTH * blocks[b, 3]
        lane_bias = bias[0] + blocks[b, 1] * bias[2] if bias[0] != 0 else 0
        for plane in range(band[0], band[1]):
            for first in range(band[2], band[3], most_lines):
                last = min(band[3], first + most_lines)
                fill_zero(sums, (last - first) * columns * lanes * 4)
                for k in range(planes[plane, 1]):
                    depth = (planes[plane, 0] + k * steps[0]) * kernel[0]
                    level = src + (planes[plane, 2] - k * steps[1]) * src_steps[0]
                    if short:
                        _gather_short(
                            table, tile_kind, 4 * lanes, level, depth, first, last, columns, lines, tiles, steps,
                            kernel, channels, src_steps, blocks[b, 0], walk, offsets, sums,
                        )  # fmt: skip
                    else:
                        _gather_long(
                            table, tile_kind, 4 * lanes, level, depth, first, last, columns, lines, runs, steps,
                            kernel, channels, src_steps, blocks[b, 0], walk, offsets, sums,
                        )  # fmt: skip
                place = out_place + plane * out_steps[0] + first * out_steps[1] + blocks[b, 1] * out_steps[4]
                write_block(
                    kind, acc, (last - first) * columns, lanes, blocks[b, 2], place, out_steps[2:], lane_bias, bias[1],
                    out32, out16,
                )  # fmt: skip


@jit
def _add_line(source: int, line: int, column: int, columns: Vector) -> None:
    """Add the products of one src pixel and one line of the kernel to a dst line; taps outside are left out."""
    depth, taps, step = columns[0], columns[1], columns[4]
    low, high = 0, taps
    while low < high and column + low * step < 0:
        low += 1
    while high > low and column + (high - 1) * step >= columns[5]:
        high -= 1
    if step == 1:
        if low < high:
            add_run(line + 4 * (column + low) * depth, source + 4 * low * depth, (high - low) * depth)
        return
    for tap in range(low, high):
        add_run(line + 4 * (column + tap * step) * depth, source + 4 * tap * depth, depth)


@jit
def scatter(
    table: Table, first: int, last: int, cuts: Vector, channels: int, src: int, src_steps: Vector, weights: int,
    blocks: int, part: Floats, acc: Floats, spans: Table, columns: Vector,
) -> None:  # fmt: skip
    """Multiply src lines ``first..last`` (over all planes) by all taps and add the products where they belong.

    `cuts` are the borders of the register tiles along a line. `weights` is a panel [block][src channel][lanes] whose
    lanes are (tap, dst channel) pairs; `part` holds one tile's products, [row][block][lanes]. For every src line
    `spans` has a row for each line of the kernel: its first lane, and the place in `acc` of the dst line that it
    meets (below 0 where that is outside). `columns` are dst channels, taps of a line, first dst column of src column
    0, dst columns between src columns and between taps, dst columns; then src lines of a plane.
    """
    lanes = 2 * WIDTH
    offsets, walk = np.empty(9, np.int64), np.zeros(10, np.int64)
    for m in range(9):
        offsets[m] = m * src_steps[2]
    walk[2], walk[5], walk[6], walk[7], walk[8], walk[9] = 1, src_steps[3], 1, 1, channels, blocks
    per_line = spans.shape[0] // max(1, columns[6])
    products, sums = part.ctypes.data, acc.ctypes.data
    for line in range(first, last):
        base = src + line // columns[7] * src_steps[0] + line % columns[7] * src_steps[1]
        for c in range(cuts.shape[0] - 1):
            rows = cuts[c + 1] - cuts[c]
            fill_zero(products, rows * blocks * lanes * 4)
            for b in range(blocks):
                call_tile(
                    table[2, rows], walk.ctypes.data, weights + b * channels * lanes * 4, base + cuts[c] * src_steps[2],
                    offsets.ctypes.data, products + b * lanes * 4,
                )  # fmt: skip
            for m in range(rows):
                column = columns[2] + (cuts[c] + m) * columns[3]
                for s in range(line * per_line, (line + 1) * per_line):
                    if spans[s, 1] >= 0:
                        source = products + 4 * (m * blocks * lanes + spans[s, 0])
                        _add_line(source, sums + 4 * spans[s, 1], column, columns)
