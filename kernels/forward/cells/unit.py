"""Units of ConvTranspose on AMX: which cells of dst pixels, and when products of bf16 are worth it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, product
from math import ceil, prod

import numpy as np

from kernels.arena import arena_address
from kernels.cache import cached
from kernels.emit.dots import STEP, TILE, dot_table
from kernels.forward.cells.driver import SPARE, bring_weights, clear_odd, compute_cells
from kernels.forward.cells.schedule import LANES, ROW, forward_schedule
from kernels.forward.classes import Ints
from kernels.forward.share import STEP_MACS, WEIGHTS_BYTES, Share, place, share
from kernels.forward.tiles import ConvTranspose, way_cycles
from kernels.pack.split import SPLIT_BYTES
from kernels.plan import Stop, Storage, Unit
from kernels.problem import ConvProblem, storage_dtype
from kernels.target import target

__all__ = ["FWD_DOTS"]

CELL_MACS = 1 << 30
"""Work of a cell in one pass of weights at the most: some milliseconds, after which a worker looks whether to stop."""

PIXEL_MACS = 32
"""Multiply-adds that take as long as writing a value of dst, and what is packed for it."""

MOST_CYCLES = 0.9
"""Of the estimate over that of register tiles."""


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
            bring_weights(plan.parts, whole, shape, taps, weights_steps, panels, scratch)
            odd = np.zeros(TILE * blocks, np.int64)
            clear_odd(plan.parts, shape, panels, odd)
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
