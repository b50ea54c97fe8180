"""The compiled loops of ConvTranspose forward: gather every dst pixel's taps, or scatter for few dst channels.

As in `kernels.driver`, everything is addresses, byte steps and integer tables, and nothing is checked.

* planes, lines: for every dst plane or line: first tap, number of taps, first src plane or line.
* tiles: first dst column, rows, first tap, number of taps, first src column.
* steps: (tap step, src step) of d, of h, of w: from one tap of a dst position to its next.
"""

from __future__ import annotations

import numpy as np

from kernels._jit import Floats, Halves, Table, Vector, jit
from kernels.cpu import cpu
from kernels.packing import F16, F32
from kernels.simd import call_tile, fill_zero, load_value, round_bits, transpose_panel

__all__ = ["CHUNK", "gather", "scatter_tile", "write_block"]

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
def gather(
    table: Table, tile_kind: int, vectors: int, plane: int, first: int, last: int, columns: int, stride: int,
    planes: Table, lines: Table, tiles: Table, steps: Vector, kernel: Vector, channels: int,
    src: int, src_steps: Vector, weights: int, acc: int,
) -> None:  # fmt: skip
    """Sum dst lines ``first..last`` of one plane for one block of lanes into `acc`, [line][column][lanes].

    `src` is the address of the image's first value, `src_steps` its bytes for (d, h, w, channel); `weights` a panel
    [tap][src channel][lanes] with `kernel` (KH, KW). Short sums take all taps in one call; long ones go tap by tap
    and in parts of `CHUNK` channels, so that the weights stay in L1 while many pixels meet them.
    """
    line_bytes = 4 * WIDTH * vectors
    offsets, walk = np.empty(9, np.int64), np.empty(10, np.int64)
    for m in range(9):
        offsets[m] = m * src_steps[2]
    walk[0], walk[1], walk[2] = steps[2] * kernel[1] * channels, steps[4] * channels, 1
    walk[3], walk[4], walk[5] = -steps[3] * src_steps[1], -steps[5] * src_steps[2], src_steps[3]
    walk[9] = stride
    fill_zero(acc, (last - first) * columns * line_bytes)
    for k in range(planes[plane, 1]):
        depth = (planes[plane, 0] + k * steps[0]) * kernel[0]
        level = src + (planes[plane, 2] - k * steps[1]) * src_steps[0]
        if kernel[0] * kernel[1] * channels <= CHUNK:
            for line in range(first, last):
                for t in range(tiles.shape[0] if lines[line, 1] > 0 else 0):
                    if tiles[t, 3] == 0:
                        continue
                    tap = (depth + lines[line, 0]) * kernel[1] + tiles[t, 2]
                    walk[6], walk[7], walk[8] = lines[line, 1], tiles[t, 3], channels
                    call_tile(
                        table[tile_kind, tiles[t, 1]], walk.ctypes.data, weights + tap * channels * line_bytes,
                        level + lines[line, 2] * src_steps[1] + tiles[t, 4] * src_steps[2], offsets.ctypes.data,
                        acc + ((line - first) * columns + tiles[t, 0]) * line_bytes,
                    )  # fmt: skip
            continue
        walk[6] = 1
        for row in range(kernel[0]):
            together = kernel[1] * channels <= CHUNK
            for j in range(1 if together else kernel[1]):
                for part in range(0, channels, channels if together else CHUNK):
                    walk[8] = channels if together else min(CHUNK, channels - part)
                    for line in range(first, last):
                        index = row - lines[line, 0]
                        if index < 0 or index % steps[2] != 0 or index // steps[2] >= lines[line, 1]:
                            continue
                        base = level + (lines[line, 2] - index // steps[2] * steps[3]) * src_steps[1]
                        for t in range(tiles.shape[0]):
                            if j >= tiles[t, 3]:
                                continue
                            walk[7] = tiles[t, 3] if together else 1
                            tap = (depth + row) * kernel[1] + tiles[t, 2] + j * steps[4]
                            call_tile(
                                table[tile_kind, tiles[t, 1]], walk.ctypes.data,
                                weights + (tap * channels + part) * line_bytes,
                                base + (tiles[t, 4] - j * steps[5]) * src_steps[2] + part * src_steps[3],
                                offsets.ctypes.data, acc + ((line - first) * columns + tiles[t, 0]) * line_bytes,
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
        offsets = np.empty(8, np.int64)
        for m in range(8):
            offsets[m] = 4 * m * lanes
        while start + 8 <= pixels:
            to = out32.ctypes.data + 4 * (place + start)
            _transpose(to, 4 * steps[1], acc.ctypes.data + 4 * start * lanes, valid // 8, offsets.ctypes.data)
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
def scatter_tile(
    table: Table, first: int, rows: int, channels: int, src: int, src_steps: Vector, weights: int, blocks: int,
    part: Floats, acc: Floats, spans: Table, columns: Vector,
) -> None:  # fmt: skip
    """Multiply `rows` adjacent src pixels of one line by all taps and add the products where they belong.

    `weights` is a panel [block][src channel][lanes] whose lanes are (tap, dst channel) pairs; `part` holds one tile's
    products, [row][block][lanes]. A row of `spans` is one line of the kernel: its first lane, and the place in `acc`
    of its first product for src column 0 (below 0 where the line is outside). `columns` are dst channels of a tap,
    taps, first dst column of src column 0, dst columns between src columns, between taps, dst columns.
    """
    lanes = 2 * WIDTH
    line_bytes = 4 * lanes
    offsets, walk = np.empty(9, np.int64), np.zeros(10, np.int64)
    for m in range(9):
        offsets[m] = m * src_steps[2]
    walk[2], walk[5], walk[6], walk[7], walk[8], walk[9] = 1, src_steps[3], 1, 1, channels, blocks
    fill_zero(part.ctypes.data, rows * blocks * line_bytes)
    for b in range(blocks):
        call_tile(
            table[2, rows], walk.ctypes.data, weights + b * channels * line_bytes, src + first * src_steps[2],
            offsets.ctypes.data, part.ctypes.data + b * line_bytes,
        )  # fmt: skip
    depth = columns[0]
    for m in range(rows):
        base = columns[2] + (first + m) * columns[3]
        for s in range(spans.shape[0]):
            if spans[s, 1] < 0:
                continue
            source = m * blocks * lanes + spans[s, 0]
            inside = base >= 0 and base + (columns[1] - 1) * columns[4] < columns[5]
            if inside and columns[4] == 1:
                to = spans[s, 1] + base * depth
                for i in range(columns[1] * depth):
                    acc[to + i] += part[source + i]
                continue
            for tap in range(columns[1]):
                at = base + tap * columns[4]
                if at >= 0 and at < columns[5]:
                    to = spans[s, 1] + at * depth
                    for c in range(depth):
                        acc[to + c] += part[source + tap * depth + c]
