"""One unit's share of a ConvTranspose, as the tables that the compiled loops read: made once, used for every call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import ceil, prod
from typing import Literal

import numpy as np

from kernels.arena import arena
from kernels.emit.intrinsics import SEGMENT
from kernels.emit.tile_table import LANE_ROWS, tile_table
from kernels.forward.classes import Ints, Only, class_tables, tap_numbers, tap_runs, tap_steps
from kernels.forward.gather import gather, pack_weights
from kernels.forward.scatter import pack_columns, scatter
from kernels.pack.panels import KINDS
from kernels.plan import Stop, Storage
from kernels.problem import ConvProblem, storage_dtype, wrapped
from kernels.target import target

__all__ = ["LANES", "STEP_MACS", "WEIGHTS_BYTES", "Share", "Way", "place", "share"]

Way = Literal["gather", "lanes", "scatter"]
Span = tuple[int, int]

STEP_MACS = 100_000_000
"""Work between two looks at whether to stop."""

SUMS_BYTES = 128 << 10
"""Sums of one band of dst pixels at the most: a part of L2."""

BAND_BYTES = 192 << 10
"""Src of one band, as long as it has enough pixels."""

BAND_PIXELS = 512
"""Dst pixels that make up for reading large weights once more; small ones stay in L2."""

SOURCE_BYTES = 8 << 20
"""Packed src of one band at the most; where taps reach farther it is packed tap by tap."""

WEIGHTS_BYTES = 24 << 20
"""Packed weights of one pass; more dst channels are done one part after another."""

FEW_CHANNELS = 32
"""Src channels below which it pays to let taps and channels be one run."""

WIDTH = target().lanes
LANES = 2 * WIDTH


class Share(ABC):
    """Some images, groups, dst channels and dst positions: what every way of computing them needs."""

    def __init__(self, problem: ConvProblem, way: Way, part: Sequence[int]) -> None:
        self.problem, self.dims = problem, problem.dims
        self.spans = [(low, high) for low, high in zip(part[::2], part[1::2], strict=True)]
        (self.g0, self.g1), self.channels = self.spans[1:3]
        self.kind = KINDS[problem.dtype]
        self.lanewise = way == "lanes"
        dims, size = self.dims, storage_dtype(problem.dtype).itemsize
        self.strides = [min(stride, max(1, wide)) for stride, wide in zip(dims.strides, dims.wide, strict=True)]

        # groups of one unit are counted from its first; where groups are lanes, WIDTH of them are one
        each = WIDTH if self.lanewise else 1
        self.groups_left = dims.groups - self.g0 * each

        def operand(group: int, *rest: int) -> Ints:
            return wrapped([size * step for step in (self.g0 * each * group, 0, each * group, *rest)])

        def data(channels: int, inside: int, spatial: tuple[int, int, int]) -> Ints:
            *steps, channel = _steps(problem.data_format, channels, spatial)
            return operand(inside * channel, *steps, inside * channel if self.lanewise else channel, channel)

        group, wide, narrow, tap = problem.weights_strides
        out = dims.wide_channels
        self.weights = operand(group, group if self.lanewise else wide, wide, narrow, tap)
        self.bias = operand(out, out if self.lanewise else 1, 1)
        self.src = data(problem.src_channels, dims.narrow_channels, dims.narrow)
        self.dst = data(problem.dst_channels, out, dims.wide)
        self.near = bool(self.src[8] == size)  # a pixel's channels follow each other

    def shape(self, tap_step: Sequence[int], src_step: Sequence[int]) -> Ints:
        """Give the numbers that `kernels.forward.gather` calls shape."""
        return np.array([self.dims.narrow_channels, *self.dims.kernel, *tap_step, *src_step, *self.strides], np.int64)

    @abstractmethod
    def run(self, inputs: Sequence[Storage], output: Storage, stop: Stop) -> bool:
        """Compute the share; False when `stop` said so."""


class _Gather(Share):
    """Every dst pixel gathers its taps; lanes are dst channels or groups."""

    def __init__(self, problem: ConvProblem, way: Way, part: Sequence[int]) -> None:
        super().__init__(problem, way, part)
        dims, channels = self.dims, self.dims.narrow_channels
        steps = [tap_steps(dims, axis) for axis in range(3)]
        joined = channels < FEW_CHANNELS and steps[2][0] > 1
        numbers = [tap_numbers(dims, axis, joined and axis == 2) for axis in range(3)]
        d, h, w = np.ix_(*numbers)
        self.numbers = ((d * dims.kernel[1] + h) * dims.kernel[2] + w).reshape(-1)
        self.backwards = not joined
        tap_step = [1 if joined and axis == 2 else step for axis, (step, _) in enumerate(steps)]
        self.sizes = self.shape(tap_step, [step for _, step in steps])
        self.limits = np.array([LANE_ROWS, target().rows[1], target().rows[2]], np.int64)

        line = 4 * channels * (WIDTH if self.lanewise else 1)
        whole = self.near and problem.dtype == "f32"
        if self.lanewise:
            self.packed = not (whole and channels == 1 and dims.groups % WIDTH == 0)
        else:
            self.packed = not (whole and (dims.groups == 1 or channels >= FEW_CHANNELS))
        self.panel = (len(self.numbers) * channels + 1) * LANES
        pixels = self._band_pixels(line, self.g1 - self.g0)
        self.grid = self._grid(pixels, [self.spans[0], *self.spans[3:]])
        # the order of sums may not depend on how they are shared out
        every = self._grid(self._band_pixels(line, dims.groups), [(0, size) for size in (dims.n, *dims.wide)])
        self.apart = self.packed and 4 * self._points(every, line) > SOURCE_BYTES
        tall = LANE_ROWS if self.lanewise else target().rows[1 if dims.wide_channels <= WIDTH else 2]
        self.together = self.lanewise and not self.packed and dims.wide_channels == 1 and len(self.numbers) <= SEGMENT
        only: Only | None = "taps" if self.apart else "classes" if self.together else None
        self.tables = class_tables(dims, numbers, channels, tall, only)
        points = pixels * (line // 4 + 8) if self.apart else self._points(self.grid, line)
        self.source_floats = points if self.packed else 0
        self.bands = prod(ceil((high - low) / step) for low, high, step in self.grid.reshape(4, 3).tolist())
        self.passes = list(self._passes())
        units = (self.g1 - self.g0) * prod(high - low for low, high in (self.spans[0], *self.spans[2:]))
        whole_work = dims.groups * dims.n * dims.wide_channels * prod(dims.wide)
        macs = problem.macs * units * (WIDTH if self.lanewise else 1) // max(1, whole_work)
        self.batch = max(1, STEP_MACS * self.bands * len(self.passes) // max(1, macs))

    def _band_pixels(self, line: int, groups: int) -> int:
        """Give the dst pixels of a band: their src should stay in L2 while all lanes read it, their sums too."""
        dims = self.dims
        weights = 4 * self.panel * ceil(dims.wide_channels / LANES) * groups
        near = max(line, 4 * self.problem.src_channels) if self.near else line
        pixels = BAND_BYTES * prod(dims.wide) // max(1, near * prod(dims.narrow))
        least = BAND_PIXELS if weights > BAND_BYTES else BAND_PIXELS // 8
        return min(max(least, pixels), SUMS_BYTES // (4 * LANES))

    def _points(self, grid: Ints, line: int) -> int:
        """Count the f32 of src that the taps of a band reach; packed lines are rounded up to whole vectors."""
        reach = [int(grid[2])]
        for axis, src_step in enumerate(self.sizes[7:10].tolist()):
            span = int(grid[3 * axis + 5]) // self.strides[axis] + 1 + src_step * (self.dims.kernel[axis] - 1)
            reach.append(min(self.dims.narrow[axis], span))
        return prod(reach) * (line // 4 + 8)

    def _grid(self, pixels: int, spans: Sequence[Span]) -> Ints:
        """Cut the dst positions into bands: whole lines where they are short, several images where those are small."""
        grid: list[int] = []
        for low, high in reversed(spans):
            parts = ceil((high - low) / max(1, pixels))
            step = max(1, ceil((high - low) / max(1, parts)))
            grid[:0] = low, high, step
            pixels //= step
        return np.array(grid, np.int64)

    def _passes(self) -> Iterator[tuple[int, int, Ints]]:
        """Cut the share so that the packed weights of a pass have room: first and last group, and blocks of lanes."""
        low, high = self.channels
        # with one band every weight is read once, and soon: let it be while it is in a cache
        limit = WEIGHTS_BYTES if self.bands > 1 else WEIGHTS_BYTES // 8
        firsts = np.arange(low, high, 1 if self.lanewise else LANES)
        valid = np.full(len(firsts), WIDTH) if self.lanewise else np.minimum(LANES, high - firsts)
        blocks = np.column_stack([firsts, valid, 1 + (valid > WIDTH)])
        room = max(1, limit // (4 * self.panel))
        groups = max(1, room // max(1, len(blocks)))
        for g in range(0, self.g1 - self.g0, groups):
            for b in range(0, len(blocks), room):
                yield g, min(self.g1 - self.g0, g + groups), blocks[b : b + room]

    def run(self, inputs: Sequence[Storage], output: Storage, stop: Stop) -> bool:
        """Compute pass by pass and band by band."""
        most = max((g1 - g0) * len(blocks) for g0, g1, blocks in self.passes)
        panels = arena("weights", most * self.panel).ctypes.data
        scratch = arena("source", self.source_floats).ctypes.data
        sums = arena("sums", SUMS_BYTES // 4).ctypes.data
        for g0, g1, blocks in self.passes:
            src, weights, bias, dst = place(self, inputs, output, g0)
            left = self.groups_left - g0 * WIDTH
            pack_weights(
                self.kind, self.lanewise, g1 - g0, left, self.sizes, blocks, self.numbers, self.backwards, weights,
                bias, panels, 4 * self.panel,
            )  # fmt: skip
            for band in range(0, self.bands, self.batch):
                if stop():
                    return False
                gather(
                    tile_table(), self.limits, self.kind, self.lanewise, left, band,
                    min(self.bands, band + self.batch), self.grid, self.sizes, *self.tables, blocks, g1 - g0, panels,
                    4 * self.panel, self.packed, self.apart, self.together, src, dst, scratch, sums,
                )  # fmt: skip
        return True


class _Scatter(Share):
    """Products of src pixels with all taps, added to the dst pixels that they belong to."""

    def __init__(self, problem: ConvProblem, way: Way, part: Sequence[int]) -> None:
        super().__init__(problem, way, part)
        dims, channels = self.dims, self.dims.narrow_channels
        d, h, w = (tap_runs(dims, axis, np.arange(dims.kernel[axis])) for axis in range(3))
        self.tables = d, h, w
        self.sizes = self.shape((1, 1, 1), (0, 0, 0))
        self.span = np.array([self.spans[0], *self.spans[3:]], np.int64).reshape(-1)
        reach: list[Span] = [self.spans[0]]
        for table, span, stride in zip(self.tables, self.spans[3:], self.strides, strict=True):
            reach.append(_reach(table, span, stride))
        self.reach = np.array(reach, np.int64).reshape(-1)
        self.packed = not (self.near and problem.dtype == "f32")
        lanes = prod(dims.kernel) * dims.wide_channels
        self.used = ceil(lanes / LANES)
        self.line = 4 * LANES * (self.used + 1)
        width = reach[3][1] - reach[3][0]
        height, depth = max(1, reach[2][1] - reach[2][0]), max(1, reach[1][1] - reach[1][0])
        macs = max(1, width * lanes * channels)
        floats = max(1, width * (channels + 8))
        self.lines = max(1, min(height, STEP_MACS // macs, SOURCE_BYTES // (4 * floats)))
        self.source_floats = self.lines * floats if self.packed else 0
        self.sums_floats = prod(high - low for low, high in self.spans[3:]) * dims.wide_channels
        self.items = (self.spans[0][1] - self.spans[0][0]) * (self.g1 - self.g0) * depth * ceil(height / self.lines)
        self.batch = max(1, STEP_MACS // (macs * self.lines))

    def run(self, inputs: Sequence[Storage], output: Storage, stop: Stop) -> bool:
        """Compute some src lines after the other."""
        out, groups, rows = self.dims.wide_channels, self.g1 - self.g0, target().rows[2]
        panels = arena("weights", groups * self.dims.narrow_channels * self.line // 4).ctypes.data
        scratch = arena("source", self.source_floats).ctypes.data
        products = arena("products", rows * self.used * LANES).ctypes.data
        sums = arena("sums", self.sums_floats).ctypes.data
        src, weights, bias, dst = place(self, inputs, output, 0)
        pack_columns(self.kind, groups, self.sizes, out, weights, panels, self.line)
        for item in range(0, self.items, self.batch):
            if stop():
                return False
            scatter(
                tile_table()[2], rows, self.kind, item, min(self.items, item + self.batch), self.lines, self.span,
                self.reach, self.sizes, *self.tables, self.dims.dilations[2] == 1, groups, out, bias, panels,
                self.line, self.packed, src, dst, scratch, products, sums,
            )  # fmt: skip
        return True


def _reach(table: Ints, span: Span, stride: int) -> Span:
    """Give the src positions of an axis that meet some of the dst positions of a span."""
    first = np.maximum(0, -((table[:, 2] - span[0]) // stride))
    last = np.minimum(table[:, 3], -((table[:, 2] - span[1]) // stride))
    met = first < last
    if not met.any():
        return 0, 0
    return int((table[:, 4] + first)[met].min()), int((table[:, 4] + last)[met].max())


def _steps(data_format: str, channels: int, spatial: tuple[int, int, int]) -> tuple[int, int, int, int, int]:
    """Give the element steps of (n, d, h, w, channel) of a data tensor."""
    d, h, w = spatial
    if data_format == "NCX":
        return channels * d * h * w, h * w, w, 1, d * h * w
    return d * h * w * channels, h * w * channels, w * channels, channels, 1


def place(share: Share, inputs: Sequence[Storage], output: Storage, first_group: int) -> list[Ints]:
    """Give src, weights, bias and dst with the addresses of a call in them, counted from a group of the share."""
    bias = inputs[2] if len(inputs) > 2 else None
    placed = []
    arrays = (inputs[0], inputs[1], bias, output)
    for operand, array in zip((share.src, share.weights, share.bias, share.dst), arrays, strict=True):
        place = operand.copy()
        placed.append(place)
        if array is None:
            place[0] = 0
            continue
        address = array.ctypes.data
        place[0] += address + first_group * place[2]
        place[1] = address + array.nbytes
    return placed


def share(problem: ConvProblem, way: Way, part: Sequence[int]) -> Share:
    """Prepare a unit's share."""
    return (_Scatter if way == "scatter" else _Gather)(problem, way, part)
