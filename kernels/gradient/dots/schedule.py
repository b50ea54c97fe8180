"""The layout of a weight gradient made of bf16 pairs: common pitches, phases, taps as shifts, slabs of pixels.

The narrow tensor's pixels are one flat row of positions, ``((n * D + d) * H + h) * W + w``. The wide tensor lies in
the same pitches, one plane for each phase of the strides, so that a tap is one shift for all positions. The pitches
leave room for zeros: where a tap is outside, the wide tensor has a zero, and between its lines the narrow one has.
Zeros multiply, so data that are not finite take another way (see `kernels.gradient.dots.driver`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import ceil, prod

import numpy as np
import numpy.typing as npt

from kernels.blocks import SUMS
from kernels.cache import cached
from kernels.emit.compiler import Records
from kernels.emit.dots import STAGED, STEP, TILE
from kernels.gradient.dots.records import DotSlab, DotTap, PackedBox
from kernels.gradient.geometry import Axis, Geometry, Tensor, geometry
from kernels.gradient.roles import Sum, lane_blocks
from kernels.problem import ConvProblem, wrapped
from kernels.reduction import chunks_of

__all__ = ["DotSchedule", "dot_schedule"]

Ints = npt.NDArray[np.int64]

SOME, SOME_STEPS = 1.5, 1.05
"""How much more than these bounds a slab may have where half of it would take that many times the steps."""

MOST_BOXES = 1 << 16
"""Pieces of memory to pack: beyond that, short lines of many phases, laying them out takes too long."""

MOST_TAPS = 1 << 12
"""Taps: each is laid out by itself, for every size of a slab that is tried."""

LEAST_GAP = 12
"""Positions of zeros that take longer to multiply than one more element."""

LEAST_ROWS = 3
"""Rows that hide how long a product takes; smaller tiles wait for it."""

MOST_TILE_ROWS = 8
"""Rows of a tile: with more the accumulators, which change from call to call, take longer than their products save."""

TRANSPOSED = 1.3
"""Cycles in which two values of adjacent channels are packed to planes, less those in which they become a pair."""

MOST_ROWS = 1 << 17
"""Pairs of a channel and a tap: their table has 1 MiB."""


@dataclass(frozen=True)
class _Line:
    """One axis of a slab: `size` narrow positions in `pitch`, and each live tap as (number, phase, shift)."""

    axis: Axis
    size: int
    pitch: int
    taps: tuple[tuple[int, int, int], ...]

    @property
    def phases(self) -> list[int]:
        """The phases that a tap reads, in order."""
        return sorted({phase for _, phase, _ in self.taps})

    @property
    def reach(self) -> tuple[int, int]:
        """Smallest and largest shift."""
        shifts = [shift for _, _, shift in self.taps]
        return min(shifts), max(shifts)

    @property
    def cuts(self) -> list[tuple[int, int]]:
        """The narrow positions of each slab."""
        parts = ceil(self.axis.size / self.size)
        return list(pairwise(self.axis.size * i // parts for i in range(parts + 1)))

    def data(self, phase: int) -> Iterator[tuple[int, int, int]]:
        """Return for each cut the first wide position of a phase that it meets, its index there, and their number."""
        stride = self.axis.stride
        for low, high in self.cuts:
            start, stop = (-((low * stride + phase - end) // stride) for end in self.axis.window(low, high))
            yield (low + start) * stride + phase, start, stop - start


def _line(axis: Axis, size: int) -> _Line | None:
    """Lay out an axis for slabs of `size` positions; None where no tap meets data."""
    live = [k for k, (low, high) in enumerate(axis.ranges) if low < high]
    if not live:
        return None
    taps = tuple((k, axis.shifts[k] % axis.stride, axis.shifts[k] // axis.stride) for k in live)
    least, most = min(shift for *_, shift in taps), max(shift for *_, shift in taps)
    first, end = least, size + most
    if size == axis.size:  # the border's zeros serve the line before and the line after
        start, stop = axis.window(0, size)
        first, end = max(first, start // axis.stride), min(end, (stop - 1) // axis.stride + 1)
    return _Line(axis, size, max(size + most - first, end - least, size, end - first), taps)


@dataclass(frozen=True, kw_only=True)
class DotSchedule(Sum):
    """Everything that the compiled driver reads; `a` is the tensor of rows, `b` that of lanes.

    `tap_table` has the `live` taps, which meet data, then the same as tiles take them, with rows of `tile_channels`
    channels or one, `row_bytes` and `row_sums` apart. `offsets` are those of the accumulators' rows, the taps of a
    channel inside channels, in the planes. `boxes` has a row for each slab: a box of `a` for each phase, and one of
    `b`.
    """

    a_steps: Ints
    b_steps: Ints
    panel_steps: Ints
    a_planes: int
    a_plane: int
    positions: int
    live: int
    tap_table: Records
    tile_channels: int
    row_bytes: int
    row_sums: int
    offsets: Ints
    boxes: Records
    use: float


def _odd_lines(positions: int) -> int:
    """Return the bytes of a plane: an odd number of cache lines, so that 16 channels fall into different sets."""
    return 64 * (ceil(2 * positions / 64) | 1)


def _steps(lines: tuple[_Line, ...]) -> list[int]:
    """Return the positions between (n, d, h, w)."""
    return [prod(line.pitch for line in lines[a + 1 :]) for a in range(4)]


def _pixels(lines: tuple[_Line, ...], first: int) -> int:
    """Count the positions up to the last pixel, over the axes from `first` on."""
    return 1 + sum((line.size - 1) * step for line, step in list(zip(lines, _steps(lines), strict=True))[first:])


def _bytes(geo: Geometry, lines: tuple[_Line, ...]) -> tuple[int, int]:
    """Return the bytes of a slab's planes and of its panels."""
    phases, pixels = prod(len(line.phases) for line in lines), _pixels(lines, 0)
    reach = sum((line.reach[1] - line.reach[0]) * step for line, step in zip(lines, _steps(lines), strict=True))
    return 2 * (pixels + reach) * phases * _up(geo.wide.channels), 2 * pixels * _up(geo.narrow.channels)


def _up(channels: int) -> int:
    return TILE * ceil(channels / TILE)


def _lines(axes: tuple[Axis, ...], shape: list[int]) -> tuple[_Line, ...] | None:
    lines = [_line(axis, size) for axis, size in zip(axes, shape, strict=True)]
    live = tuple(line for line in lines if line is not None)
    return live if len(live) == len(lines) else None


def _cut(geo: Geometry, groups: int) -> tuple[_Line, ...] | None:
    """Halve axes, images first, until a slab's panels fit; None where they never do.

    The last halving is undone where it leaves much of the steps empty.
    """
    shape = [axis.size for axis in geo.axes]
    if 0 in shape:
        return None
    sums = 4 * geo.wide.channels * geo.narrow.channels * prod(len(axis.shifts) for axis in geo.axes)
    limit = SUMS.dot_slab_bytes if sums <= SUMS.dot_slab_bytes else 2 * SUMS.dot_slab_bytes
    if geo.wide.channel == 1:
        limit = min(limit, max(1, 4 * SUMS.dot_slab_bytes // groups))
    lines = before = _lines(geo.axes, shape)
    for axis in range(4):
        while lines is not None:
            wide, narrow = _bytes(geo, lines)
            reach = lines[axis].reach
            fits = wide + narrow <= limit and narrow <= SUMS.dot_slab_bytes
            shortest = 1 if axis < 3 else SUMS.line_positions
            if fits or shape[axis] <= max(shortest, reach[1] - reach[0]):
                break
            shape[axis] = ceil(shape[axis] / 2)
            lines, before = _lines(geo.axes, shape), lines
    if lines is None or before is None or sum(_bytes(geo, lines)) > SUMS.most_slab_bytes:
        return None
    wide, narrow = _bytes(geo, before)
    little = max((wide + narrow) / limit, narrow / SUMS.dot_slab_bytes) <= SOME
    if little and SOME_STEPS * _count(before) < _count(lines):
        lines = before
    return lines if _slabs(lines) * prod(len(line.phases) for line in lines) <= MOST_BOXES else None


def _count(lines: tuple[_Line, ...]) -> int:
    """Count the steps of all slabs."""
    return ceil(_pixels(lines, 0) / STEP) * _slabs(lines)


def _slabs(lines: Sequence[_Line]) -> int:
    return prod(ceil(line.axis.size / line.size) for line in lines)


def _boxes(
    lines: Sequence[_Line], columns: Sequence[Sequence[Iterable[tuple[int, int, int]]]], tensor: Sequence[int],
    panel: Sequence[int],
) -> Records:  # fmt: skip
    """Return the boxes of each slab, one for each combination of the `columns` of (n, d, h, w).

    A column has, for each cut, the first position in the tensor and in the plane, and their number.
    """
    boxes = np.zeros([*(len(line.cuts) for line in lines), *map(len, columns)], PackedBox.dtype)
    for axis, (some, step, line) in enumerate(zip(columns, tensor, panel, strict=True)):
        first, at, count = np.array([[*column] for column in some], object).T
        along = [1] * 8
        along[axis], along[4 + axis] = count.shape
        boxes["source"] += wrapped(2 * step * first).reshape(along)
        boxes["place"] += wrapped(2 * line * at).reshape(along)
        boxes["sizes"][..., axis] = count.astype(np.int64).reshape(along)
    return boxes.reshape(_slabs(lines), -1)


@cached
def dot_schedule(problem: ConvProblem) -> DotSchedule | None:
    """Lay out the sum for `problem`; None where zeros would need too much room, or there is nothing to sum."""
    unswapped = geo = geometry(problem)
    swapped = _swaps(geo)
    if swapped:
        geo = Geometry(geo.narrow, geo.wide, geo.axes)
    taps = prod(len(axis.shifts) for axis in geo.axes)
    if taps > MOST_TAPS or geo.wide.channels * taps > MOST_ROWS:
        return None
    lines = _cut(geo, problem.groups)
    if lines is None:
        return None
    cuts = np.array(list(product(*(line.cuts for line in lines))), np.int64)
    slabs = np.empty(len(cuts), DotSlab.dtype)
    slabs["low"], slabs["high"] = cuts[:, :, 0], cuts[:, :, 1]
    steps = _steps(lines)
    pixels = (slabs["high"][:, 0] - slabs["low"][:, 0] - 1) * steps[0] + _pixels(lines, 1)
    slabs["pairs"] = STEP // 2 * -(-pixels // STEP)
    positions = 32 * ceil(_pixels(lines, 0) / 32)
    ends = [sum(line.reach[end] * step for line, step in zip(lines, steps, strict=True)) for end in range(2)]
    front, plane = max(0, -ends[0]), _odd_lines(positions + max(0, -ends[0]) + max(0, ends[1]))
    phases = {key: i for i, key in enumerate(product(*(line.phases for line in lines)))}

    def place(phase: tuple[int, ...], at: tuple[int, ...]) -> int:
        return phases[phase] * plane + 2 * (front + sum(x * step for x, step in zip(at, steps, strict=True)))

    live = np.empty(prod(len(line.taps) for line in lines), DotTap.dtype)
    sources = []
    for row, tap in zip(live, product(*(line.taps for line in lines)), strict=True):
        numbers, phase, shift = zip(*tap, strict=True)
        number = 0
        for axis, k in zip(geo.axes, numbers, strict=True):
            number = number * len(axis.shifts) + k
        row["number"], row["plane"] = number, place(phase, shift)
        spans = [axis.ranges[k] for axis, k in zip(geo.axes, numbers, strict=True)]
        row["low"], row["high"] = zip(*spans, strict=True)
        meets = [axis.shifts[k] for axis, k in zip(geo.axes, numbers, strict=True)]
        sources.append(2 * sum(step * shift for step, shift in zip(geo.wide.steps, meets, strict=True)))
    live["source"], live["rows"] = wrapped(sources), 1
    wide = _boxes(lines, [[line.data(phase) for phase in line.phases] for line in lines], geo.wide.steps, steps)
    wide["place"] += 2 * front + plane * np.arange(len(phases))
    whole = [[[(low, 0, high - low) for low, high in line.cuts]] for line in lines]
    narrow = _boxes(lines, whole, geo.narrow.steps, steps)
    a_steps = [2 * step * axis.stride for step, axis in zip(geo.wide.steps, geo.axes, strict=True)]
    b_blocks = ceil(geo.narrow.channels / TILE)
    points = prod(axis.size for axis in geo.axes)
    channels = geo.wide.channels
    a_plane = _odd_lines(plane * len(phases) // 2)
    rows = TILE * ceil(taps * channels / TILE) if STAGED else taps * channels
    # a tap that meets nothing reads zeros behind the channels
    at = np.full((channels, taps), channels * a_plane, np.int64)
    at[:, live["number"]] = np.arange(channels)[:, None] * a_plane + live["plane"]
    tap_rows, tile_channels, row_bytes, row_sums = _rows(live, lines[3], channels, a_plane, taps)
    tall = min(LEAST_ROWS, min(channels, tile_channels) * len(live) / len(tap_rows))
    visited, inside = float(STEP * _count(lines)), problem.macs
    if not STAGED:
        visited = min(visited, prod(map(_visited, lines, steps))) * LEAST_ROWS / tall
        inside = inside * prod(int((axis.spans[:, 1] - axis.spans[:, 0]).sum()) for axis in geo.axes) // (taps * points)
    chunks = min(len(slabs), points // SUMS.chunk_positions, problem.macs // SUMS.chunk_macs)
    return DotSchedule(
        geo=unswapped,
        groups=problem.groups,
        blocks=lane_blocks(geo.narrow.channels),
        rows=rows,
        lanes=TILE * b_blocks,
        a_steps=wrapped([*a_steps, 2 * geo.wide.channel]),
        b_steps=wrapped([2 * step for step in (*geo.narrow.steps, geo.narrow.channel)]),
        panel_steps=wrapped([2 * step for step in steps]),
        a_planes=channels + (len(live) < taps),
        a_plane=a_plane,
        positions=positions,
        taps=taps,
        channels=channels,
        tap_step=1,
        channel_step=taps,
        live=len(live),
        tap_table=np.concatenate([live, tap_rows]),
        tile_channels=tile_channels,
        row_bytes=row_bytes,
        row_sums=row_sums,
        offsets=np.pad(at.reshape(-1), (0, rows - at.size), mode="edge"),
        slabs=slabs,
        boxes=np.concatenate([wide, narrow], axis=1),
        chunks=chunks_of(chunks, 4 * rows * TILE * b_blocks * problem.groups),
        use=inside / (problem.groups * rows * TILE * b_blocks * visited),
        vector_is_wide=swapped,
    )


def _swaps(geo: Geometry) -> bool:
    """Return whether the tensors change places because that is faster: one tap meets every position of both.

    In a cycle a pair of positions of a row is multiplied with those of 16 channels.
    """
    if STAGED or not all(len(axis.shifts) == 1 and axis.stride == 1 and axis.whole for axis in geo.axes):
        return False

    def cycles(a: Tensor, b: Tensor) -> float:
        products = max(a.channels, LEAST_ROWS * ceil(a.channels / MOST_TILE_ROWS)) * ceil(b.channels / TILE)
        return products + (TRANSPOSED * a.channels if a.channel == 1 else 0)

    return cycles(geo.narrow, geo.wide) < cycles(geo.wide, geo.narrow)


def _rows(live: Records, line: _Line, channels: int, plane: int, taps: int) -> tuple[Records, int, int, int]:
    """Return taps as tiles take them, most channels of a tile, and the bytes and rows of sums between its rows.

    Rows are channels of a tap, or taps of a channel where a line of taps that read the same phase has more of them than
    there are channels: these lie side by side. On AMX rows are staged.
    """
    of_phase = [[i for i, tap in enumerate(line.taps) if tap[1] == phase] for phase in line.phases]
    parts = [some for each in of_phase for some in np.array_split(each, ceil(len(each) / MOST_TILE_ROWS))]
    if STAGED or len(line.taps) <= len(parts) * channels:
        return live, MOST_TILE_ROWS, plane, taps
    lines = live.reshape(-1, len(line.taps))
    rows = lines[:, [some[0] for some in parts]]
    for i, some in enumerate(parts):
        rows["rows"][:, i] = len(some)
        rows["low"][:, i, 3], rows["high"][:, i, 3] = lines["low"][:, some, 3].min(1), lines["high"][:, some, 3].max(1)
    first, second = max(parts, key=len)[:2]
    plane, taps = (int(live[name][second] - live[name][first]) for name in ("plane", "number"))
    return rows.reshape(-1), 1, plane, taps


def _visited(line: _Line, step: int) -> float:
    """Count the positions of an axis, `step` apart, that a tap visits, and what it costs to leave out the others."""
    parts, spans = len(line.cuts), (line.axis.ranges[number] for number, *_ in line.taps)
    cost = LEAST_GAP * parts / step
    return sum(min(line.pitch * parts, high - low + cost) for low, high in spans) / len(line.taps)
