"""ConvTranspose on AMX: products of bf16, tile by tile, of src pixels with the weights of each tap.

A tile of src is 16 pixels of a panel by 32 channels, one of weights 32 src channels by 16 dst channels, so nothing is
moved between packing and multiplying: pixels are rows of memory, and a tap is another first row. Values go as sums of
bf16 (`kernels.emit.dots`). The panel's zeros are multiplied; cells of pixels for which that, or a sum of bf16, would
not do are computed on register tiles: where something in src is not finite, or values are so small that AMX would take
them, their parts, or sums of their products as zero, as it does with subnormal numbers (of f16 none is so small: sums
are multiples of 2**-48). So are dst channels whose weights are not finite: the others keep their bits.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.compiler import Table, Vector, jit
from kernels.emit.dots import BEGIN, BLOCKS, END, SHAPES, STEP, TILE, call_dots
from kernels.emit.intrinsics import fill_zero, load_value, store_value
from kernels.forward.cells.schedule import LANES, ROW
from kernels.forward.gather import load, put_lines, write
from kernels.pack.halves import split_f16
from kernels.pack.magnitudes import SPECIAL, clear_lane, lane_peaks, magnitudes
from kernels.pack.pairs import pack_pairs, pack_planes

__all__ = ["SPARE", "bring_weights", "clear_odd", "compute_cells"]

WALK_STEPS = 16
"""Steps that are summed in tile registers: the weights of that many stay in the first cache, or in the second."""

_load_f32 = load_value("f32")

SPARE = 64
"""Rows behind a panel that a last tile may read."""

LEAST_SUM, MOST_SUM = 128, 350
"""Exponents, as f32 stores them, of two factors: products do not vanish, and sums of 2**29 of them fit."""

LEAST_SUM_BF16, LEAST_BIAS = 142, np.float32(2.0**-119)
"""The same of bf16, and the smallest bias: the last of 8 digits is worth 2**-126, so no sum is subnormal."""


@jit
def _bias_line(kind: int, bias: Vector, first: int, valid: int, to: int) -> None:
    """Bring the bias of some dst channels to `LANES` f32."""
    for lane in range(LANES):
        value = 0.0
        if bias[0] != 0 and lane < valid:
            value = load(kind, bias[0] + (first + lane) * bias[4])
        store_value(to + 4 * lane, np.float32(value))


@jit
def _range(parts: int, panel: int, part: int, size: int, found: Vector) -> None:
    """Find least and largest exponent of what `parts` pieces of memory hold, and whether all of it is finite."""
    found[0], found[1], found[2] = 512, 0, 1
    for p in range(parts):
        least, most = magnitudes(panel + p * part, size // 64)
        found[0], found[1] = min(found[0], (least + 1) >> 7), max(found[1], most >> 7)
        found[2] = min(found[2], 1 if most < SPECIAL else 0)


@jit
def _small_bias(line: int) -> bool:
    """Say whether a line of bias holds values that sums of bf16 would not keep."""
    for lane in range(LANES):
        value = abs(_load_f32(line + 4 * lane))
        if 0 < value < LEAST_BIAS:
            return True
    return False


@jit
def _plain(parts: int, a: Vector, b: Vector) -> bool:
    """Say whether two tensors may be multiplied as sums of bf16, zeros among them."""
    if parts == 2:
        return a[2] + b[2] == 2  # type: ignore[no-any-return]
    vanish = min(a[0], b[0]) < 1 or a[0] + b[0] < (LEAST_SUM_BF16 if parts == 1 else LEAST_SUM)
    return a[2] + b[2] == 2 and not vanish and (parts == 1 or a[1] + b[1] <= MOST_SUM)


@jit
def _bring(
    parts: int, cell: Vector, last: Vector, shape: Vector, pitches: Vector, src: Vector, panel: int, boxes: Table,
    scratch: int,
) -> None:  # fmt: skip
    """Pack a cell's src; `last` is the cell that was packed there before, all zero for none.

    A cell is its images, then for (d, h, w) first and number of dst positions, of src positions, and their place in
    the panel.
    """
    steps, to = np.empty(5, np.int64), np.zeros(4, np.int64)
    to[2] = ROW * pitches[2]
    to[1] = to[2] * pitches[1]
    to[0] = to[1] * pitches[0]
    steps[0], steps[1], steps[2], steps[3], steps[4] = src[3], src[4], src[5], src[8], src[6]
    first = src[0] + cell[0] * src[3]
    start = 0
    for axis in range(3):
        first += cell[4 + 5 * axis] * src[4 + axis]
        start = start * pitches[axis] + cell[6 + 5 * axis]
    for j in range(shape[1]):
        boxes[j, 0], boxes[j, 1] = first + j * STEP * src[8], (j * shape[4] + start) * ROW
        boxes[j, 2], boxes[j, 3], boxes[j, 4] = cell[1], cell[5], cell[10]
        boxes[j, 5] = min(STEP, shape[0] - j * STEP)
    same = cell[1] == last[1]
    for axis in range(3):
        same &= cell[5 + 5 * axis] == last[5 + 5 * axis] and cell[6 + 5 * axis] == last[6 + 5 * axis]
    if cell[5] * cell[10] * cell[15] == 0:
        fill_zero(panel, parts * shape[1] * shape[4] * ROW)
        return
    pack_planes(
        parts, cell[15], shape[1] * shape[4], boxes, boxes if same else boxes[:0], 0, steps, panel, ROW, to, scratch
    )


@jit
def bring_weights(
    parts: int, whole: bool, shape: Vector, taps: Table, steps: Vector, panels: int, scratch: int
) -> None:
    """Pack weights to [part][block][tap][steps of src channels], each a tile; `whole` ones leave no place for zeros.

    `taps` are boxes as `kernels.pack.halves` takes them, of the addresses of the taps; `steps` the weights' byte steps.
    """
    pack_pairs(
        parts, shape[3], shape[2], taps, taps if whole else taps[:0], 0, steps, panels, shape[5],
        np.zeros(4, np.int64), scratch,
    )  # fmt: skip
    if parts == 2:
        part = shape[2] * shape[5]
        split_f16(panels, panels + part, part // ROW)


@jit
def clear_odd(parts: int, shape: Vector, panels: int, odd: Vector) -> None:
    """Put zeros in place of the weights of dst channels that hold Inf or NaN, and mark these channels."""
    lanes = np.empty(TILE, np.uint16)
    for block in range(shape[2]):
        place = panels + block * shape[5]
        if lane_peaks(place, shape[5] // ROW, lanes.ctypes.data) < SPECIAL:
            continue
        for lane in range(TILE):
            odd[TILE * block + lane] = 1 if lanes[lane] >= SPECIAL else 0
            for p in range(parts if odd[TILE * block + lane] == 1 else 0):
                clear_lane(place + p * shape[2] * shape[5] + 4 * lane, shape[5] // ROW)


@jit
def _sum_phase(
    table: Vector, parts: int, images: int, counts: Vector, pitches: Vector, shape: Vector, first: int, taps: int,
    offsets: Vector, across: int, panel: int, weights: int, acc: int, cut: Vector,
) -> None:  # fmt: skip
    """Sum all taps of a phase into rows of 16 or 32 lanes.

    `counts` are its positions (d, h, w). They are summed as lines, planes or one row of the panel, whatever takes
    least tiles: `cut` gets the tiles of each, and 3 for lines, 2 for planes, 0 for one row.
    """
    plane = (counts[1] - 1) * pitches[2] + counts[2]
    whole = ((images - 1) * pitches[0] + counts[0] - 1) * pitches[1] * pitches[2] + plane
    lines, planes = images * counts[0] * counts[1], images * counts[0]
    cut[0], cut[1], pieces = (whole + TILE - 1) // TILE, 0, 1
    if planes * ((plane + TILE - 1) // TILE) < cut[0] * pieces:
        cut[0], cut[1], pieces = (plane + TILE - 1) // TILE, 2, planes
    if lines * ((counts[2] + TILE - 1) // TILE) < cut[0] * pieces:
        cut[0], cut[1], pieces = (counts[2] + TILE - 1) // TILE, 3, lines
    line, depth, block = 64 * across, shape[1], shape[4] * ROW
    where = np.zeros((4, 13), np.int64)
    for down in range(1, 5):
        rest = where[down - 1]
        rest[0], rest[1], rest[2], rest[3] = shape[2] * shape[5], depth * block, ROW, line
        for k in range(1, down):
            rest[6 + k], rest[5 + down + k] = k * TILE * ROW, k * TILE * line
    walks, run = max(1, WALK_STEPS // depth), min(depth, WALK_STEPS)
    most, entry = 2 if across > 1 else 4, BLOCKS + len(SHAPES) * (parts - 1) + across - 1
    for tap in range(0, taps, walks):
        for at in range(0, depth, run):
            steps = min(run, depth - at)
            for rest in where:
                rest[4], rest[5] = min(walks, taps - tap), offsets.ctypes.data + 8 * (first + tap)
            b = weights + ((first + tap) * depth + at) * TILE * ROW
            for piece in range(pieces):
                n, inside = divmod(piece, max(1, pieces // images)) if cut[1] > 0 else (0, 0)
                d, h = divmod(inside, counts[1]) if cut[1] == 3 else (inside, 0)
                a = panel + at * block + ((n * pitches[0] + d) * pitches[1] + h) * pitches[2] * ROW
                sums, tile = acc + piece * cut[0] * TILE * line, 0
                while tile < cut[0]:
                    down = min(most, cut[0] - tile)
                    call_dots(
                        table[entry + (2 * down - 2 if down < 3 else 1 + down)], a + tile * TILE * ROW, block, b,
                        shape[5], steps, sums + tile * TILE * line, 64, where.ctypes.data + 104 * (down - 1),
                    )  # fmt: skip
                    tile += down


@jit
def _set_out(
    kind: int, direct: bool, images: int, counts: Vector, pitches: Vector, cut: Vector, lanes: int, valid: int,
    acc: int, dense: int, sizes: Vector, begin: Vector, strides: Vector, dst: Vector, to: int, spare: int,
) -> None:  # fmt: skip
    """Bring the rows of a phase to where they belong in dst, or among the sums of a cell, [n][d][h][w][lanes]."""
    line, run, steps = 4 * lanes, np.ones(4, np.int64), dst.copy()
    run[3], steps[6] = counts[2], strides[2] * dst[6]
    for n in range(images):
        for d in range(counts[0]):
            for h in range(counts[1]):
                row, piece = ((n * pitches[0] + d) * pitches[1] + h) * pitches[2], 0
                if cut[1] == 2:
                    row, piece = h * pitches[2], n * counts[0] + d
                elif cut[1] == 3:
                    row, piece = 0, (n * counts[0] + d) * counts[1] + h
                source = acc + (piece * cut[0] * TILE + row) * line
                plane, high = begin[0] + d * strides[0], begin[1] + h * strides[1]
                if direct:
                    place = to + n * dst[3] + plane * dst[4] + high * dst[5] + begin[2] * dst[6]
                    write(kind, source, lanes, valid, run, place, steps, spare)
                else:
                    at = ((n * sizes[1] + plane) * sizes[2] + high) * sizes[3] + begin[2]
                    put_lines(lanes, dense + at * line, strides[2] * line, source, line, counts[2])


@jit
def compute_cells(
    table: Vector, parts: int, kind: int, first: int, last: int, box: Vector, images: Table, planes: Table,
    lines: Table, columns: Table, shape: Vector, pitches: Vector, strides: Vector, phases: Table, offsets: Vector,
    src: Vector, dst: Vector, bias: Vector, weights: int, panel: int, acc: int, dense: int, scratch: int,
    failed: Table,
) -> None:  # fmt: skip
    """Compute some cells of a box of cells for one group, and say which pairs of blocks failed in which cell.

    `box` has the first cell and the number of cells of each axis (n, d, h, w). `shape`: 0 src channels, 1 steps of
    them, 2 blocks of 16 dst channels, 3 dst channels, 4 positions of a panel, 5 bytes of a block's weights.
    """
    cell, before = np.zeros(17, np.int64), np.zeros(17, np.int64)
    sizes, counts, cut, at = np.ones(4, np.int64), np.empty(3, np.int64), np.empty(2, np.int64), np.empty(4, np.int64)
    boxes = np.empty((shape[1], 6), np.int64)
    pairs = (shape[2] + 1) // 2
    mine, theirs = np.empty(3, np.int64), np.empty((pairs, 3), np.int64)
    for p in range(pairs):
        some = min(2, shape[2] - 2 * p)
        _range(parts, weights + 2 * p * shape[5], shape[2] * shape[5], some * shape[5], theirs[p])
        if parts == 1:
            _bias_line(kind, bias, LANES * p, min(LANES, shape[3] - LANES * p), scratch)
            theirs[p, 2] = 0 if _small_bias(scratch) else theirs[p, 2]
    part = shape[1] * shape[4] * ROW
    # where all dst pixels belong to phases, whose lines lie well for writing, they need not be brought together first
    every = phases.shape[0] == strides[0] * strides[1] * strides[2]
    direct = every and (dst[8] < dst[6] or (strides[2] == 1 and columns[0, 1] >= 8))
    for item in range(first, last):
        rest = item
        for axis in range(3, -1, -1):
            at[axis] = box[axis] + rest % box[4 + axis]
            rest //= box[4 + axis]
        cell[0], cell[1] = images[at[0], 0], images[at[0], 1]
        cell[2:7], cell[7:12], cell[12:17] = planes[at[1]], lines[at[2]], columns[at[3]]
        _bring(parts, cell, before, shape, pitches, src, panel, boxes, scratch)
        before[:] = cell
        if parts == 2:
            split_f16(panel, panel + part, part // ROW)
        _range(parts, panel, part, part, mine)
        sizes[0], sizes[1], sizes[2], sizes[3] = cell[1], cell[3], cell[8], cell[13]
        pixels = sizes[0] * sizes[1] * sizes[2] * sizes[3]
        to = dst[0] + cell[0] * dst[3] + cell[2] * dst[4] + cell[7] * dst[5] + cell[12] * dst[6]
        call_dots(table[BEGIN], 0, 0, 0, 0, 0, 0, 0, 0)
        for p in range(pairs):
            failed[item - first, p] = 0 if _plain(parts, mine, theirs[p]) else 1
            if failed[item - first, p] == 1:
                continue
            across = min(2, shape[2] - 2 * p)
            lanes, valid = across * TILE, min(LANES, shape[3] - LANES * p)
            _bias_line(kind, bias, LANES * p, valid, scratch)
            if not direct:
                put_lines(lanes, dense, 4 * lanes, scratch, 0, pixels)
            for k in range(phases.shape[0]):
                phase = phases[k]
                some = True
                for axis in range(3):
                    counts[axis] = (sizes[1 + axis] - phase[axis] + strides[axis] - 1) // strides[axis]
                    some &= counts[axis] > 0
                if not some:
                    continue
                put_lines(lanes, acc, 4 * lanes, scratch, 0, shape[6])
                _sum_phase(
                    table, parts, cell[1], counts, pitches, shape, phase[3], phase[4], offsets, across, panel,
                    weights + 2 * p * shape[5], acc, cut,
                )  # fmt: skip
                _set_out(
                    kind, direct, cell[1], counts, pitches, cut, lanes, valid, acc, dense, sizes, phase, strides, dst,
                    to + LANES * p * dst[8], scratch + 4 * LANES,
                )  # fmt: skip
            if not direct:
                write(kind, dense, lanes, valid, sizes, to + LANES * p * dst[8], dst, scratch + 4 * LANES)
        call_dots(table[END], 0, 0, 0, 0, 0, 0, 0, 0)
