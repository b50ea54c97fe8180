"""ConvTranspose on AMX: products of bf16, tile by tile, of src pixels with the weights of each tap.

A tile of src is 16 pixels of a panel by 32 channels, one of weights 32 src channels by 16 dst channels, so nothing is
moved between packing and multiplying: pixels are rows of memory, and a tap is another first row. Values go as sums of
bf16 (`kernels.emit.dots`). The panel's zeros are multiplied; cells of pixels for which that, or a sum of bf16, would
not do are computed on register tiles: where something in src is not finite, or values are so small that AMX would take
them, their parts, or sums of their products as zero, as it does with subnormal numbers (of f16 none is so small: sums
are multiples of 2**-48). So are dst channels whose weights are not finite: the others keep their bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, product
from math import ceil, prod

import numpy as np

from kernels.arena import arena_address
from kernels.cache import cached
from kernels.emit.compiler import Table, Vector, jit
from kernels.emit.dots import BEGIN, BLOCKS, END, SHAPES, STEP, TILE, call_dots, dot_table
from kernels.emit.intrinsics import fill_zero, load_value, store_value
from kernels.forward.cells.schedule import LANES, ROW, forward_schedule
from kernels.forward.classes import Ints
from kernels.forward.gather import load, put_lines, write
from kernels.forward.share import STEP_MACS, WEIGHTS_BYTES, Share, place, share
from kernels.forward.tiles import ConvTranspose, way_cycles
from kernels.pack.halves import split_f16
from kernels.pack.magnitudes import SPECIAL, clear_lane, lane_peaks, magnitudes
from kernels.pack.pairs import pack_pairs, pack_planes
from kernels.pack.split import SPLIT_BYTES
from kernels.plan import Stop, Storage, Unit
from kernels.problem import ConvProblem, storage_dtype
from kernels.target import target

__all__ = ["FWD_DOTS"]

WALK_STEPS = 16
"""Steps that are summed in tile registers: the weights of that many stay in the first cache, or in the second."""

CELL_MACS = 1 << 30
"""Work of a cell in one pass of weights at the most: some milliseconds, after which a worker looks whether to stop."""

PIXEL_MACS = 32
"""Multiply-adds that take as long as writing a value of dst, and what is packed for it."""

MOST_CYCLES = 0.9
"""Of the estimate over that of register tiles."""

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
def _bring_weights(
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
def _clear_odd(parts: int, shape: Vector, panels: int, odd: Vector) -> None:
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


@cached
def _taps(problem: ConvProblem) -> Ints:
    """Give the boxes of the weights: a tap each, or where taps are adjacent, one step of src channels of each."""
    plan = forward_schedule(problem)
    assert plan is not None
    _, _, narrow, tap_step = problem.weights_strides
    channels, size = problem.dims.narrow_channels, storage_dtype(problem.dtype).itemsize
    step = STEP if tap_step < narrow else channels
    firsts, numbers = np.arange(0, channels, step), np.arange(len(plan.taps))
    boxes = np.ones((len(firsts), len(numbers), 6), np.int64)
    boxes[..., 0] = size * (np.array(plan.taps, np.int64) * tap_step + narrow * firsts[:, None])
    boxes[..., 1] = 2 * (numbers * STEP * plan.depth + firsts[:, None])
    boxes[..., 5] = np.minimum(step, channels - firsts)[:, None]
    return boxes.reshape(-1, 6)


class _Cells(Share):
    """Some groups, pairs of blocks of dst channels, and cells."""

    def __init__(self, problem: ConvProblem, part: Sequence[int]) -> None:
        super().__init__(problem, "gather", part)
        plan = forward_schedule(problem)
        assert plan is not None
        self.plan = plan
        spans = [self.spans[0], *self.spans[3:]]
        firsts = [low // step for (low, _), step in zip(spans, plan.steps, strict=True)]
        counts = [ceil(high / step) - first for (_, high), step, first in zip(spans, plan.steps, firsts, strict=True)]
        self.box = np.array([*firsts, *counts], np.int64)
        self.cells = prod(counts)
        values = problem.groups * problem.n * self.dims.wide_channels * prod(self.dims.wide)
        each = problem.macs // max(1, values) + PIXEL_MACS
        work = LANES * prod(plan.steps) * each  # of a cell and a pair of blocks
        pairs = max(1, min(WEIGHTS_BYTES // (2 * plan.parts * plan.block_bytes), CELL_MACS // work))
        low, high = self.channels
        self.passes = [
            (g, c, min(high, c + pairs * LANES))
            for g, c in product(range(self.g1 - self.g0), range(low, high, pairs * LANES))
        ]
        widest = max(ceil((last - first) / TILE) for _, first, last in self.passes)
        self.weights_floats = plan.parts * widest * plan.block_bytes // 4
        self.panel_floats = (plan.parts * plan.depth * plan.positions + SPARE) * ROW // 4
        self.sums_floats = (plan.rows + 2 * TILE + prod(plan.steps)) * LANES
        self.taps = _taps(problem)
        self.sizes = self.dims.narrow_channels, plan.depth, plan.positions, plan.block_bytes, plan.rows
        self.batch = max(1, STEP_MACS // (work * ceil((high - low) / LANES)))

    def run(self, inputs: Sequence[Storage], output: Storage, stop: Stop) -> bool:
        """Compute pass by pass and cell by cell, and then what did not do here, in the same scratch memory."""
        plan, weights_steps = self.plan, np.zeros(5, np.int64)
        others: list[list[int]] = []
        weights_steps[3], weights_steps[4] = self.weights[5], self.weights[4]
        panels = arena_address("weights", self.weights_floats)
        source = arena_address("source", self.panel_floats)
        sums = arena_address("sums", self.sums_floats)
        scratch = arena_address("products", SPLIT_BYTES // 4)
        for group, first, last in self.passes:
            blocks = ceil((last - first) / TILE)
            src, weights, bias, dst = place(self, inputs, output, group)
            for operand in (weights, bias, dst):
                if operand[0]:
                    operand[0] += first * operand[4 if operand is not dst else 8]
            whole = self.dims.narrow_channels % STEP == 0 and (last - first) % TILE == 0
            shape = np.array((*self.sizes[:2], blocks, last - first, *self.sizes[2:]), np.int64)
            taps = self.taps.copy()
            taps[:, 0] += weights[0]
            _bring_weights(plan.parts, whole, shape, taps, weights_steps, panels, scratch)
            odd = np.zeros(TILE * blocks, np.int64)
            _clear_odd(plan.parts, shape, panels, odd)
            edges = first + np.flatnonzero(np.diff(odd, prepend=0, append=0))
            others += [
                [*self.spans[0], self.g0 + group, self.g0 + group + 1, *run, *chain(*self.spans[3:])]
                for run in edges.reshape(-1, 2).tolist()
            ]
            for cell in range(0, self.cells, self.batch):
                if stop():
                    return False
                end = min(self.cells, cell + self.batch)
                failed = np.empty((end - cell, ceil(blocks / 2)), np.int64)
                compute_cells(
                    dot_table(), plan.parts, self.kind, cell, end, self.box, *plan.cells, shape, plan.pitches,
                    plan.strides, plan.phases, plan.offsets, src, dst, bias, panels, source, sums,
                    sums + 4 * LANES * (plan.rows + 2 * TILE), scratch, failed,
                )  # fmt: skip
                for item, pair in np.argwhere(failed).tolist():
                    low = first + LANES * pair
                    others.append(self._box(cell + item, self.g0 + group, low, min(last, low + LANES)))
        return all(share(self.problem, "gather", part).run(inputs, output, stop) for part in others)

    def _box(self, item: int, group: int, first: int, last: int) -> list[int]:
        """Give a cell's part of dst, as `kernels.forward.share` takes it."""
        at = np.unravel_index(item, self.box[4:]) + self.box[:4]
        n, count = self.plan.cells[0][at[0]].tolist()
        part = [n, n + count, group, group + 1, first, last]
        for table, index in zip(self.plan.cells[1:], at[1:], strict=True):
            low, positions = table[index, :2].tolist()
            part += [low, low + positions]
        return part


@cached
def _cells(problem: ConvProblem, unit: Unit) -> _Cells:
    """Prepare a unit's tables once: a service sees the same shapes again and again."""
    return _Cells(problem, unit.part)


class ConvTransposeDots(ConvTranspose):
    """ConvTranspose from products of bf16."""

    name = f"conv_transpose_{target().dots}"

    def refuse(self, problem: ConvProblem) -> str | None:
        """Take what fills tiles well enough to be faster than register tiles."""
        if not problem.forward:
            return "computes ConvTranspose only"
        plan = forward_schedule(problem)
        if plan is None:
            return "too many taps, phases, or zeros between pixels"
        if 2 * plan.parts * plan.block_bytes > WEIGHTS_BYTES:
            return "the weights of a few channels take too much room"
        ratio = plan.cycles / max(1.0, way_cycles(problem))
        if ratio > MOST_CYCLES and not target().imitated:
            return f"register tiles would do it in {1 / ratio:.0%} of the time"
        return None

    def grid(self, problem: ConvProblem) -> tuple[Sequence[int], Sequence[int]]:
        """Give the sizes of what is shared out, and the steps in which it is."""
        plan = forward_schedule(problem)
        assert plan is not None
        n, *steps = plan.steps
        return (problem.n, problem.groups, problem.dims.wide_channels, *problem.dims.wide), (n, 1, LANES, *steps)

    def run(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> bool:  # fmt: skip
        """Compute the dst box of one unit."""
        if stop():
            return False
        forward_schedule(problem)
        return not stop() and _cells(problem, unit).run(inputs, output, stop)


FWD_DOTS = ConvTransposeDots()
