"""Forward operations on AMX, and when they are worth it: the policy of `kernels.forward.staging`.

How they are batches of `kernels.emit.brgemm`, in tiles of 16 rows and blocks of 16 channels:

    rows      dst positions of a phase, in lines, planes or all of a band, with the gaps that the panel has
    a         the panel: src as rows of 32 channels, padded, positions that are equal modulo the stride side by side
    element   a tap, which is one offset for all rows; a step is 32 channels
    c         sums in scratch memory, phases of a line side by side; written to dst band by band
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from math import ceil, prod

import numpy as np

from kernels.blocks import STEPS, SUMS
from kernels.cache import cached
from kernels.emit.compiler import row_of, values_of
from kernels.emit.dots import STEP, TILE, dot_table
from kernels.forward.axes import AxisTable, Ints, axis_tables, numbers_of, tables_of
from kernels.forward.operands import Share
from kernels.forward.pairs import pack_pairs, pair_boxes
from kernels.forward.records import (
    GatherShare,
    Grid,
    LaneGroups,
    LineSums,
    SrcReading,
    SumOrder,
    WeightPanel,
)  # fmt: skip
from kernels.forward.share import share
from kernels.forward.staging import (
    LANES,
    ROW_BYTES,
    SPARE,
    TILE_BYTES,
    RowPanel,
    Segment,
    Staged,
    gather_staged,
)
from kernels.forward.tiles import ForwardTiles, way_cycles
from kernels.plan import Stop, Storage, Unit
from kernels.problem import ConvProblem, Dims
from kernels.target import target

__all__ = ["FORWARD_AMX"]

PRODUCT_CYCLES, VALUE_CYCLES = 26.0, 1.5
"""What a product of two tiles takes with its loads, and packing a value."""

GROUP_CYCLES = 40_000.0
"""What each group after the first costs, because it needs another pass."""

PIXEL_MACS = 32
"""Multiply-adds that take as long as writing a value of dst, and what is packed for it."""

MOST_CYCLES = 0.9
"""Of the estimate over that of register tiles."""

SPEED = 4
"""Times as much work makes a unit worth its message as on register tiles."""

MOST_TAPS, MOST_PHASES, MOST_BANDS = 1 << 12, 1 << 10, 1 << 20
"""Beyond these laying them out takes too long."""

JOINED = (1, 1, 1, 1), (0, 0, 1, 1), (0, 0, 0, 1)
"""The axes that rows may go along: all of a band, or its planes or lines where they make fewer tiles."""

_ALL = 1 << 40


@dataclass(frozen=True)
class _Axis:
    """An axis in bands: its table, in which all dst positions of a phase meet all taps, at `src` in a segment.

    Src positions that agree modulo the step of src are a segment, of which a band meets `pitch`: so the next dst
    position of a phase meets a tap one position further. `segments` have their residue, and the least position that the
    first band begins with; `segment` is that of each tap.
    """

    table: AxisTable
    pitch: int
    segments: list[tuple[int, int]]
    segment: Ints


def _axis(table: AxisTable, step: int, order: int) -> _Axis | None:
    """Lay out an axis in bands of `step` dst positions, taps in this order; None where it has no taps."""
    phases = table.phases[table.phases["dst"] < step]
    if not len(phases):
        return None
    some = [np.arange(first, first + count)[::order] for first, count in phases[["first", "taps"]].tolist()]
    counts = np.repeat(-((phases["dst"] - step) // table.dst_step), phases["taps"])
    taps = table.taps[np.concatenate(some)]
    at, residue = np.divmod(taps["src"] - taps["low"] * table.src_step, table.src_step)
    residues, segment = np.unique(residue, return_inverse=True)
    least = np.array([at[segment == i].min() for i in range(len(residues))])
    at -= least[segment]
    taps["low"], taps["high"], taps["src"] = 0, _ALL, at
    phases["first"] = np.cumsum(phases["taps"]) - phases["taps"]
    covered = len(phases) == min(table.dst_step, step)
    staged = replace(table, dst=step, src_step=1, phases=phases, taps=taps, covered=covered)
    return _Axis(staged, int((at + counts).max()), list(zip(residues.tolist(), least.tolist(), strict=True)), segment)


@dataclass(frozen=True)
class Layout:
    """Bands of `steps` images and dst positions, and their axes (d, h, w); rows go along the `joined` ones.

    A src position has `depth` rows of 32 channels, a band has `rows` of sums. `cycles` is an estimate for all of dst.
    """

    steps: tuple[int, ...]
    axes: list[_Axis]
    joined: tuple[int, ...]
    depth: int
    rows: int
    cycles: float

    @property
    def pitches(self) -> list[int]:
        """Positions of a segment from one to the next one along (n, d, h, w)."""
        return [prod(axis.pitch for axis in self.axes[first:]) for first in range(4)]

    @property
    def segment_rows(self) -> int:
        """Rows of a segment: of all its positions."""
        return self.depth * self.steps[0] * self.pitches[0]

    @property
    def block_bytes(self) -> int:
        """Bytes of 16 dst channels' weights."""
        return TILE_BYTES * self.depth * prod(axis.table.kernel for axis in self.axes)


def _rows(steps: Sequence[int], axes: Sequence[_Axis], joined: Sequence[int]) -> tuple[int, int]:
    """Count the tiles of a band, each as often as it has taps, and the rows of its sums."""
    run, work, rows, pitch = 1, 1, 1, 1
    for axis, join in zip(axes[::-1], joined[::-1], strict=False):
        table = axis.table
        counts = 1 if join else -((table.phases["dst"] - table.dst) // table.dst_step)
        work *= int((table.phases["taps"] * counts).sum())
        rows *= table.dst_step if join else table.dst
        run += join * ((table.dst - 1) // table.dst_step) * pitch
        pitch *= axis.pitch
    images = 1 if joined[0] else steps[0]
    tiles = ceil((run + joined[0] * (steps[0] - 1) * pitch) / TILE)
    return images * tiles * work, images * rows * TILE * tiles


def _bands(dims: Dims, depth: int) -> tuple[list[int], list[_Axis]] | None:
    """Choose the images and dst positions of a band, as many as have room, and lay its axes out.

    None for too many bands, segments or zeros, or nothing to sum.
    """
    shape, tables, order = [1, *dims.dst], axis_tables(dims)[1:], 1 if dims.gathers else -1

    def lay() -> list[_Axis] | None:
        each = (_axis(table, step, order) for table, step in zip(tables, shape[1:], strict=True))
        found = [axis for axis in each if axis is not None]
        return found if len(found) == 3 and prod(len(axis.segments) for axis in found) <= MOST_PHASES else None

    def panel(axes: list[_Axis]) -> int:
        return depth * ROW_BYTES * shape[0] * prod(len(axis.segments) * axis.pitch for axis in axes)

    def fits(axes: list[_Axis]) -> bool:
        return panel(axes) <= SUMS.dot_slab_bytes and prod(shape) <= SUMS.staged_positions

    axes = lay()
    for axis in range(3):
        stride = tables[axis].dst_step
        least = stride * (1 if axis < 2 else SUMS.line_positions)
        while axes is not None and not fits(axes) and shape[1 + axis] > least:
            shape[1 + axis] = min(dims.dst[axis], stride * ceil(ceil(shape[1 + axis] / 2) / stride))
            axes = lay()
    if axes is None or panel(axes) > 8 * SUMS.dot_slab_bytes:
        return None
    while shape[1:] == list(dims.dst) and 2 * shape[0] <= dims.n:
        shape[0] *= 2
        if not fits(axes):
            shape[0] //= 2
            break
    return shape, axes


@cached
def layout(problem: ConvProblem) -> Layout | None:
    """Lay out a forward operation; None where it has too many taps, phases or zeros, or nothing to sum."""
    dims = problem.dims
    if prod(dims.kernel) > MOST_TAPS or 0 in (*dims.wide, *dims.narrow, dims.n):
        return None
    if not dims.gathers and prod(dims.strides) > MOST_PHASES:
        return None
    depth, blocks = ceil(dims.src_channels / STEP), ceil(dims.dst_channels / TILE)
    chosen = _bands(dims, depth)
    if chosen is None:
        return None
    steps, axes = chosen
    bands = prod(ceil(size / step) for size, step in zip((dims.n, *dims.dst), steps, strict=True))
    if bands > MOST_BANDS:
        return None
    joined = min(JOINED, key=lambda joined: _rows(steps, axes, joined)[0])
    work, rows = _rows(steps, axes, joined)
    packed = steps[0] * prod(len(axis.segments) * axis.pitch for axis in axes)
    products = PRODUCT_CYCLES * depth * blocks * work
    cycles = dims.groups * bands * (products + VALUE_CYCLES * STEP * depth * packed) + GROUP_CYCLES * (dims.groups - 1)
    return Layout(tuple(steps), axes, joined, depth, rows, cycles)


class _Bands(Share):
    """Some groups, pairs of blocks of dst channels, and bands."""

    def __init__(self, problem: ConvProblem, part: Sequence[int]) -> None:
        super().__init__(problem, part)
        plan, dims = layout(problem), self.dims
        assert plan is not None
        self.plan, pitches, axes = plan, plan.pitches, plan.axes
        bounds = zip(self.spans, plan.steps, strict=True)
        self.grid = [(low, high, step, ceil((high - low) / step)) for (low, high), step in bounds]
        self.bands = prod(count for *_, count in self.grid)
        values = problem.groups * problem.n * dims.dst_channels * prod(dims.dst)
        work = LANES * prod(plan.steps) * (problem.macs // max(1, values) + PIXEL_MACS)  # of a band and two blocks
        pairs = max(1, min(SUMS.weights_bytes // (2 * plan.block_bytes), 10 * STEPS.batch_macs // work))
        low, high = self.channels
        self.cuts = [
            (g, c, min(high, c + pairs * LANES))
            for g, c in product(range(self.g1 - self.g0), range(low, high, pairs * LANES))
        ]
        self.parts = [self.one_pass(group, 1, last - first, first) for group, first, last in self.cuts]
        positions, widest = plan.steps[0] * pitches[0], max(ceil((last - first) / TILE) for _, first, last in self.cuts)
        segments = [prod(len(axis.segments) for axis in axes[first:]) for first in range(4)]
        self.floats["panels"] = widest * plan.block_bytes // 4
        self.floats["source"] = (segments[0] * plan.segment_rows + SPARE) * ROW_BYTES // 4
        self.floats["products"] = LANES + 64
        self.floats["sums"] = (plan.rows + prod(plan.steps)) * LANES
        self.batch = max(1, STEPS.batch_macs // (work * ceil((high - low) / LANES)))
        self.boxes, self.unfolds = pair_boxes(problem, numbers_of(dims), TILE * plan.depth)
        panel = row_of(
            RowPanel, pitches=pitches, sizes=dims.src, src_strides=self.src_strides,
            strides=[1, *(axis.table.dst_step for axis in axes)], joined=plan.joined,
        )  # fmt: skip
        each = product(*(axis.segments for axis in axes))
        self.staged = Staged(panel, np.array([tuple(zip(*some, strict=True)) for some in each], Segment.dtype))
        tables = [axis_tables(dims)[0]]
        for axis, pitch, inner in zip(axes, pitches[1:], segments[1:], strict=True):
            taps = axis.table.taps.copy()
            taps["src"] += axis.segment * (inner * plan.segment_rows // pitch)
            tables.append(replace(axis.table, taps=taps))
        self.tables = tables_of(tuple(tables))
        lows, highs, sizes, _ = zip(*self.grid, strict=True)
        self.share = row_of(
            GatherShare, kind=self.kind, micro=0, limits=[0, 0], loops=[0, 1, 2, 3], channels=dims.src_channels,
            skips=0, direct=False, rounds=False, covered=all(table.covered for table in tables),
            grid=values_of(Grid, low=lows, high=highs, step=sizes),
            panel=values_of(
                WeightPanel, words=plan.depth, line=TILE_BYTES, tap_bytes=TILE_BYTES * plan.depth,
                block_bytes=plan.block_bytes, kernel=[table.kernel for table in tables[1:]], order=0,
            ),
            src=values_of(
                SrcReading, word=positions * ROW_BYTES, packed=True, joined=False, pixel_bytes=ROW_BYTES,
                staged=True,
            ),
            sums=values_of(
                SumOrder, chunk=SUMS.batch_steps, group=1, within_line=True, flushes=False, most=SUMS.batch_steps
            ),
            lanes=values_of(LaneGroups, lanewise=False, grouped=False, multiplier=1, step=LANES),
            lines=values_of(LineSums, kernel=0, pairs=0, width=0, ahead=False),
        )  # fmt: skip

    def run(self, inputs: Sequence[Storage], output: Storage, stop: Stop) -> bool:
        """Compute pass by pass and band by band, and then on register tiles what failed, in the same scratch memory."""
        others: list[list[int]] = []
        call = self.call(inputs, output)
        for (group, first, last), part in zip(self.cuts, self.parts, strict=True):
            pack_pairs(self.share, part, call, self.boxes, self.unfolds)
            for band in range(0, self.bands, self.batch):
                if stop():
                    return False
                failed = np.empty((min(self.batch, self.bands - band), ceil((last - first) / LANES)), np.int64)
                gather_staged(dot_table(), self.share, self.staged, part, call, self.tables, band, failed)
                for item, pair in np.argwhere(failed).tolist():
                    low = first + LANES * pair
                    others.append(self._part(self._spans(band + item), group, low, min(last, low + LANES)))
        return all(share(self.problem, "gather", part).run(inputs, output, stop) for part in others)

    def _spans(self, band: int) -> list[tuple[int, int]]:
        """Return the dst positions of a band."""
        at = map(int, np.unravel_index(band, [count for *_, count in self.grid]))
        return [
            (low + step * i, min(high, low + step * (i + 1)))
            for i, (low, high, step, _) in zip(at, self.grid, strict=True)
        ]

    def _part(self, spans: Sequence[tuple[int, int]], group: int, first: int, last: int) -> list[int]:
        """Return a part of dst, as `kernels.forward.share` takes it."""
        n, *spatial = spans
        return [*n, self.g0 + group, self.g0 + group + 1, first, last, *chain(*spatial)]


class ForwardAmx(ForwardTiles):
    """A forward operation from tile products of bf16."""

    def refuse(self, problem: ConvProblem) -> str | None:
        """Take what fills tiles well enough to be faster than register tiles."""
        if problem.op != self.op:
            return f"computes {self.op} only"
        if problem.dtype != "bf16":
            return "tile products take bf16 only"
        plan = layout(problem)
        if plan is None:
            return "too many taps, phases, or zeros between pixels"
        if 2 * plan.block_bytes > SUMS.weights_bytes:
            return "the weights of a few channels take too much room"
        ratio = plan.cycles / max(1.0, way_cycles(problem))
        if ratio > MOST_CYCLES and not target().imitated:
            return f"register tiles would do it in {1 / ratio:.0%} of the time"
        return None

    def speed(self, problem: ConvProblem) -> int:
        """Return the estimated speed, as a multiple of that on register tiles."""
        return SPEED

    def grid(self, problem: ConvProblem) -> tuple[Sequence[int], Sequence[int]]:
        """Return the sizes of the grid that units are cut from, and its steps."""
        plan, dims = layout(problem), problem.dims
        assert plan is not None
        n, *steps = plan.steps
        return (problem.n, dims.groups, dims.dst_channels, *dims.dst), (n, 1, LANES, *steps)

    @cached
    def share(self, problem: ConvProblem, unit: Unit) -> Share:
        """Prepare a unit's tables once."""
        return _Bands(problem, unit.part)


FORWARD_AMX = (
    ForwardAmx(f"conv_transpose_{target().dots}", "ConvTranspose"),
    ForwardAmx(f"convolution_{target().dots}", "Convolution"),
)
