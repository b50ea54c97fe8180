"""A unit of Convolution or ConvTranspose: passes over taps and src channels, in their order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from kernels.arena import arena_address
from kernels.emit.compiler import row_of, values_of
from kernels.emit.doubles import KINDS as TILES
from kernels.emit.doubles import LANES, SHAPES, doubles_table
from kernels.exact.driver import KINDS, sum_forward
from kernels.exact.parts import MOST_MACS, Part, data_tensor, is_lanewise, padded
from kernels.exact.records import ForwardJob, Operand, WeightsSource
from kernels.exact.tables import Meeting, Pair, clipped, plain, reach, segment_rows, segments
from kernels.plan import Stop
from kernels.problem import ConvProblem, storage_dtype

__all__ = ["SPLIT", "Change", "Sums", "add_forward", "tile_of"]

SPLIT = 64
"""Products of f64 that are summed before the sum is added to three words; this decides bits."""

MOST_PACKED = 1 << 21
"""Values of src of one pass at the most, in f64: 16 MiB."""

MOST_PANEL = 1 << 20
"""Values of weights of a block in one pass at the most."""


@dataclass(frozen=True)
class Change:
    """What happens to values as they are packed: each input is multiplied with its factor, then squared if so."""

    factors: tuple[float, float] | None = None
    square: bool = False


@dataclass(frozen=True)
class Sums:
    """Sums of a unit in memory `[group][position][line]` of f64, and the bytes to the next word of each, or 0."""

    address: int
    line: int
    word: int


def tile_of(twice: bool, lanewise: bool) -> tuple[int, int, int]:
    """Return the entry of a kind of tile, its rows and its lanes."""
    kind = ("twice_lanes" if lanewise else "twice") if twice else "lanes" if lanewise else "plain"
    rows, vectors = SHAPES[kind]
    return int(doubles_table()[TILES.index(kind)]), rows, vectors * LANES


@dataclass(frozen=True)
class _Pass:
    """Some taps of each axis and src channels of them: where they meet dst, and what src that takes."""

    taps: tuple[Pair, ...]
    channels: Pair
    meetings: tuple[Meeting, ...]
    reaches: tuple[Pair, ...]
    hops: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Positions of src that are packed along each axis."""
        return tuple((high - low - 1) // hop + 1 for (low, high), hop in zip(self.reaches, self.hops, strict=True))


def _passes(problem: ConvProblem, part: Part, taps: tuple[Pair, ...], channels: Pair) -> Iterator[_Pass]:
    """Cut taps and channels into passes that the scratch holds, in the order of the sums."""
    dims, images = problem.dims, part.axes[0]
    spatial = [clipped(segments(dims, axis), part.axes[1 + axis], taps[axis]) for axis in range(3)]
    meetings = clipped(plain(dims.n), images, (0, 1)), *spatial
    if not all(len(meeting.dst) for meeting in meetings):
        return
    counts = [high - low for low, high in taps]
    hops = 1, *(meeting.src_step if count == 1 else 1 for meeting, count in zip(spatial, counts, strict=True))
    found = _Pass(taps, channels, meetings, tuple(reach(meeting) for meeting in meetings), hops)
    lanes = part.groups[1] - part.groups[0] if is_lanewise(problem) else channels[1] - channels[0]
    large = prod(found.sizes) * padded(lanes) > MOST_PACKED
    if (large or prod(counts) * (channels[1] - channels[0]) * 32 > MOST_PANEL) and prod(counts) > 1:
        axis = next(axis for axis in range(3) if counts[axis] > 1)
        for tap in range(*taps[axis]):
            yield from _passes(problem, part, (*taps[:axis], (tap, tap + 1), *taps[axis + 1 :]), channels)
    elif channels[1] - channels[0] > MOST_PANEL // 32:
        for low in range(channels[0], channels[1], MOST_PANEL // 32):
            high = min(channels[1], low + MOST_PANEL // 32)
            yield _Pass(taps, (low, high), meetings, found.reaches, hops)
    else:
        yield found


def add_forward(
    problem: ConvProblem, part: Part, places: tuple[int, int], sums: Sums, change: Change, stop: Stop
) -> bool:
    """Add all products of a unit to its sums; `places` are the addresses of src and weights.

    False if `stop` said so.
    """
    whole = tuple((0, size) for size in problem.dims.kernel)
    for one in _passes(problem, part, whole, (0, problem.src_channels // problem.groups)):
        if not _run(problem, part, one, places, sums, change, stop):
            return False
    return True


def _run(
    problem: ConvProblem, part: Part, one: _Pass, places: tuple[int, int], sums: Sums, change: Change, stop: Stop
) -> bool:
    lanewise, size = is_lanewise(problem), storage_dtype(problem.dtype).itemsize
    entry, rows, width = tile_of(sums.word > 0, lanewise)
    src = data_tensor(problem, problem.src_channels, problem.src_spatial)
    channels, groups = one.channels[1] - one.channels[0], part.groups[1] - part.groups[0]
    line = 8 * (padded(groups) if lanewise else channels)
    lanes = groups if lanewise else part.dst[1] - part.dst[0]
    kernel, taps = problem.dims.kernel, prod(high - low for low, high in one.taps)
    factors = np.array(change.factors or (1.0, 1.0))
    factor = [factors.ctypes.data + 8 * i if change.factors else 0 for i in range(2)]
    group, wide, narrow, tap = (size * step for step in problem.weights_strides)
    of_src, of_dst = (wide, narrow) if problem.dims.gathers else (narrow, wide)
    weights = [kernel[1] * kernel[2], kernel[2], 1]
    tables, packed, positions = [], line, sums.line
    for axis in range(3, -1, -1):
        of_taps = (one.taps[axis - 1][0], weights[axis - 1]) if axis else (0, 0)
        origin = one.reaches[axis][0], part.axes[axis][0]
        tables.append(segment_rows(one.meetings[axis], origin, one.hops[axis], packed, positions, *of_taps))
        packed *= one.sizes[axis]
        positions *= part.axes[axis][1] - part.axes[axis][0]
    tables.reverse()
    counts = [len(table) for table in tables]
    start = sum(reach[0] * step for reach, step in zip(one.reaches, src.steps, strict=True))
    first_tap = sum(pair[0] * weight for pair, weight in zip(one.taps, weights, strict=True))
    elements = prod(int(table["taps"].max()) for table in tables)
    panel = taps * (1 if lanewise else channels) * width
    job = row_of(
        ForwardJob, entry=entry, rows=rows, width=width, split=SPLIT if sums.word else 0, lanewise=lanewise,
        src=values_of(
            Operand, kind=KINDS[problem.dtype],
            place=places[0] + size * (start + part.groups[0] * src.group + one.channels[0] * src.channel),
            steps=tuple(size * hop * step for hop, step in zip(one.hops, src.steps, strict=True)), sizes=one.sizes,
            channels=groups if lanewise else channels, channel=size * (src.group if lanewise else src.channel),
            group=size * src.group, packed=arena_address("exact_src", 2 * (packed // 8 + 8)), line=line,
            factor=factor[0], square=int(change.square),
        ),
        weights=values_of(
            WeightsSource, kind=KINDS[problem.dtype],
            place=places[1]
            + sum(
                at * step
                for at, step in zip(
                    (part.groups[0], part.dst[0], one.channels[0], first_tap), (group, of_dst, of_src, tap), strict=True
                )
            ),
            group=group, src=of_src, dst=of_dst, tap=tap, factor=factor[1], square=int(change.square),
        ),
        panel=arena_address("exact_weights", 2 * panel), taps=taps, lanes=lanes, blocks=-(-lanes // width),
        sums=sums.address, group=positions, word=sums.word, first=(0, *np.cumsum(counts)[:3].tolist()),
        segments=tuple(counts), most=elements * (-(-channels // SPLIT) if sums.word else 1),
    )  # fmt: skip
    every = np.concatenate(tables)
    items = -(-lanes // width) * (1 if lanewise else groups)
    macs = max(1, part.positions * taps * channels * width)
    step = max(1, MOST_MACS // macs)
    for item in range(0, items, step):
        if stop():
            return False
        sum_forward(job, every, item, min(items, item + step))
    return True
