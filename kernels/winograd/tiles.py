"""What all operations by Winograd's algorithm share: slabs of tiles, their transforms to panels, products of panels.

A slab has the tiles that are transformed at a time: those of whole images where these are small, or of lines of one, or
of a part of a line. In compiled loops everything is addresses, byte steps and tables; nothing is checked there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import Any

import numpy as np

from kernels.dtypes import KINDS
from kernels.emit.brgemm import MICRO, ROWS, Batch
from kernels.emit.compiler import Record, Records, Rows, Vector, inlined, jit, numbers, row_of
from kernels.emit.intrinsics import address_of, call_entry, stack_array, stack_record
from kernels.emit.winograd import FACTORS, TileLine, transform_line
from kernels.gradient.tiles.records import Block
from kernels.pack.panels import PANEL, Values, pack_panels
from kernels.problem import ConvProblem, data_steps, storage_dtype, wrapped
from kernels.target import target

__all__ = [
    "GAP", "PAIR", "PRODUCTS", "VECTOR", "WIDTH", "Side", "TileSlab", "cut_slabs", "multiply", "side_of", "tiles_along",
    "tiles_of", "transform_tiles",
]  # fmt: skip

WIDTH = target().lanes

VECTOR, PAIR = 4 * WIDTH, 8 * WIDTH
"""Bytes of a vector, and of the two that a position or a tile of a block of channels has."""

PRODUCTS = FACTORS * FACTORS
"""Products of a tile."""

GAP = 64
"""Bytes between lines and between planes, whose sizes are often powers of two: they must not meet in one set."""

F32_PLACE = MICRO["f32"]
ONE, TWO = (min(8, ROWS["f32"][vectors]) for vectors in (1, 2))
"""Rows of the tallest tile of one vector and of two: no more than 8, which fill lines of scalars."""

LINE = TileLine.dtype


class Side(Record):
    """One of the tensors that are tiled, at one depth of the kernel and in one group; sizes and steps are in bytes.

    Channel 0 of the first position is at the address `start`, and the tensor ends at `end`. `strides` lead to the next
    image, frame, line and column, `channel` to the next channel. A frame is an image's plane of so many lines and
    columns (`sizes`), and each image has `frames`. Tile t along an axis begins ``2 t - pad``, and has four positions if
    the tensor is `wide`, else two.

    Channels are in blocks of two vectors. Unless `staged` is 0 what a slab reads is copied first, as f32, to the
    address `stage`, in so many bytes for each block. Transformed tiles go to `panels`, those of a horizontal product to
    a `plane`: one leads `line` bytes to the next tile, `block` bytes to the next block.
    """

    wide: bool
    kind: int
    start: int
    end: int
    strides: Vector = numbers(4)
    channel: int
    sizes: Vector = numbers(2)
    frames: int
    pads: Vector = numbers(2)
    staged: int
    stage: int
    panels: int
    line: int
    block: int
    plane: int


class TileSlab(Record):
    """Tiles that are transformed at a time, along (frames, lines, columns); whether the last line or column is odd,
    that is, has one narrow position."""

    low: Vector = numbers(3)
    high: Vector = numbers(3)
    odd: Vector = numbers(2)


@inlined
def tiles_along(slab: TileSlab, axis: int, product: int) -> int:
    """Count the lines (0) or columns (1) of tiles that have a product along them: an odd last one lacks the fourth."""
    tiles: int = slab.high[1 + axis] - slab.low[1 + axis]
    return tiles - 1 if product == FACTORS - 1 and slab.odd[axis] else tiles


@inlined
def _frame(side: Side, frame: int) -> int:
    """Return the address of position (0, 0) of a frame."""
    address: int = side.start + frame // side.frames * side.strides[0] + frame % side.frames * side.strides[1]
    return address


@inlined
def _window(side: Side, slab: TileSlab, axis: int) -> tuple[int, int]:
    """Return the span of lines (0) or columns (1) that a slab reads."""
    size, first = side.sizes[axis], 2 * slab.low[1 + axis] - side.pads[axis]
    end = 2 * slab.high[1 + axis] - side.pads[axis] + (2 if side.wide else 0)
    low = min(max(first, 0), size)
    return low, max(min(end, size), low)


@jit
def _stage(side: Side, blocks: Rows[Block], slab: TileSlab) -> None:
    """Copy what a slab reads as f32: [block][frame][line][column][two vectors]."""
    parts, sizes, steps = np.empty(blocks.shape[0], PANEL), np.ones(4, np.int64), stack_array(4, np.int64)
    top, bottom = _window(side, slab, 0)
    left, right = _window(side, slab, 1)
    sizes[2], sizes[3] = bottom - top, right - left
    steps[2], steps[3] = sizes[3], 1
    if sizes[2] * sizes[3] == 0:
        return
    for frame in range(slab.low[0], slab.high[0]):
        for b in range(blocks.shape[0]):
            block, part = blocks[b], parts[b]
            part.lanes, part.valid, part.unit = block.vectors * WIDTH, block.valid, PAIR
            part.source = block.first * side.channel
            part.address = side.stage + b * side.staged + (frame - slab.low[0]) * sizes[2] * sizes[3] * PAIR
        source = _frame(side, frame) + top * side.strides[2] + left * side.strides[3]
        pack_panels(Values(side.kind, source, side.strides[:], side.channel, side.end), parts, sizes, steps)


@inlined
def _rows_of(wide: bool, product: int, rows: Vector) -> int:
    """Give the two lines of a tile that a vertical product takes, the second -1 for none, and the second's sign."""
    if wide:
        rows[0], rows[1] = product, 2 if product < 2 else 1
    else:
        rows[0], rows[1] = product // 3, 1 if product == 1 or product == 2 else -1
    return 1 if product == 1 else -1


@jit
def transform_tiles(side: Side, blocks: Rows[Block], slab: TileSlab, product: int) -> None:
    """Transform the tiles of a slab to panels of one vertical product; what they need is staged for the first one.

    Tiles lie line after line, or where the last column is odd column after column, so that it can be left out.
    """
    if product == 0 and side.staged != 0:
        _stage(side, blocks, slab)
    rows, begins, tiles = stack_array(2, np.int64), stack_array(2, np.int64), stack_record(LINE)
    zeros, lines, columns = stack_array(16, np.int64), tiles_along(slab, 0, product), tiles_along(slab, 1, 0)
    across, along = (1, (slab.high[0] - slab.low[0]) * lines) if slab.odd[1] else (columns, 1)
    row, pixel, frame_bytes, corner = side.strides[2], side.strides[3], 0, 0
    if side.staged != 0:
        top, bottom = _window(side, slab, 0)
        left, right = _window(side, slab, 1)
        row, pixel = (right - left) * PAIR, PAIR
        frame_bytes, corner = (bottom - top) * row, top * row + left * pixel
    tiles.sign, tiles.columns, tiles.zero = _rows_of(side.wide, product, rows), side.sizes[1], address_of(zeros)
    tiles.first, tiles.count, tiles.plane = 2 * slab.low[2] - side.pads[1], columns, side.plane
    tiles.step, number = along * side.line, 0
    for frame in range(slab.low[0], slab.high[0]):
        source = _frame(side, frame)
        if side.staged != 0:
            source = side.stage + (frame - slab.low[0]) * frame_bytes - corner
        for line in range(slab.low[1], slab.low[1] + lines):
            for i in range(2):
                y = 2 * line - side.pads[0] + rows[i]
                inside = rows[i] >= 0 and 0 <= y < side.sizes[0]
                begins[i], tiles.steps[i] = (source + y * row, pixel) if inside else (address_of(zeros), 0)
            for b in range(blocks.shape[0]):
                more = b * side.staged if side.staged != 0 else blocks[b].first * side.channel
                for i in range(2):
                    tiles.rows[i] = begins[i] + (more if tiles.steps[i] != 0 else 0)
                tiles.to = side.panels + b * side.block + number * across * side.line
                transform_line(side.wide, blocks[b].vectors, address_of(tiles))
            number += 1


@jit
def multiply(table: Vector, batch: Batch, rows: int, vectors: int) -> None:
    """Sum `rows` rows of one vector of lanes or two, the first of which is that of the batch, in tiles of equal height.

    Where the batch has `totals` at all, the sums themselves are its second set.
    """
    entry, most = table[F32_PLACE + vectors - 1], TWO if vectors == 2 else ONE
    parts, a, c, flushes = (rows + most - 1) // most, batch.a, batch.c, batch.totals != 0
    for part in range(parts):
        first = rows * part // parts
        batch.rows = rows * (part + 1) // parts - first
        batch.a, batch.c = a + first * batch.a_row, c + first * batch.c_row
        batch.next, batch.totals = batch.c, batch.c if flushes else 0
        call_entry(entry, address_of(batch))


def cut_slabs(spans: Sequence[tuple[int, int]], plane: Sequence[int], limit: int) -> Records:
    """Cut tiles into slabs of at most `limit`; `spans` are those of (frames, lines, columns) of tiles.

    `plane` has the lines and columns of all positions, two of which a tile has along each axis.
    """
    counts = [high - low for low, high in spans]
    sizes = [max(1, limit // max(1, counts[1] * counts[2])), max(1, limit // max(1, counts[2])), limit]
    cuts = []
    for (low, _), total, size in zip(spans, counts, sizes, strict=True):
        parts = ceil(total / size)
        cuts.append([(low + total * i // parts, low + total * (i + 1) // parts) for i in range(parts)])
    table = np.zeros([len(cut) for cut in cuts], TileSlab.dtype)
    for axis, cut in enumerate(cuts):
        shape = [-1 if other == axis else 1 for other in range(3)]
        first, end = np.array(cut, np.int64).reshape(-1, 2).T
        table["low"][..., axis], table["high"][..., axis] = first.reshape(shape), end.reshape(shape)
        if axis:
            odd = (plane[axis - 1] % 2 != 0) & (end == ceil(plane[axis - 1] / 2))
            table["odd"][..., axis - 1] = odd.reshape(shape)
    return table.reshape(-1)


def tiles_of(slabs: Records) -> Vector:
    """Count the tiles of each slab."""
    return (slabs["high"] - slabs["low"]).prod(1)  # type: ignore[no-any-return]


def side_of(
    problem: ConvProblem, channels: int, spatial: tuple[int, int, int], slabs: Records, *, wide: bool, first: int,
    step: int, **others: Any,
) -> Records:  # fmt: skip
    """Return the `Side` of a tensor with so many channels of a group, of whose depths each `step` is a frame.

    Addresses count from the tensor's, and `others` are as in `Side`.
    """
    size = storage_dtype(problem.dtype).itemsize
    image, depth, row, pixel, channel = (
        size * step for step in data_steps(problem.data_format, channels * problem.groups, spatial)
    )
    ready = problem.dtype == "f32" and channel == size and channels % WIDTH == 0
    # a wide tile is two positions longer than the step to the next one
    frames, lines, columns = (slabs["high"] - slabs["low"]).T * [[1], [2], [2]] + [[0], [2 * wide], [2 * wide]]
    return row_of(
        Side, wide=wide, kind=KINDS[problem.dtype], start=wrapped([first * depth])[0],
        end=size * problem.n * problem.groups * channels * prod(spatial),
        strides=(image, wrapped([step * depth])[0], row, pixel), channel=channel, sizes=spatial[1:],
        staged=0 if ready else PAIR * int((frames * lines * columns).max(initial=0)), stage=0, panels=0, **others,
    )  # fmt: skip
