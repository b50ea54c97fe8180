"""The tables of a weight gradient: which pixels each tap visits, with which register tiles.

Ranges and tiles are apart: a tile says which scalars its rows are, counted from a place that the range names, so that
all taps share the few tiles that the channels need (`kernels.gradient.tiles.records`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import ceil, prod

import numpy as np
import numpy.typing as npt

from kernels.emit.brgemm import SKIPS
from kernels.emit.compiler import Records
from kernels.emit.depthwise import KEPT_LINES, KERNEL_LINE, TAPS
from kernels.gradient.geometry import Axis
from kernels.gradient.tiles.records import Range, Tile
from kernels.problem import wrapped

__all__ = [
    "MERGED_TAPS", "Rows", "Tables", "firsts_of", "has_regions", "merged_tables", "region_tables", "row_tiles", "split",
    "tap_ranges", "tap_tables",
]  # fmt: skip

Ints = npt.NDArray[np.int64]
Tables = tuple[Records, Records]

MERGED_TAPS = 64
"""Taps of a kernel line up to which register tiles are shared among them."""

REGION_ROWS = 8192
"""Rows of all regions together, taps or their channels, up to which each region has its own tiles."""

MOST_RANGES = 1 << 16
"""Rows of a table of taps, up to which all tiles need not be one walk: 6 MiB."""


@dataclass(frozen=True)
class Rows:
    """How (tap, channel) pairs of the scalar tensor are rows: of the accumulators, and of tiles.

    `tap_step` and `channel_step` are in accumulator rows, `offsets` are bytes of each channel, `limit` is the number of
    rows of the tallest tile. Rows of a tile are at one step from each other.
    """

    tap_step: int
    channel_step: int
    offsets: Ints
    limit: int


def split(count: int, limit: int) -> list[int]:
    """Split `count` into equal parts of at most `limit`."""
    parts = ceil(count / limit)
    return [count // parts + (i < count % parts) for i in range(parts)]


def row_tiles(rows: Sequence[int] | Ints, sizes: Sequence[int] | Ints, offsets: Ints) -> Records:
    """Return tiles that begin at the accumulator `rows` and scalar `offsets`, and have `sizes` rows each."""
    tiles = np.zeros(len(sizes), Tile.dtype)
    tiles["row"], tiles["rows"], tiles["offsets"][:, 0] = rows, sizes, offsets
    return tiles


def firsts_of(sizes: Sequence[int]) -> Ints:
    """Return where each of some adjacent parts begins, given their sizes."""
    each = np.array(sizes, np.int64)
    return np.cumsum(each) - each


def tap_ranges(axes: Sequence[Axis], steps: Sequence[int], moved: str) -> Records:
    """Return a range for each tap of (d, h, w), or of the first of these: what it visits, and its shift as `moved`."""
    ranges = np.zeros([len(axis.shifts) for axis in axes], Range.dtype)
    low, high, shift = ranges["low"], ranges["high"], ranges[moved]
    for a, (axis, step) in enumerate(zip(axes, steps, strict=True)):
        along = (slice(None), *(None,) * (len(axes) - a - 1))
        low[..., a], high[..., a] = axis.spans[:, 0][along], axis.spans[:, 1][along]
        shift += (wrapped(axis.shifts) * step)[along]
    return ranges.reshape(-1)


def tap_tables(
    rows: Rows,
    axes: Sequence[Axis],
    steps: Sequence[int],
    vector_moves: bool,
    tiles_a_walk: int,
) -> Tables:
    """Visit every tap by itself, with tiles of channels.

    `axes` are (d, h, w) and `steps` move one position of the wide tensor: lines of the vector panel where
    `vector_moves`, else bytes of the scalars. A walk over the lane blocks takes `tiles_a_walk` tiles, or more where
    there would be too many walks.
    """
    sizes = split(len(rows.offsets), rows.limit)
    firsts = firsts_of(sizes)
    tiles = row_tiles(firsts * rows.channel_step, sizes, rows.offsets[firsts])
    ranges = tap_ranges(axes, steps, "line" if vector_moves else "scalar")
    ranges["row"] = np.arange(len(ranges)) * rows.tap_step
    walks = min(ceil(len(tiles) / max(1, tiles_a_walk)), max(1, MOST_RANGES // len(ranges)))
    edges = np.arange(walks + 1) * len(tiles) // walks
    ranges = np.tile(ranges, (walks, 1)) if walks > 1 else ranges[None]
    ranges["first"], ranges["last"], ranges["walk"] = edges[:-1, None], edges[1:, None], np.arange(walks)[:, None]
    return ranges.reshape(-1), tiles


def merged_tables(rows: Rows, axes: Sequence[Axis], steps: Sequence[int]) -> Tables:
    """Share register tiles among the taps of each kernel line, for few channels; rows are (tap, channel).

    A tile visits a line's positions at once, without the rows whose taps are outside: up to `SKIPS` at either end. What
    is left is visited by tiles of the rows inside. All lines of the kernel are alike, so one line's tiles serve them
    all.
    """
    axis, channels, row = axes[2], len(rows.offsets), 0
    regions, width = _regions(axis), len(axis.shifts)
    visits: list[tuple[int, int, int, int]] = []  # first position, end, first row, rows
    left_out: list[Ints] = []  # heads and tails of each
    for size in split(width * channels, rows.limit):
        whole = -1
        for low, high, taps in regions:
            first, last = max(row, taps[0] * channels), min(row + size, (taps[-1] + 1) * channels)
            if first >= last:
                continue
            skips = first - row, row + size - last
            goes_on = whole >= 0 and visits[whole][1] == low
            if min(skips) > 0 or max(skips) > SKIPS or (whole >= 0 and not goes_on):
                visits.append((low, high, first, last - first))
                left_out.append(np.zeros((2, SKIPS), np.int64))
                continue
            if not goes_on:
                whole = len(visits)
                left_out.append(np.zeros((2, SKIPS), np.int64))
                visits.append((low, high, row, size))
            visits[whole] = visits[whole][0], high, row, size
            for end, skip in enumerate(skips):
                left_out[whole][end, :skip] += high - low
        row += size
    lows, highs, firsts, heights = np.array(visits, np.int64).reshape(-1, 4).T
    lines = tap_ranges(axes[:2], steps[:2], "scalar")
    ranges = np.repeat(lines[:, None], len(visits), axis=1)
    ranges["low"][:, :, 2], ranges["high"][:, :, 2] = lows, highs
    ranges["first"], ranges["last"] = np.arange(len(visits)), np.arange(len(visits)) + 1
    ranges["row"] = (np.arange(len(lines)) * width * channels)[:, None]
    ranges["walk"] = np.arange(len(lines))[:, None]
    offsets = wrapped(axis.shifts)[firsts // channels] * steps[2] + rows.offsets[firsts % channels]
    tiles = row_tiles(firsts, heights, offsets)
    tiles["heads"], tiles["tails"] = np.array(left_out, np.int64).reshape(-1, 2, SKIPS).transpose(1, 0, 2)
    return ranges.reshape(-1), tiles


def _regions(axis: Axis) -> list[tuple[int, int, list[int]]]:
    """Cut an axis where a tap's range begins or ends: low, high and the taps that are inside between them."""
    edges = sorted({edge for span in axis.ranges for edge in span})
    cuts = [
        (a, b, [k for k, (low, high) in enumerate(axis.ranges) if low <= a and b <= high]) for a, b in pairwise(edges)
    ]
    return [cut for cut in cuts if cut[2]]


def has_regions(axes: Sequence[Axis], channels: int) -> bool:
    """Return whether the regions of (d, h, w), with `channels` rows a tap, are few enough for `region_tables`."""
    if max(len(axis.shifts) for axis in axes) > MERGED_TAPS:
        return False
    return channels * prod(sum(len(taps) for _, _, taps in _regions(axis)) for axis in axes) <= REGION_ROWS


def region_tables(rows: Rows, axes: Sequence[Axis], steps: Sequence[int], line: int) -> Tables:
    """Visit boxes of pixels for which the same taps are inside, with the tiles of `kernels.emit.depthwise`.

    `steps` are bytes for one position of the wide tensor along (d, h, w), `line` those of an accumulator row.
    """
    sizes, line_taps, channels = [len(axis.shifts) for axis in axes], axes[2].shifts, rows.offsets.tolist()
    kept = KEPT_LINES > 0 and axes[2].stride == 1 and [*line_taps] == [*range(line_taps[0], line_taps[0] + KERNEL_LINE)]
    kept = kept and len(channels) == 1
    edges, ends = [], [0]
    heights: list[int] = []
    offsets: list[int] = []
    counts: list[int] = []
    for box in product(*map(_regions, axes)):
        taps = list(product(*(inside for _, _, inside in box)))
        places = [sum(axis.shifts[k] * step for axis, k, step in zip(axes, tap, steps, strict=True)) for tap in taps]
        numbers = [(d * sizes[1] + h) * sizes[2] + w for d, h, w in taps]
        scalars = [place + channel for place in places for channel in channels]
        sums = [line * (number * len(channels) + c) for number in numbers for c in range(len(channels))]
        done = 0
        for size in split(len(sums), rows.limit):
            part = slice(done, done + size)
            whole = kept and len(box[2][2]) == KERNEL_LINE and size % KERNEL_LINE == 0
            heights.append(TAPS + size // KERNEL_LINE if whole else size)
            offsets += [*scalars[part], *sums[part]]
            counts.append(2 * size)
            done += size
        edges.append([(low, high) for low, high, _ in box])
        ends.append(len(heights))
    ranges, tiles = np.zeros(len(edges), Range.dtype), np.zeros(len(heights), Tile.dtype)
    ranges["low"], ranges["high"] = np.array(edges, np.int64).reshape(-1, 3, 2).transpose(2, 0, 1)
    ranges["first"], ranges["last"], ranges["walk"] = ends[:-1], ends[1:], np.arange(len(edges))
    tiles["rows"] = heights
    tiles["offsets"][np.arange(2 * TAPS) < np.array(counts)[:, None]] = wrapped(offsets)
    return ranges, tiles
