"""The layout of a forward operation made of bf16 products: cells of dst pixels, phases, segments, taps as shifts.

A cell is a box of dst positions, and a panel holds the src positions that it meets, one row of memory each, zeros where
they are outside. ConvTranspose: the dst positions ``u`` of an axis that agree in ``(u + pad) % stride`` are a phase:
they meet the same taps, and the next one of them meets each tap one src position further. Convolution: all dst
positions are one phase, and the src positions ``x`` that agree in ``x % stride`` are a segment of the panel, where the
next dst position meets a tap one row further. So a tap is one shift for all positions of a phase, which are one row in
the panel's pitches, lines and planes with a gap between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import ceil, prod

import numpy as np
import numpy.typing as npt

from kernels.blocks import SUMS
from kernels.cache import cached
from kernels.emit.compiler import Records
from kernels.emit.dots import PARTS, PRODUCTS, ROWS, STEP, TILE
from kernels.forward.cells.records import CellLine, CellPhase, CellTables
from kernels.problem import ConvProblem, Dims

__all__ = ["LANES", "ROW_BYTES", "ForwardSchedule", "forward_schedule"]

Ints = npt.NDArray[np.int64]

LANES = 2 * TILE
"""Dst channels that are computed together: what four tile registers hold of 32 pixels."""

ROW_BYTES = 2 * STEP
"""Bytes of a row of a tile with AMX: 32 channels of a src position, 16 dst channels of two src channels, or 16 sums."""

PRODUCT_CYCLES, VALUE_CYCLES = 26.0, 1.5
"""What a product of two tiles takes with its loads, and packing a value."""

GROUP_CYCLES = 40_000.0
"""What each group after the first costs: it is a pass of its own."""

MOST_TAPS, MOST_PHASES, MOST_CELLS = 1 << 12, 1 << 10, 1 << 20
"""Beyond these laying them out takes too long."""


@dataclass(frozen=True)
class _Line:
    """One axis in cells of `step` dst positions; phases are (first dst position in a cell, taps, their places).

    A place is a segment and a shift in it. `cells` has those of one segment after those of the one before.
    """

    step: int
    pitch: int
    stride: int
    phases: tuple[tuple[int, tuple[int, ...], tuple[tuple[int, int], ...]], ...]
    segments: int
    cells: Records

    def count(self, first: int) -> int:
        """Count a phase's positions in a whole cell."""
        return ceil((self.step - first) / self.stride)


def _cut(dims: Dims, parts: int, depth: int) -> tuple[list[int], list[_Line]] | None:
    """Choose the images and dst positions of a cell, as many as have room, and lay its axes out.

    None for too many cells, segments or zeros, or nothing to sum.
    """
    shape = [1, *dims.dst]

    def lay() -> list[_Line] | None:
        if prod(ceil(size / step) for size, step in zip(dims.dst, shape[1:], strict=True)) > MOST_CELLS:
            return None
        found = [_line(dims, axis, shape[1 + axis]) for axis in range(3)]
        lines = [line for line in found if line is not None]
        return lines if len(lines) == 3 and prod(line.segments for line in lines) <= MOST_PHASES else None

    def panel(lines: list[_Line]) -> int:
        return parts * depth * ROW_BYTES * shape[0] * prod(line.segments * line.pitch for line in lines)

    def fits(lines: list[_Line]) -> bool:
        return panel(lines) <= SUMS.panel_bytes and prod(shape) <= SUMS.cell_pixels

    lines = lay()
    for axis in range(3):
        stride = 1 if dims.gathers else dims.strides[axis]
        least = stride * (1 if axis < 2 else SUMS.line_positions)
        while lines is not None and not fits(lines) and shape[1 + axis] > least:
            shape[1 + axis] = min(dims.dst[axis], stride * ceil(ceil(shape[1 + axis] / 2) / stride))
            lines = lay()
    if lines is None or panel(lines) > SUMS.most_panel_bytes:
        return None
    while shape[1:] == list(dims.dst) and 2 * shape[0] <= dims.n:
        shape[0] *= 2
        if not fits(lines):
            shape[0] //= 2
            break
    return shape, lines


def _line(dims: Dims, axis: int, step: int) -> _Line | None:
    """Lay out an axis; None where no tap meets anything."""
    ranges = [dims.tap_range(axis, k) for k in range(dims.kernel[axis])]
    live = [k for k, (low, high) in enumerate(ranges) if low < high]
    return (_segmented if dims.gathers else _phased)(dims, axis, step, live)


def _phased(dims: Dims, axis: int, step: int, live: list[int]) -> _Line | None:
    """Lay out an axis of ConvTranspose."""
    size, src = dims.dst[axis], dims.src[axis]
    stride, dilation, pad = dims.strides[axis], dims.dilations[axis], dims.pads[axis]
    found: dict[int, tuple[int, list[int], list[int]]] = {}
    for tap in live:
        phase = tap * dilation % stride
        start = -((phase - pad) // stride)
        first = stride * start + phase - pad
        if first < step:
            _, taps, places = found.setdefault(phase, (first, [], []))
            taps.append(tap)
            places.append(start - tap * dilation // stride)
    if not found:
        return None
    least = min(min(places) for *_, places in found.values())
    counts = {first: ceil((step - first) / stride) for first, *_ in found.values()}
    pitch = max(max(places) + counts[first] for first, _, places in found.values()) - least
    lows = np.arange(0, size, step)
    cells = _cell_lines(lows, np.minimum(step, size - lows), least + lows // stride, pitch, src, (0, 1))
    phases = tuple(
        (first, tuple(taps), tuple((0, at - least) for at in places)) for first, taps, places in found.values()
    )
    return _Line(step, pitch, stride, phases, 1, cells)


def _segmented(dims: Dims, axis: int, step: int, live: list[int]) -> _Line | None:
    """Lay out an axis of Convolution."""
    size, src = dims.dst[axis], dims.src[axis]
    stride, dilation, pad = dims.strides[axis], dims.dilations[axis], dims.pads[axis]
    shifts = [divmod(tap * dilation - pad, stride) for tap in live]
    residues = sorted({residue for _, residue in shifts})
    if not residues:
        return None
    least = {residue: min(at for at, other in shifts if other == residue) for residue in residues}
    pitch = max(at - least[residue] for at, residue in shifts) + step
    lows = np.arange(0, size, step)
    counts = np.minimum(step, size - lows)
    cells = [
        _cell_lines(lows, counts, least[residue] + lows, pitch, ceil((src - residue) / stride), (residue, stride))
        for residue in residues
    ]
    places = tuple((residues.index(residue), at - least[residue]) for at, residue in shifts)
    return _Line(step, pitch, 1, ((0, tuple(live), places),), len(residues), np.concatenate(cells))


def _cell_lines(lows: Ints, counts: Ints, starts: Ints, pitch: int, positions: int, src: tuple[int, int]) -> Records:
    """Return the cells of an axis and a segment, which has so many `positions`; `src` is where it starts and its step.

    A cell's panel begins with the position `starts`, which may be outside.
    """
    begins, ends = np.maximum(0, starts), np.minimum(positions, starts + pitch)
    met = np.maximum(0, ends - begins)
    cells = np.empty(len(lows), CellLine.dtype)
    cells["dst"], cells["count"] = lows, counts
    cells["src"], cells["met"], cells["place"] = np.where(met > 0, src[0] + begins * src[1], 0), met, 0
    cells["place"][met > 0] = (begins - starts)[met > 0]
    return cells


@dataclass(frozen=True)
class ForwardSchedule:
    """Everything that the compiled driver reads.

    `steps` are the images and dst positions of a cell; `taps` are the numbers of the taps, in the order of the phases.
    There are `segments` of the panel along (d, h, w); `pitches` are the positions of one along these axes and
    `positions` all of them. A position has a row of `ROW_BYTES`, so many times (`depth`): tile registers hold 32
    channels. `cycles` is an estimate for all of dst.
    """

    steps: tuple[int, ...]
    segments: tuple[int, ...]
    pitches: tuple[int, ...]
    positions: int
    tables: CellTables
    taps: tuple[int, ...]
    rows: int
    depth: int
    parts: int
    cycles: float

    @property
    def block_bytes(self) -> int:
        """Bytes of one part of 16 dst channels' weights."""
        return TILE * ROW_BYTES * self.depth * len(self.taps)


def _tiles(images: int, counts: list[int], pitches: list[int]) -> int:
    """Count the tiles of a phase in a cell, as lines, planes or one row: whatever takes least."""
    planes = images * counts[0]
    lines, plane = counts[2], (counts[1] - 1) * pitches[2] + counts[2]
    row = ((images - 1) * pitches[0] + counts[0] - 1) * pitches[1] * pitches[2] + plane
    return min(planes * counts[1] * ceil(lines / ROWS), planes * ceil(plane / ROWS), ceil(row / ROWS))


@cached
def forward_schedule(problem: ConvProblem) -> ForwardSchedule | None:
    """Lay out a forward operation; None where it has too many taps, phases or zeros, or nothing to sum."""
    dims, parts = problem.dims, PARTS[problem.dtype]
    strides = (1, 1, 1) if dims.gathers else dims.strides
    if prod(dims.kernel) > MOST_TAPS or prod(strides) > MOST_PHASES or 0 in (*dims.wide, *dims.narrow, dims.n):
        return None
    depth, blocks = ceil(dims.src_channels / STEP), ceil(dims.dst_channels / TILE)
    cut = _cut(dims, parts, depth)
    if cut is None:
        return None
    shape, lines = cut
    cells = ceil(dims.n / shape[0]) * prod(len(line.cells) // line.segments for line in lines)
    if cells > MOST_CELLS:
        return None
    pitches, segments = [line.pitch for line in lines], [line.segments for line in lines]
    positions = shape[0] * prod(pitches)
    segment_bytes = parts * depth * positions * ROW_BYTES
    taps: list[int] = []
    phases, offsets, tiles, work = [], [], 0, 0
    for each in product(*(line.phases for line in lines)):
        counts = [line.count(first) for line, (first, *_) in zip(lines, each, strict=True)]
        mine = list(product(*(numbers for _, numbers, _ in each)))
        phases.append(([first for first, *_ in each], len(taps), len(mine)))
        taps += [(d * dims.kernel[1] + h) * dims.kernel[2] + w for d, h, w in mine]
        for (i, d), (j, h), (k, w) in product(*(places for *_, places in each)):
            segment = (i * segments[1] + j) * segments[2] + k
            offsets.append(segment * segment_bytes + ROW_BYTES * ((d * pitches[1] + h) * pitches[2] + w))
        some = _tiles(shape[0], counts, pitches)
        tiles, work = max(tiles, some), work + some * len(mine)
    packed = prod(segments) * positions
    products = PRODUCT_CYCLES * len(PRODUCTS[parts]) * depth * blocks * work
    tables = CellTables(
        lines[0].cells, lines[1].cells, lines[2].cells, np.array(phases, CellPhase.dtype), np.array(offsets, np.int64)
    )
    return ForwardSchedule(
        steps=tuple(shape),
        segments=tuple(segments),
        pitches=tuple(pitches),
        positions=positions,
        tables=tables,
        taps=tuple(taps),
        rows=ROWS * tiles,
        depth=depth,
        parts=parts,
        cycles=dims.groups * cells * (products + VALUE_CYCLES * STEP * depth * packed)
        + GROUP_CYCLES * (dims.groups - 1),
    )
