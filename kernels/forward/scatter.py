"""The compiled loops of ConvTranspose forward for few dst channels: products are added where they belong.

Lanes of a register tile are (tap, dst channel) pairs and its rows src pixels; the products of a src pixel and a line of
the kernel then lie next to each other, as their dst pixels do. Tables and vectors are those of
`kernels.forward.gather`, but a class is one tap, and taps are numbered as they are.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.compiler import Table, Vector, jit
from kernels.emit.intrinsics import SEGMENT_LOG, add_run, call_tile, fill_zero, store_value
from kernels.forward.gather import bring_source, load, write
from kernels.pack.panels import pack_panel
from kernels.target import target

__all__ = ["pack_columns", "scatter"]

WIDTH = target().lanes


@jit
def pack_columns(kind: int, groups: int, shape: Vector, out: int, weights: Vector, panels: int, line: int) -> None:
    """Pack panels [group][src channel][tap, dst channel], `line` bytes for a src channel with room for 8 more lanes."""
    channels, taps = shape[0], shape[1] * shape[2] * shape[3]
    counts, steps, to = np.ones(4, np.int64), np.zeros(4, np.int64), np.zeros(4, np.int64)
    counts[3], steps[3], to[3] = channels, weights[5], line
    for g in range(groups):
        for tap in range(taps):  # rising, because a line may spill over into the next tap's lanes
            place = panels + g * channels * line + 4 * tap * out
            source = weights[0] + g * weights[2] + tap * weights[6]
            pack_panel(kind, out, out, place, counts, to, source, steps, weights[3], weights[1])


@jit
def _begin(kind: int, acc: int, pixels: int, out: int, bias: Vector, g: int) -> None:
    """Begin the sums of some dst pixels with the bias."""
    if bias[0] == 0:
        fill_zero(acc, 4 * pixels * out)
        return
    for c in range(out):
        value = load(kind, bias[0] + g * bias[2] + c * bias[3])
        for p in range(pixels):
            store_value(acc + 4 * (p * out + c), value)


@jit
def scatter(
    table: Vector, limit: int, kind: int, first: int, last: int, per_item: int, span: Vector, reach: Vector,
    shape: Vector, planes: Table, lines: Table, columns: Table, dense: bool, groups: int, out: int, bias: Vector,
    panels: int, line: int, packed: bool, src: Vector, dst: Vector, scratch: int, part: int, acc: int,
) -> None:  # fmt: skip
    """Do items ``first..last`` in order: each is `per_item` src lines of one plane, group and image.

    `span` are the dst positions that are wanted, `reach` the src positions that meet them, low and high of (n, d, h,
    w); `part` holds the products of one tile and `acc` the sums of one image and group [d][h][w][out]. `dense` says
    that the taps of a line meet adjacent dst pixels.
    """
    channels, used = shape[0], (shape[1] * shape[2] * shape[3] * out + 2 * WIDTH - 1) // (2 * WIDTH)
    counts, box, steps, spare = (
        np.empty(4, np.int64),
        np.ones(8, np.int64),
        np.zeros(5, np.int64),
        np.empty(64, np.float32),
    )
    offsets, walk = np.empty(9, np.int64), np.ones(11, np.int64)
    live, here = np.empty((planes.shape[0] * lines.shape[0], 2), np.int64), src.copy()
    for axis in range(1, 4):
        counts[axis] = span[2 * axis + 1] - span[2 * axis]
    counts[0] = 1
    chunks = max(1, (reach[5] - reach[4] + per_item - 1) // per_item)
    depth = max(1, reach[3] - reach[2])
    walk[2], walk[8], walk[9] = line // (8 * WIDTH), channels, used
    walk[10] = SEGMENT_LOG
    box[3], box[7] = reach[6], reach[7] - reach[6]
    for item in range(first, last):
        g = item // (chunks * depth) % groups
        n, d = span[0] + item // (chunks * depth * groups), reach[2] + item // chunks % depth
        low = reach[4] + item % chunks * per_item
        high = min(reach[5], low + per_item)
        if item % (chunks * depth) == 0:
            _begin(kind, acc, counts[1] * counts[2] * counts[3], out, bias, g)
        box[0], box[1], box[2], box[6] = n, d, low, high - low
        here[0] = src[0] + g * src[2]
        base = bring_source(kind, False, 0, packed, channels, here, box, steps, scratch)
        base += n * steps[0] + d * steps[1]
        walk[5] = steps[4]
        for m in range(limit):
            offsets[m] = m * steps[3]
        for h in range(low, high):
            count = 0
            for i in range(planes.shape[0]):
                u = planes[i, 2] + (d - planes[i, 4]) * shape[10] - span[2]
                if d < planes[i, 4] or d >= planes[i, 4] + planes[i, 3] or u < 0 or u >= counts[1]:
                    continue
                for j in range(lines.shape[0]):
                    v = lines[j, 2] + (h - lines[j, 4]) * shape[11] - span[4]
                    if h >= lines[j, 4] and h < lines[j, 4] + lines[j, 3] and v >= 0 and v < counts[2]:
                        live[count, 0] = 4 * (planes[i, 0] * shape[2] + lines[j, 0]) * shape[3] * out
                        live[count, 1] = acc + 4 * (u * counts[2] + v) * counts[3] * out
                        count += 1
            # as src columns rise, the taps of a line that are inside fall
            start, stop = columns.shape[0], columns.shape[0]
            pieces = (box[7] + limit - 1) // limit if count > 0 else 0
            for piece in range(pieces):
                x, rows = reach[6] + box[7] * piece // pieces, box[7] * (piece + 1) // pieces - box[7] * piece // pieces
                fill_zero(part, rows * used * 8 * WIDTH)
                for b in range(used):
                    call_tile(
                        table[rows], walk.ctypes.data, panels + g * channels * line + b * 8 * WIDTH,
                        base + h * steps[2] + x * steps[3], offsets.ctypes.data, part + b * 8 * WIDTH,
                    )  # fmt: skip
                for m in range(rows):
                    while stop > 0:
                        j = x + m - columns[stop - 1, 4]
                        if j < columns[stop - 1, 3] and columns[stop - 1, 2] + j * shape[12] < span[7]:
                            break
                        stop -= 1
                    while start > 0:
                        j = x + m - columns[start - 1, 4]
                        if j < 0 or columns[start - 1, 2] + j * shape[12] < span[6]:
                            break
                        start -= 1
                    products = part + m * used * 8 * WIDTH
                    k = start
                    while k < stop:
                        run = stop - k if dense else 1
                        u = 4 * out * (columns[k, 2] + (x + m - columns[k, 4]) * shape[12] - span[6])
                        for i in range(count):
                            add_run(live[i, 1] + u, products + live[i, 0] + 4 * out * columns[k, 0], run * out)
                        k += run
        if item % (chunks * depth) == chunks * depth - 1:
            place = dst[0] + g * dst[2] + n * dst[3]
            for axis in range(1, 4):
                place += span[2 * axis] * dst[3 + axis]
            write(kind, acc, out, out, counts, place, dst, spare.ctypes.data)
