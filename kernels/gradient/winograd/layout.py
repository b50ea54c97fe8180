"""How a Winograd weight gradient is laid out: lanes and scalars, slabs of tiles, and where sums lie.

Everything that decides bits depends on the problem alone, not on the lanes of the target: the same problem has the same
bits on AVX2 and AVX-512.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from kernels.blocks import SUMS
from kernels.cache import cached
from kernels.emit.compiler import Records
from kernels.gradient.geometry import geometry
from kernels.gradient.roles import lane_blocks, role_costs
from kernels.problem import ConvProblem
from kernels.reduction import chunks_of
from kernels.winograd.slabs import cut_slabs, side_of, tiles_of
from kernels.winograd.tiles import GAP, PAIR, PRODUCTS, WIDTH

__all__ = ["Layout", "layout"]


@dataclass(frozen=True)
class Layout:
    """The sum of one depth of the kernel, for each depth, in each group.

    `lanes` and `scalars` are blocks of the `channels` of one group. Each depth has a table of `slabs` and the two
    `sides`, those of the lanes first.
    """

    lanes_are_wide: bool
    channels: tuple[int, int]
    lanes: Records
    scalars: Records
    slabs: tuple[Records, ...]
    sides: tuple[Records, ...]
    chunks: int

    def sums_of(self, lanes: Records) -> int:
        """Count the f32 that are summed of some blocks of lanes."""
        return PRODUCTS * (self.channels[1] + 1) * WIDTH * int(lanes["vectors"].sum())


def _chunks(tiles: int, slabs: int, rows: int, lanes: int) -> int:
    """Choose how many parts of a sum are summed by themselves: more lose fewer digits, and cost passes over sums."""
    return chunks_of(min(slabs, tiles // SUMS.winograd_chunk_tiles, SUMS.winograd_chunked_sums // (rows * lanes)))


@cached
def layout(problem: ConvProblem) -> Layout:
    """Lay the sums out for `problem`, which has broken none of the rules."""
    dims = problem.dims
    costs = role_costs(problem, geometry(problem))
    lanes_are_wide = costs["wide"] < costs["narrow"]
    counts = dims.narrow_channels, dims.wide_channels
    count, rows = counts[::-1] if lanes_are_wide else counts
    lanes, scalars = lane_blocks(count), lane_blocks(rows)
    lanes["acc"] = 4 * PRODUCTS * (rows + 1) * lanes["lane"]
    spans = [dims.tap_range(0, tap) for tap in range(dims.kernel[0])]
    tiles = [(0, ceil(size / 2)) for size in dims.narrow[1:]]
    slabs = tuple(
        cut_slabs([(0, dims.n * (high - low)), *tiles], dims.narrow[1:], SUMS.winograd_tiles) for low, high in spans
    )
    total = max(int(tiles_of(table).sum()) for table in slabs)
    return Layout(
        lanes_are_wide=lanes_are_wide,
        channels=(count, rows),
        lanes=lanes,
        scalars=scalars,
        slabs=slabs,
        sides=tuple(
            np.concatenate(
                [
                    _side(problem, tap, span, np.concatenate(slabs), wide=wide)
                    for wide in (lanes_are_wide, not lanes_are_wide)
                ]
            )
            for tap, span in enumerate(spans)
        ),
        chunks=_chunks(total, min(map(len, slabs)), *counts),
    )


def _side(problem: ConvProblem, tap: int, span: tuple[int, int], slabs: Records, *, wide: bool) -> Records:
    """Return the wide or the narrow tensor at the positions of one depth of the kernel."""
    dims, (low, high) = problem.dims, span
    channels, spatial = (dims.wide_channels, dims.wide) if wide else (dims.narrow_channels, dims.narrow)
    block = PAIR * (int(tiles_of(slabs).max(initial=0)) + 1)
    return side_of(
        problem, channels, spatial, slabs, wide=wide, first=dims.wide_at(0, tap, low) if wide else low,
        step=dims.strides[0] if wide else 1, frames=max(1, high - low), pads=dims.pads[1:] if wide else (0, 0),
        line=PAIR, block=block, plane=block * ceil(channels / (2 * WIDTH)) + GAP,
    )  # fmt: skip
