"""Units of forward operations on products of bf16: which cells of dst pixels, and when they are worth it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, product
from math import ceil, prod
from typing import Any

import numpy as np

from kernels.blocks import STEPS, SUMS
from kernels.cache import cached
from kernels.emit.compiler import row_of
from kernels.emit.dots import PARTS, STEP, TILE, dot_table
from kernels.forward.cells.driver import SPARE, bring_weights, compute_cells
from kernels.forward.cells.records import CellShare
from kernels.forward.cells.schedule import LANES, ROW_BYTES, forward_schedule
from kernels.forward.share import Share, share
from kernels.forward.tiles import ForwardTiles, way_cycles
from kernels.pack.lines import SPLIT_BYTES
from kernels.pack.pairs import weight_boxes
from kernels.plan import Stop, Storage, Unit
from kernels.problem import ConvProblem
from kernels.target import target

__all__ = ["FWD_DOTS"]

PIXEL_MACS = 32
"""Multiply-adds that take as long as writing a value of dst, and what is packed for it."""

MOST_CYCLES = 0.9
"""Of the estimate over that of register tiles."""

SPEED = 4
"""Times as much work of bf16 makes a unit worth its message as on register tiles."""


class _Cells(Share):
    """Some groups, pairs of blocks of dst channels, and cells."""

    def __init__(self, problem: ConvProblem, part: Sequence[int]) -> None:
        super().__init__(problem, part)
        plan, dims = forward_schedule(problem), self.dims
        assert plan is not None
        self.plan = plan
        self.firsts = [low // step for (low, _), step in zip(self.spans, plan.steps, strict=True)]
        ends = [ceil(high / step) for (_, high), step in zip(self.spans, plan.steps, strict=True)]
        self.counts = [end - first for first, end in zip(self.firsts, ends, strict=True)]
        self.cells = prod(self.counts)
        values = problem.groups * problem.n * dims.dst_channels * prod(dims.dst)
        each = problem.macs // max(1, values) + PIXEL_MACS
        work = LANES * prod(plan.steps) * each  # of a cell and a pair of blocks
        pairs = max(1, min(SUMS.weights_bytes // (2 * plan.parts * plan.block_bytes), STEPS.cell_macs // work))
        low, high = self.channels
        self.cuts = [
            (g, c, min(high, c + pairs * LANES))
            for g, c in product(range(self.g1 - self.g0), range(low, high, pairs * LANES))
        ]
        widest = max(ceil((last - first) / TILE) for _, first, last in self.cuts)
        self.floats["panels"] = plan.parts * widest * plan.block_bytes // 4
        rows = prod(plan.segments) * plan.parts * plan.depth * plan.positions
        self.floats["source"] = (rows + SPARE) * ROW_BYTES // 4 + SPARE
        self.floats["products"] = SPLIT_BYTES // 4
        self.floats["sums"] = (plan.rows + 2 * TILE + prod(plan.steps)) * LANES
        self.taps = weight_boxes(problem, np.array(plan.taps), np.arange(len(plan.taps)) * STEP * plan.depth, STEP)
        self.batch = max(1, STEPS.band_batch_macs // (work * ceil((high - low) / LANES)))
        self.share = row_of(
            CellShare,
            kind=self.kind,
            parts=plan.parts,
            channels=dims.src_channels,
            depth=plan.depth,
            positions=plan.positions,
            rows=plan.rows,
            block_bytes=plan.block_bytes,
            n=problem.n,
            images=plan.steps[0],
            segments=plan.segments,
            pitches=plan.pitches,
            strides=(1, 1, 1) if dims.gathers else dims.strides,
            src_strides=self.src_strides,
            first=self.firsts,
            counts=self.counts,
        )
        self.parts = [self.one_pass(group, 1, last - first, first) for group, first, last in self.cuts]

    def run(self, inputs: Sequence[Storage], output: Storage, stop: Stop) -> bool:
        """Compute pass by pass and cell by cell, and then what did not do here, in the same scratch memory."""
        plan = self.plan
        others: list[list[int]] = []
        call = self.call(inputs, output)
        for (group, first, last), part in zip(self.cuts, self.parts, strict=True):
            blocks = ceil((last - first) / TILE)
            odd = np.zeros(TILE * blocks, np.int64)
            bring_weights(self.share, part, call, self.taps, odd)
            if odd.any():  # lanes behind the last channel may hold it once more
                edges = first + np.flatnonzero(np.diff(odd[: last - first], prepend=0, append=0))
                others += [
                    [*self.spans[0], self.g0 + group, self.g0 + group + 1, *run, *chain(*self.spans[1:])]
                    for run in edges.reshape(-1, 2).tolist()
                ]
            for cell in range(0, self.cells, self.batch):
                if stop():
                    return False
                failed = np.empty((min(self.batch, self.cells - cell), ceil(blocks / 2)), np.int64)
                compute_cells(dot_table(), self.share, part, call, plan.tables, cell, failed)
                for item, pair in np.argwhere(failed).tolist() if failed.any() else ():
                    low = first + LANES * pair
                    others.append(self._box(cell + item, self.g0 + group, low, min(last, low + LANES)))
        return all(share(self.problem, "gather", part).run(inputs, output, stop) for part in others)

    def _box(self, item: int, group: int, first: int, last: int) -> list[int]:
        """Return a cell's part of dst, as `kernels.forward.share` takes it."""
        n, *at = np.add(np.unravel_index(item, self.counts), self.firsts).tolist()
        images, size = self.plan.steps[0], self.problem.n
        part = [n * images, min(size, (n + 1) * images), group, group + 1, first, last]
        tables: Sequence[Any] = self.plan.tables[:3]
        for table, index in zip(tables, at, strict=True):
            low, positions = table[["dst", "count"]][index].tolist()
            part += [low, low + positions]
        return part


@cached
def _cells(problem: ConvProblem, unit: Unit) -> _Cells:
    """Prepare a unit's tables once: a service sees the same shapes again and again."""
    return _Cells(problem, unit.part)


class ForwardDots(ForwardTiles):
    """A forward operation from products of bf16."""

    def refuse(self, problem: ConvProblem) -> str | None:
        """Take what fills tiles well enough to be faster than register tiles."""
        if problem.op != self.op:
            return f"computes {self.op} only"
        plan = forward_schedule(problem)
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
        plan = forward_schedule(problem)
        assert plan is not None
        n, *steps = plan.steps
        dims = problem.dims
        return (problem.n, dims.groups, dims.dst_channels, *dims.dst), (n, 1, LANES, *steps)

    def run(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> bool:  # fmt: skip
        """Compute the dst box of one unit."""
        if stop():
            return False
        forward_schedule(problem)
        return not stop() and _cells(problem, unit).run(inputs, output, stop)


FWD_DOTS = (
    ForwardDots(f"conv_transpose_{target().dots}", "ConvTranspose"),
    ForwardDots(f"convolution_{target().dots}", "Convolution"),
)
