"""Who is the vector and who the scalar in a weight gradient, and an estimate of the cycles of each choice."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from kernels.costs import COSTS
from kernels.emit.brgemm import ROWS
from kernels.emit.compiler import Records
from kernels.gradient.geometry import Axis, Geometry, Tensor
from kernels.gradient.tiles.records import Block
from kernels.gradient.tiles.tables import MERGED_TAPS
from kernels.problem import ConvProblem
from kernels.target import target

__all__ = ["Roles", "Sum", "channel_blocks", "lane_blocks", "lines_cost", "merges", "role_costs", "tile_rows"]


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Who is the vector and who the scalar, and how both are read."""

    geo: Geometry
    vector_is_wide: bool
    channels: int  # of the scalar tensor, and taps: each pair is an accumulator row
    taps: int
    tap_step: int  # accumulator rows from one tap to the next, and from one channel to the next
    channel_step: int
    lanes_are_groups: bool = False
    in_place: bool = False  # the vector tensor is its own panel
    scalars_in_place: bool = False
    merged: bool = False  # taps of a kernel line share register tiles
    direct: bool = False  # lanes are groups, and both tensors are read where they lie

    @property
    def axes(self) -> tuple[Axis, Axis, Axis, Axis]:
        """The axes (n, d, h, w)."""
        return self.geo.axes

    @property
    def lane_tensor(self) -> Tensor:
        """The tensor whose channels, or groups, are lanes."""
        return self.geo.wide if self.vector_is_wide else self.geo.narrow

    @property
    def row_tensor(self) -> Tensor:
        """The tensor whose channels and taps are accumulator rows."""
        return self.geo.narrow if self.vector_is_wide else self.geo.wide


@dataclass(frozen=True, kw_only=True)
class Sum(Roles):
    """What units are cut from, however products are formed: accumulators, and slabs of pixels."""

    groups: int  # convolution groups, or groups of lanes of them
    blocks: Records  # of lanes
    rows: int  # accumulator rows of a group
    lanes: int
    slabs: Records  # narrow positions that are packed at a time
    chunks: int


def tile_rows(count: int, vectors: int) -> int:
    """Return the rows of the tallest tile: no more than 8, which fill lines of scalars, unless `count` asks for it."""
    most = ROWS["f32"][vectors]
    return most if count % most == 0 or count < most else min(8, most)


def channel_blocks(channels: int, lanes: int) -> Records:
    """Cut channels into blocks of at most `lanes`."""
    firsts = np.arange(0, channels, lanes)
    blocks = np.zeros(len(firsts), Block.dtype)
    blocks["first"] = blocks["lane"] = firsts
    blocks["valid"] = np.minimum(lanes, channels - firsts)
    blocks["vectors"] = lanes // target().lanes
    return blocks


def lane_blocks(channels: int) -> Records:
    """Cut channels into lines of two vectors, the last of one if it can."""
    width = target().lanes
    blocks = channel_blocks(channels, 2 * width)
    blocks["vectors"][blocks["valid"] <= width] = 1
    return blocks


def role_costs(problem: ConvProblem, geo: Geometry) -> dict[str, float]:
    """Estimate the cycles of one pixel of one group: with narrow or wide channels as lanes, or groups."""
    wide, narrow, width = geo.wide, geo.narrow, len(geo.axes[3].shifts)
    return {
        "narrow": lines_cost(narrow.channels, wide.channels, width, merges(geo)),
        "wide": lines_cost(wide.channels, narrow.channels, width, False),
        "groups": _groups_cost(problem, wide, narrow, width),
    }


def merges(geo: Geometry) -> bool:
    """Whether taps of a kernel line share tiles where wide channels, few of them, are rows: all at one step."""
    shifts, channels = geo.axes[3].shifts, geo.wide.channels
    return 1 < len(shifts) <= MERGED_TAPS and channels < 4 and (channels == 1 or shifts[1] - shifts[0] == 1)


def lines_cost(vector_channels: int, scalar_channels: int, kernel_width: int, merged: bool) -> float:
    """Return the cycles for one pixel and all taps of one (d, h)."""
    total = 0.0
    whole, rest = divmod(vector_channels, 2 * target().lanes)
    twos = whole + (rest > target().lanes)
    count, times = (scalar_channels * kernel_width, 1) if merged else (scalar_channels, kernel_width)
    for vectors, blocks in ((2, twos), (1, whole + (rest > 0) - twos)):
        tiles = ceil(count / tile_rows(count, vectors))
        # two multiply-adds a cycle
        total += blocks * times * (max(count * vectors / 2, tiles * COSTS.latency) + tiles * COSTS.tile)
    return round(total, 6)  # equal costs are equal


def _groups_cost(problem: ConvProblem, wide: Tensor, narrow: Tensor, kernel_width: int) -> float:
    """Return the cycles for one pixel of one group where lanes are groups."""
    filled = problem.groups / (ceil(problem.groups / target().lanes) * target().lanes)
    return COSTS.grouped * kernel_width * wide.channels * narrow.channels / target().lanes / filled
