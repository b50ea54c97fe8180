"""One unit's share of a ConvTranspose, as the tables that the compiled loops read: made once, used for every call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import ceil, prod
from typing import Any, Literal

import numpy as np

from kernels.arena import address, arena_address
from kernels.blocks import STEPS, SUMS
from kernels.emit.compiler import Record, Records, row_of, values_of
from kernels.emit.intrinsics import SEGMENT
from kernels.emit.tile_table import LANE_ROWS, tile_table
from kernels.forward.classes import Ints, Only, class_tables, disjoint, tap_numbers, tap_runs, tap_steps
from kernels.forward.gather import gather, pack_weights
from kernels.forward.records import Bias, Call, Data, Filter, GatherShare, Lanes, Pass, ScatterShare, Shape, Window
from kernels.forward.scatter import pack_columns, scatter
from kernels.pack.panels import KINDS
from kernels.plan import Stop, Storage
from kernels.problem import ConvProblem, storage_dtype, wrapped
from kernels.target import target

__all__ = ["LANES", "Share", "Way", "share"]

Way = Literal["gather", "lanes", "scatter"]
Span = tuple[int, int]
Row = tuple[Any, ...]

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
        strides = [min(stride, max(1, wide)) for stride, wide in zip(dims.strides, dims.wide, strict=True)]
        self.strides, self.src_strides = ([1, 1, 1], strides) if dims.gathers else (strides, [1, 1, 1])

        # groups of one unit are counted from its first; where groups are lanes, WIDTH of them are one
        each = WIDTH if self.lanewise else 1
        self.groups_left = dims.groups - self.g0 * each

        def steps(group: int, *others: int) -> list[int]:
            """Return bytes: to the first group, to the next one, and others."""
            some: list[int] = wrapped(size * step for step in (self.g0 * each * group, each * group, *others)).tolist()
            return some

        def data(shape: Sequence[int], channels: int, inside: int, spatial: tuple[int, int, int]) -> Row:
            *others, channel = _steps(problem.data_format, channels, spatial)
            lane = inside * channel if self.lanewise else channel
            start, group, *strides, lane, channel = steps(inside * channel, *others, lane, channel)
            return values_of(
                Data, start=start, nbytes=size * prod(shape), group=group, strides=strides, lane=lane, channel=channel
            )

        group, wide, narrow, tap = problem.weights_strides
        dst_step, src_step = (narrow, wide) if dims.gathers else (wide, narrow)
        out = dims.dst_channels
        self.src = data(problem.src_shape, problem.src_channels, dims.src_channels, dims.src)
        self.dst = data(problem.output_shape, problem.dst_channels, out, dims.dst)
        names = ("start", "group", "lane", "dst_channel", "src_channel", "tap")
        some = steps(group, group if self.lanewise else dst_step, dst_step, src_step, tap)
        nbytes = size * prod(problem.weights_shape)
        self.weights = values_of(Filter, nbytes=nbytes, **dict(zip(names, some, strict=True)))
        some = steps(out, out if self.lanewise else 1, 1)
        self.bias = values_of(Bias, **dict(zip(names[:4], some, strict=True)))
        self.near = bool(self.src[-1] == size)  # a pixel's channels follow each other

    def shape(self, tap_steps: Sequence[int], src_steps: Sequence[int], packed: bool) -> Row:
        """Return the `Shape` of the share."""
        return values_of(
            Shape,
            kind=self.kind,
            channels=self.dims.src_channels,
            kernel=self.dims.kernel,
            tap_steps=tap_steps,
            src_steps=src_steps,
            strides=self.strides,
            src_strides=self.src_strides,
            lanewise=self.lanewise,
            packed=packed,
        )

    def passes(self, kind: type[Record], groups: Ints, /, **values: Any) -> Records:
        """Return passes that begin at some groups; `values` are their other fields."""
        operands = {"src": self.src, "weights": self.weights, "bias": self.bias, "dst": self.dst}
        passes = np.empty(len(groups), kind.dtype)
        for name, value in (operands | values).items():
            passes[name] = value
        for name in operands:
            passes[name]["start"] += groups * passes[name]["group"]
        return passes

    def tile_passes(self, cuts: Sequence[Span]) -> list[Records]:
        """Return the passes of some ranges of groups on register tiles, each as a table of its own."""
        firsts, ends = np.array(cuts, np.int64).T
        passes = self.passes(Pass, firsts, groups=ends - firsts, left=self.groups_left - WIDTH * firsts)
        return np.split(passes, len(passes))

    def call(
        self, inputs: Sequence[Storage], output: Storage, panels: int, source: int, sums: int, products: int = 0
    ) -> Records:
        """Return the addresses of a call: its tensors and scratch memory."""
        return row_of(
            Call,
            src=address(inputs[0]),
            weights=address(inputs[1]),
            bias=address(inputs[2]) if len(inputs) > 2 else 0,
            dst=address(output),
            panels=panels,
            source=source,
            products=products,
            sums=sums,
        )

    @abstractmethod
    def run(self, inputs: Sequence[Storage], output: Storage, stop: Stop) -> bool:
        """Compute the share; False when `stop` said so."""


class _Gather(Share):
    """Every dst pixel gathers its taps; lanes are dst channels or groups."""

    def __init__(self, problem: ConvProblem, way: Way, part: Sequence[int]) -> None:
        super().__init__(problem, way, part)
        dims, channels = self.dims, self.dims.src_channels
        steps = [tap_steps(dims, axis) for axis in range(3)]
        joined = channels < FEW_CHANNELS and steps[2][0] > 1
        numbers = [tap_numbers(dims, axis, joined and axis == 2) for axis in range(3)]
        d, h, w = np.ix_(*numbers)
        self.numbers = ((d * dims.kernel[1] + h) * dims.kernel[2] + w).reshape(-1)
        own_steps = [1 if joined and axis == 2 else step for axis, (step, _) in enumerate(steps)]
        self.src_steps = [step for _, step in steps]

        line = 4 * channels * (WIDTH if self.lanewise else 1)
        whole = self.near and problem.dtype == "f32"
        if self.lanewise:
            packed = not (whole and channels == 1 and dims.groups % WIDTH == 0)
        else:
            packed = not (whole and (dims.groups == 1 or channels >= FEW_CHANNELS))
        self.panel = (len(self.numbers) * channels + 1) * LANES
        pixels = self._band_pixels(line, self.g1 - self.g0)
        spans = [self.spans[0], *self.spans[3:]]
        grid = self._grid(pixels, spans)
        # the order of sums may not depend on how they are shared out
        every = self._grid(self._band_pixels(line, dims.groups), [(0, size) for size in (dims.n, *dims.dst)])
        apart = packed and 4 * self._points(every, line) > SUMS.source_bytes
        tall = LANE_ROWS if self.lanewise else target().rows[1 if dims.dst_channels <= WIDTH else 2]
        # straight into dst, where channels have to follow each other; in a src of one pixel they do in either format
        straight = not packed and dims.dst_channels == 1 and problem.data_format == "NXC"
        together = self.lanewise and straight and len(self.numbers) <= SEGMENT
        only: Only | None = "taps" if apart else "classes" if together else None
        self.tables = class_tables(dims, numbers, channels, tall, only)
        points = pixels * (line // 4 + 8) if apart else self._points(grid, line)
        self.source_floats = points if packed else 0
        self.bands = prod(ceil((high - low) / step) for (low, high), step in zip(spans, grid, strict=True))
        cuts = list(self._cuts())
        blocks = [blocks for *_, blocks in cuts]
        self.parts = list(zip(self.tile_passes([(g0, g1) for g0, g1, _ in cuts]), blocks, strict=True))
        self.panels_floats = self.panel * max((g1 - g0) * len(blocks) for g0, g1, blocks in cuts)
        self.share = row_of(
            GatherShare,
            shape=self.shape(own_steps, self.src_steps, packed),
            grid=(*_window(spans), grid),
            limits=[LANE_ROWS, target().rows[1], target().rows[2]],
            panel_bytes=4 * self.panel,
            order=1 if dims.gathers else 0 if joined else -1,
            apart=apart,
            once=disjoint(dims, self.tables),
            together=together,
        )
        units = (self.g1 - self.g0) * prod(high - low for low, high in (self.spans[0], *self.spans[2:]))
        whole_work = dims.groups * dims.n * dims.dst_channels * prod(dims.dst)
        macs = problem.macs * units * (WIDTH if self.lanewise else 1) // max(1, whole_work)
        self.batch = max(1, STEPS.band_batch_macs * self.bands * len(self.parts) // max(1, macs))

    def _band_pixels(self, line: int, groups: int) -> int:
        """Return the dst pixels of a band: their src should stay in L2 while all lanes read it, their sums too."""
        dims = self.dims
        weights = 4 * self.panel * ceil(dims.dst_channels / LANES) * groups
        near = max(line, 4 * self.problem.src_channels) if self.near else line
        pixels = SUMS.band_bytes * prod(dims.dst) // max(1, near * prod(dims.src))
        least = SUMS.band_pixels if weights > SUMS.band_bytes else SUMS.band_pixels // 8
        return min(max(least, pixels), SUMS.band_sums_bytes // (4 * LANES))

    def _points(self, grid: Sequence[int], line: int) -> int:
        """Count the f32 of src that the taps of a band reach; packed lines are rounded up to whole vectors."""
        images, *steps = grid
        reach = [images]
        for axis, (step, src_step) in enumerate(zip(steps, self.src_steps, strict=True)):
            pixels = step // self.strides[axis] * self.src_strides[axis] + 1
            reach.append(min(self.dims.src[axis], pixels + src_step * (self.dims.kernel[axis] - 1)))
        return prod(reach) * (line // 4 + 8)

    def _grid(self, pixels: int, spans: Sequence[Span]) -> list[int]:
        """Cut the dst positions into bands: whole lines where they are short, several images where those are small."""
        grid: list[int] = []
        for low, high in reversed(spans):
            parts = ceil((high - low) / max(1, pixels))
            step = max(1, ceil((high - low) / max(1, parts)))
            grid.insert(0, step)
            pixels //= step
        return grid

    def _cuts(self) -> Iterator[tuple[int, int, Records]]:
        """Cut the share so that the packed weights of a pass have room: first and last group, and blocks of lanes."""
        low, high = self.channels
        # with one band every weight is read once, and soon: let it be while it is in a cache
        limit = SUMS.weights_bytes if self.bands > 1 else SUMS.weights_bytes // 8
        firsts = np.arange(low, high, 1 if self.lanewise else LANES)
        blocks = np.empty(len(firsts), Lanes.dtype)
        blocks["first"] = firsts
        blocks["valid"] = WIDTH if self.lanewise else np.minimum(LANES, high - firsts)
        blocks["vectors"] = 1 + (blocks["valid"] > WIDTH)
        room = max(1, limit // (4 * self.panel))
        groups = max(1, room // max(1, len(blocks)))
        for g in range(0, self.g1 - self.g0, groups):
            for b in range(0, len(blocks), room):
                yield g, min(self.g1 - self.g0, g + groups), blocks[b : b + room]

    def run(self, inputs: Sequence[Storage], output: Storage, stop: Stop) -> bool:
        """Compute pass by pass and band by band."""
        call = self.call(
            inputs,
            output,
            panels=arena_address("weights", self.panels_floats),
            source=arena_address("source", self.source_floats),
            sums=arena_address("sums", SUMS.band_sums_bytes // 4),
        )
        for part, blocks in self.parts:
            pack_weights(self.share, part, call, blocks, self.numbers)
            for band in range(0, self.bands, self.batch):
                if stop():
                    return False
                end = min(self.bands, band + self.batch)
                gather(tile_table(), self.share, part, call, *self.tables, blocks, band, end)
        return True


class _Scatter(Share):
    """Products of src pixels with all taps, added to the dst pixels that they belong to."""

    def __init__(self, problem: ConvProblem, way: Way, part: Sequence[int]) -> None:
        super().__init__(problem, way, part)
        dims, channels = self.dims, self.dims.narrow_channels
        d, h, w = (tap_runs(dims, axis, np.arange(dims.kernel[axis])) for axis in range(3))
        self.tables = d, h, w
        spans = [self.spans[0], *self.spans[3:]]
        reach: list[Span] = [self.spans[0]]
        for table, span, stride in zip(self.tables, self.spans[3:], self.strides, strict=True):
            reach.append(_reach(table, span, stride))
        packed = not (self.near and problem.dtype == "f32")
        lanes = prod(dims.kernel) * dims.wide_channels
        used, limit = ceil(lanes / LANES), target().rows[2]
        line = 4 * LANES * (used + 1)
        depth, height, width = (max(least, high - low) for least, (low, high) in zip((1, 1, 0), reach[1:], strict=True))
        macs = max(1, width * lanes * channels)
        floats = max(1, width * (channels + 8))
        lines = max(1, min(height, STEPS.band_batch_macs // macs, SUMS.source_bytes // (4 * floats)))
        groups = self.g1 - self.g0
        self.panels_floats = groups * channels * line // 4
        self.source_floats = lines * floats if packed else 0
        self.products_floats = limit * used * LANES
        self.sums_floats = prod(high - low for low, high in self.spans[3:]) * dims.wide_channels
        self.items = (self.spans[0][1] - self.spans[0][0]) * groups * depth * ceil(height / lines)
        self.batch = max(1, STEPS.band_batch_macs // (macs * lines))
        (self.part,) = self.tile_passes([(0, groups)])
        self.share = row_of(
            ScatterShare,
            shape=self.shape((1, 1, 1), (0, 0, 0), packed),
            channels=dims.wide_channels,
            wanted=_window(spans),
            reach=_window(reach),
            lines=lines,
            limit=limit,
            line_bytes=line,
            dense=dims.dilations[2] == 1,
        )

    def run(self, inputs: Sequence[Storage], output: Storage, stop: Stop) -> bool:
        """Compute some src lines after the other."""
        call = self.call(
            inputs,
            output,
            panels=arena_address("weights", self.panels_floats),
            source=arena_address("source", self.source_floats),
            products=arena_address("products", self.products_floats),
            sums=arena_address("sums", self.sums_floats),
        )
        pack_columns(self.share, self.part, call)
        for item in range(0, self.items, self.batch):
            if stop():
                return False
            end = min(self.items, item + self.batch)
            scatter(tile_table()[2], self.share, self.part, call, *self.tables, item, end)
        return True


def _window(spans: Sequence[Span]) -> Row:
    """Return the low and the high ends of spans."""
    lows, highs = zip(*spans, strict=True)
    return values_of(Window, low=lows, high=highs)


def _reach(table: Records, span: Span, stride: int) -> Span:
    """Return the src positions of an axis that meet some of the dst positions of a span."""
    first = np.maximum(0, -((table["dst"] - span[0]) // stride))
    last = np.minimum(table["count"], -((table["dst"] - span[1]) // stride))
    met = first < last
    if not met.any():
        return 0, 0
    return int((table["src"] + first)[met].min()), int((table["src"] + last)[met].max())


def _steps(data_format: str, channels: int, spatial: tuple[int, int, int]) -> tuple[int, int, int, int, int]:
    """Return the element steps of (n, d, h, w, channel) of a data tensor."""
    d, h, w = spatial
    if data_format == "NCX":
        return channels * d * h * w, h * w, w, 1, d * h * w
    return d * h * w * channels, h * w * channels, w * channels, channels, 1


def share(problem: ConvProblem, way: Way, part: Sequence[int]) -> Share:
    """Prepare a unit's share."""
    return (_Scatter if way == "scatter" else _Gather)(problem, way, part)
