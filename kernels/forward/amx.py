"""Forward operations on AMX, and when they are worth it: the policy of `kernels.forward.staging`.

How they are batches of `kernels.emit.brgemm`, in tiles of 16 rows and blocks of 16 channels:

    rows      dst positions of a phase, in lines, planes or all of a band, with the gaps that the panel has
    a         the panel: src as rows of 32 channels, padded, positions that are equal modulo the stride side by side
    element   a tap, which is one offset for all rows; a step is 32 channels
    c         sums in scratch memory, phases of a line side by side; written to dst band by band
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, prod

import numpy as np

from kernels.blocks import STEPS, SUMS
from kernels.cache import cached
from kernels.emit.compiler import row_of, values_of
from kernels.emit.dots import PARTS, PRODUCTS, STEP, TILE, dot_table
from kernels.forward.axes import AxisTable, tables_of
from kernels.forward.records import (
    GatherShare,
    Grid,
    LaneGroups,
    LineSums,
    Phase,
    SrcReading,
    SumOrder,
    Tap,
    WeightPanel,
)  # fmt: skip
from kernels.forward.share import Share, share
from kernels.forward.staging import LANES, ROW_BYTES, SPARE, TILE_BYTES, RowPanel, Segment, gather_staged, stage_weights
from kernels.forward.tiles import ForwardTiles, way_cycles
from kernels.pack.lines import SPLIT_BYTES
from kernels.pack.pairs import weight_boxes
from kernels.plan import Stop, Storage, Unit
from kernels.problem import ConvProblem, Dims
from kernels.target import target

__all__ = ["FORWARD_AMX"]

PRODUCT_CYCLES, VALUE_CYCLES = 26.0, 1.5
"""What a product of two tiles takes with its loads, and packing a value."""

GROUP_CYCLES = 40_000.0
"""What each group after the first costs: it is a pass of its own."""

PIXEL_MACS = 32
"""Multiply-adds that take as long as writing a value of dst, and what is packed for it."""

MOST_CYCLES = 0.9
"""Of the estimate over that of register tiles."""

SPEED = 4
"""Times as much work of bf16 makes a unit worth its message as on register tiles."""

MOST_TAPS, MOST_PHASES, MOST_BANDS = 1 << 12, 1 << 10, 1 << 20
"""Beyond these laying them out takes too long."""

JOINED = (0, 0, 0, 1), (0, 0, 1, 1), (1, 1, 1, 1)
"""The axes that rows may go along: lines, planes, or all of a band."""

_ALL = 1 << 40


@dataclass(frozen=True)
class _Axis:
    """An axis in bands of `step` dst positions.

    Phases are their first dst position in a band and their taps: number, segment, shift in it. A segment has its
    residue and its least shift, `pitch` positions; dst positions of a phase are `stride` apart.
    """

    step: int
    stride: int
    pitch: int
    phases: dict[int, list[tuple[int, int, int]]]
    segments: list[tuple[int, int]]

    def count(self, first: int) -> int:
        """Count a phase's positions in a whole band."""
        return ceil((self.step - first) / self.stride)

    @property
    def taps(self) -> list[int]:
        """The taps in the order of the phases, in which weights are packed."""
        return [tap for phase in self.phases.values() for tap, *_ in phase]

    def table(self, src_step: int) -> AxisTable:
        """Return phases and taps as compiled loops read them; from a segment to the next one there are `src_step`."""
        rows: list[tuple[int, int, int, int]] = []
        phases: list[tuple[int, int, int, int]] = []
        for first, taps in self.phases.items():
            phases.append((first, len(rows), len(taps), 1))
            rows += [(len(rows) + i, 0, _ALL, segment * src_step + at) for i, (_, segment, at) in enumerate(taps)]
        covered = len(phases) == min(self.stride, self.step)
        tables = np.array(phases, Phase.dtype), np.array(rows, Tap.dtype)
        return AxisTable(self.step, _ALL, len(rows), self.stride, 1, *tables, covered)


def _axis(dims: Dims, axis: int, step: int) -> _Axis | None:
    """Lay out an axis; None where no tap meets anything.

    ConvTranspose: the dst positions ``u`` that agree in ``(u + pad) % stride`` are a phase: the next one of them meets
    each tap one src position further. Convolution: all dst positions are one phase, and the src positions ``x`` that
    agree in ``x % stride`` are a segment, in which the next dst position meets a tap one position further.
    """
    stride, dilation, pad = dims.strides[axis], dims.dilations[axis], dims.pads[axis]
    found: dict[int, list[tuple[int, int, int]]] = {}
    for tap, (low, high) in enumerate(dims.tap_range(axis, k) for k in range(dims.kernel[axis])):
        if dims.gathers:
            first, (at, residue) = 0, divmod(tap * dilation - pad, stride)
        else:
            phase = tap * dilation % stride
            begin = -((phase - pad) // stride)
            first, residue, at = stride * begin + phase - pad, 0, begin - tap * dilation // stride
        if low < high and first < step:
            found.setdefault(first, []).append((tap, residue, at))
    if not found:
        return None
    every = [each for taps in found.values() for each in taps]
    least = {residue: min(at for _, other, at in every if other == residue) for _, residue, _ in sorted(every)}
    residues, stride = sorted(least), 1 if dims.gathers else stride
    phases = {
        first: [(tap, residues.index(residue), at - least[residue]) for tap, residue, at in taps]
        for first, taps in found.items()
    }
    pitch = max(at + ceil((step - first) / stride) for first, taps in phases.items() for *_, at in taps)
    return _Axis(step, stride, pitch, phases, [(residue, least[residue]) for residue in residues])


@dataclass(frozen=True)
class Layout:
    """Bands of so many images and dst positions (`steps`) and their axes (d, h, w).

    `joined` are the axes that rows go along, as `kernels.forward.staging.RowPanel` has them. `cycles` is an estimate for
    all of dst.
    """

    steps: tuple[int, ...]
    axes: tuple[_Axis, ...]
    joined: tuple[int, ...]
    depth: int
    parts: int
    cycles: float

    @property
    def pitches(self) -> list[int]:
        """Positions of a segment to the next one along (n, d, h, w)."""
        return [prod(axis.pitch for axis in self.axes[first:]) for first in range(4)]

    @property
    def segments(self) -> int:
        """The number of segments."""
        return prod(len(axis.segments) for axis in self.axes)

    @property
    def taps(self) -> list[tuple[int, ...]]:
        """All taps, in the order in which their weights are packed."""
        return list(product(*(axis.taps for axis in self.axes)))

    @property
    def block_bytes(self) -> int:
        """Bytes of one part of 16 dst channels' weights."""
        return TILE_BYTES * self.depth * len(self.taps)

    @property
    def rows(self) -> int:
        """Rows of the sums of a band."""
        return _rows(self.steps, self.axes, self.joined)[1]


def _rows(steps: Sequence[int], axes: Sequence[_Axis], joined: Sequence[int]) -> tuple[int, int]:
    """Count the tiles of a band, each as often as it has taps, and the rows of its sums."""
    pitches = [prod(axis.pitch for axis in axes[first:]) for first in range(4)]
    run, work, rows = 1 + joined[0] * (steps[0] - 1) * pitches[0], 1 if joined[0] else steps[0], 1
    rows = work
    for axis, pitch, join in zip(axes, pitches[1:], joined[1:], strict=True):
        run += join * ((axis.step - 1) // axis.stride) * pitch
        rows *= axis.stride if join else axis.step
        work *= sum(len(taps) * (1 if join else axis.count(first)) for first, taps in axis.phases.items())
    tiles = ceil(run / TILE)
    return tiles * work, rows * TILE * tiles


def _bands(dims: Dims, parts: int, depth: int) -> tuple[list[int], list[_Axis]] | None:
    """Choose the images and dst positions of a band, as many as have room, and lay its axes out.

    None for too many bands, segments or zeros, or nothing to sum.
    """
    shape = [1, *dims.dst]

    def lay() -> list[_Axis] | None:
        if prod(ceil(size / step) for size, step in zip(dims.dst, shape[1:], strict=True)) > MOST_BANDS:
            return None
        found = [axis for axis in (_axis(dims, i, shape[1 + i]) for i in range(3)) if axis is not None]
        return found if len(found) == 3 and prod(len(axis.segments) for axis in found) <= MOST_PHASES else None

    def panel(axes: list[_Axis]) -> int:
        return parts * depth * ROW_BYTES * shape[0] * prod(len(axis.segments) * axis.pitch for axis in axes)

    def fits(axes: list[_Axis]) -> bool:
        return panel(axes) <= SUMS.panel_bytes and prod(shape) <= SUMS.staged_positions

    axes = lay()
    for axis in range(3):
        stride = 1 if dims.gathers else dims.strides[axis]
        least = stride * (1 if axis < 2 else SUMS.line_positions)
        while axes is not None and not fits(axes) and shape[1 + axis] > least:
            shape[1 + axis] = min(dims.dst[axis], stride * ceil(ceil(shape[1 + axis] / 2) / stride))
            axes = lay()
    if axes is None or panel(axes) > SUMS.most_panel_bytes:
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
    dims, parts = problem.dims, PARTS[problem.dtype]
    strides = (1, 1, 1) if dims.gathers else dims.strides
    if prod(dims.kernel) > MOST_TAPS or prod(strides) > MOST_PHASES or 0 in (*dims.wide, *dims.narrow, dims.n):
        return None
    depth, blocks = ceil(dims.src_channels / STEP), ceil(dims.dst_channels / TILE)
    chosen = _bands(dims, parts, depth)
    if chosen is None:
        return None
    steps, axes = chosen
    bands = prod(ceil(size / step) for size, step in zip((dims.n, *dims.dst), steps, strict=True))
    if bands > MOST_BANDS:
        return None
    joined = min(JOINED, key=lambda joined: _rows(steps, axes, joined))
    packed = steps[0] * prod(len(axis.segments) * axis.pitch for axis in axes)
    products = PRODUCT_CYCLES * len(PRODUCTS[parts]) * depth * blocks * _rows(steps, axes, joined)[0]
    cycles = dims.groups * bands * (products + VALUE_CYCLES * STEP * depth * packed) + GROUP_CYCLES * (dims.groups - 1)
    return Layout(tuple(steps), tuple(axes), joined, depth, parts, cycles)


class _Staged(Share):
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
        pairs = max(1, min(SUMS.weights_bytes // (2 * plan.parts * plan.block_bytes), STEPS.staged_macs // work))
        low, high = self.channels
        self.cuts = [
            (g, c, min(high, c + pairs * LANES))
            for g, c in product(range(self.g1 - self.g0), range(low, high, pairs * LANES))
        ]
        self.parts = [self.one_pass(group, 1, last - first, first) for group, first, last in self.cuts]
        positions, widest = plan.steps[0] * pitches[0], max(ceil((last - first) / TILE) for _, first, last in self.cuts)
        panel_floats = plan.segments * plan.parts * plan.depth * positions * ROW_BYTES // 4
        self.floats["panels"] = plan.parts * widest * plan.block_bytes // 4
        self.floats["source"] = panel_floats + SPARE * ROW_BYTES // 4
        self.floats["products"] = SPLIT_BYTES // 4 + LANES + 64
        self.floats["sums"] = (plan.rows + prod(plan.steps)) * LANES
        self.batch = max(1, STEPS.band_batch_macs // (work * ceil((high - low) / LANES)))
        numbers = [np.ravel_multi_index(tap, dims.kernel) for tap in plan.taps]
        self.taps = weight_boxes(problem, np.array(numbers), np.arange(len(numbers)) * STEP * plan.depth, STEP)
        strides = [1, *(axis.stride for axis in axes)]
        self.panel = row_of(
            RowPanel, parts=plan.parts, depth=plan.depth, positions=positions, pitches=pitches, sizes=dims.src,
            src_strides=self.src_strides, strides=strides, joined=plan.joined,
        )  # fmt: skip
        each = product(*(axis.segments for axis in axes))
        self.segments = np.array([tuple(zip(*some, strict=True)) for some in each], Segment.dtype)
        segment = plan.parts * plan.depth * positions
        steps = [segment * prod(len(axis.segments) for axis in axes[i + 1 :]) // pitches[i + 1] for i in range(3)]
        images = np.array([(0, 0, 1, 1)], Phase.dtype), np.array([(0, 0, _ALL, 0)], Tap.dtype)
        tables = AxisTable(problem.n, _ALL, 1, 1, 1, *images), *map(_Axis.table, axes, steps)
        self.tables = tables_of(tables, False)
        lows, highs, sizes, _ = zip(*self.grid, strict=True)
        self.share = row_of(
            GatherShare, kind=self.kind, micro=0, limits=[0, 0], loops=[0, 1, 2, 3], channels=dims.src_channels,
            direct=False, covered=all(table.covered for table in tables),
            grid=values_of(Grid, low=lows, high=highs, step=sizes),
            panel=values_of(
                WeightPanel, words=plan.depth, line=TILE_BYTES, tap_bytes=TILE_BYTES * plan.depth,
                block_bytes=plan.block_bytes, kernel=[table.kernel for table in tables[1:]], order=0,
            ),
            src=values_of(
                SrcReading, word=positions * ROW_BYTES, packed=True, by_tap=False, joined=False, pixel_bytes=ROW_BYTES,
                compact=0, staged=True,
            ),
            sums=values_of(
                SumOrder, chunk=SUMS.batch_steps, group=1, within_line=True, flushes=False, most=SUMS.batch_steps
            ),
            lanes=values_of(LaneGroups, lanewise=False, grouped=False, multiplier=1, count=LANES, pairs=1),
            lines=values_of(LineSums, kernel=0, width=0, ahead=False),
        )  # fmt: skip

    def run(self, inputs: Sequence[Storage], output: Storage, stop: Stop) -> bool:
        """Compute pass by pass and band by band, and then on register tiles what failed, in the same scratch memory."""
        others: list[list[int]] = []
        call = self.call(inputs, output)
        for (group, first, last), part in zip(self.cuts, self.parts, strict=True):
            stage_weights(self.share, self.panel, part, call, self.taps)
            for band in range(0, self.bands, self.batch):
                if stop():
                    return False
                failed = np.empty((min(self.batch, self.bands - band), ceil((last - first) / LANES)), np.int64)
                gather_staged(
                    dot_table(), self.share, self.panel, self.segments, part, call, self.tables, band, failed
                )  # fmt: skip
                for item, pair in np.argwhere(failed).tolist():
                    low = first + LANES * pair
                    others.append(self._box(band + item, self.g0 + group, low, min(last, low + LANES)))
        return all(share(self.problem, "gather", part).run(inputs, output, stop) for part in others)

    def _box(self, item: int, group: int, first: int, last: int) -> list[int]:
        """Return a band's part of dst, as `kernels.forward.share` takes it."""
        at = np.unravel_index(item, [count for *_, count in self.grid])
        n, *spatial = (
            (low + step * int(i), min(high, low + step * (int(i) + 1)))
            for i, (low, high, step, _) in zip(at, self.grid, strict=True)
        )
        return [*n, group, group + 1, first, last, *(end for span in spatial for end in span)]


@cached
def _share(problem: ConvProblem, unit: Unit) -> _Staged:
    """Prepare a unit's tables once: a service sees the same shapes again and again."""
    return _Staged(problem, unit.part)


class ForwardAmx(ForwardTiles):
    """A forward operation from tile products of bf16."""

    def refuse(self, problem: ConvProblem) -> str | None:
        """Take what fills tiles well enough to be faster than register tiles."""
        if problem.op != self.op:
            return f"computes {self.op} only"
        plan = layout(problem)
        if plan is None:
            return "too many taps, phases, or zeros between pixels"
        if 2 * plan.parts * plan.block_bytes > SUMS.weights_bytes:
            return "the weights of a few channels take too much room"
        ratio = plan.cycles / max(1.0, way_cycles(problem))
        if ratio > MOST_CYCLES and not target().imitated:
            return f"register tiles would do it in {1 / ratio:.0%} of the time"
        return None

    def speed(self, problem: ConvProblem) -> int:
        """Return the estimated speed, as a multiple of that on register tiles."""
        return SPEED // PARTS[problem.dtype] or 1

    def grid(self, problem: ConvProblem) -> tuple[Sequence[int], Sequence[int]]:
        """Return the sizes of the grid that units are cut from, and its steps."""
        plan, dims = layout(problem), problem.dims
        assert plan is not None
        n, *steps = plan.steps
        return (problem.n, dims.groups, dims.dst_channels, *dims.dst), (n, 1, LANES, *steps)

    def run(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> bool:  # fmt: skip
        """Compute the dst box of one unit."""
        return not stop() and _share(problem, unit).run(inputs, output, stop)


FORWARD_AMX = (
    ForwardAmx(f"conv_transpose_{target().dots}", "ConvTranspose"),
    ForwardAmx(f"convolution_{target().dots}", "Convolution"),
)
