"""ConvTranspose forward on register tiles, in one of three ways, chosen from the problem alone.

Gather: a dst pixel ``u`` meets tap ``k`` at src pixel ``x = (u + pad - k * dilation) / stride`` where that is whole and
inside. Along an axis the taps of one pixel are an arithmetic progression, and pixels one stride apart share them: they
are the rows of a register tile, dst channels its lanes, and the sum runs over taps and src channels.

Lanes: the same with groups as lanes, for depthwise and other small groups.

Scatter: with few dst channels, lanes are (tap, dst channel) pairs; the products of a src pixel are added to the dst
pixels that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import ceil, gcd, prod
from typing import Literal

import numpy as np
import numpy.typing as npt

from kernels.arena import arena
from kernels.cpu import cpu
from kernels.gather import gather, scatter, write_block
from kernels.geometry import wrapped
from kernels.packing import KINDS, pack_panel
from kernels.plan import Stop, Storage, Unit
from kernels.problem import ConvProblem, Dims
from kernels.tiles import LANE_ROWS, tile_table

__all__ = ["CONV_TRANSPOSE"]

Ints = npt.NDArray[np.int64]
Shape = tuple[int, ...]
Box = tuple[int, int, int, int]

UNIT_MACS = 20_000_000
STEP_MACS = 100_000_000
"""Work between two looks at whether to stop."""

BLOCK_BYTES = 128 << 10
"""Sums of one block of dst lines: a part of L2."""

SOURCE_BYTES = 8 << 20
"""Packed src of one band of dst at the most, unless a single line needs more."""

SCATTER_BYTES = 32 << 20
"""Sums of one image at the most, where products are scattered."""

WEIGHTS_BYTES = 24 << 20
"""Packed weights of one pass; more dst channels are done one part after another."""

WIDTH = cpu().width


@dataclass(frozen=True)
class _Layout:
    """The tables of `kernels.gather` for one problem, and the way it is computed."""

    way: Literal["gather", "lanes", "scatter"]
    planes: Ints
    lines: Ints
    tiles: Ints
    runs: Ints
    steps: Ints
    spans: Ints
    cuts: Ints


def _axis_taps(dims: Dims, axis: int) -> Ints:
    """Give first tap, number of taps and first src position for every dst position of an axis."""
    table = np.zeros((dims.wide[axis], 3), np.int64)
    for tap in reversed(range(dims.kernel[axis])):
        low, high = dims.tap_range(axis, tap)
        start = low * dims.strides[axis] + tap * dims.dilations[axis] - dims.pads[axis]
        reached = (
            table[start : start + (high - low) * dims.strides[axis] : dims.strides[axis]] if low < high else table[:0]
        )
        reached[:, 0], reached[:, 2] = tap, np.arange(low, low + len(reached))
        reached[:, 1] += 1
    return table


def _tiles(table: Ints, stride: int, limit: int) -> Ints:
    """Cut the dst columns of each phase into register tiles of columns that share their taps.

    `table` is that of `_axis_taps`. Columns with the same taps follow each other: those inside, and both borders.
    """
    tiles = [np.zeros((0, 5), np.int64)]
    for phase in range(min(stride, len(table))):
        part = table[phase::stride]
        change = np.flatnonzero((part[1:, :2] != part[:-1, :2]).any(axis=1)) + 1
        for low, high in pairwise([0, *change.tolist(), len(part)]):
            edges = low + np.array(_cuts(high - low, limit), np.int64)
            first = edges[:-1]
            tiles.append(np.column_stack([phase + first * stride, np.diff(edges), part[first]]))
    return np.ascontiguousarray(np.concatenate(tiles))


def _way(dims: Dims) -> Literal["gather", "lanes", "scatter"]:
    """Choose by the lanes that would stand empty; scattering costs an addition for every product summed."""
    groups = ceil(dims.groups / WIDTH) * WIDTH / dims.groups
    taps = prod(dims.kernel)
    out = dims.wide_channels
    lanes = WIDTH * ceil(out / WIDTH) / out
    columns = 2 * WIDTH * ceil(taps * out / (2 * WIDTH)) / (taps * out)
    costs: dict[Literal["gather", "lanes", "scatter"], float] = {
        "gather": lanes,
        "lanes": 1.3 * groups,
        "scatter": columns * (1 + 12 / dims.narrow_channels),
    }
    if prod(dims.wide) * out * 4 > SCATTER_BYTES:
        del costs["scatter"]
    return min(costs, key=lambda way: costs[way])


@lru_cache(maxsize=256)
def _layout(problem: ConvProblem) -> _Layout:
    dims = problem.dims
    way = _way(dims)
    tables = [_axis_taps(dims, axis) for axis in range(3)]
    limit = LANE_ROWS if way == "lanes" else min(cpu().rows.values())
    runs = []
    for tap in range(dims.kernel[2]):
        low, high = dims.tap_range(2, tap)
        runs.append((low * dims.strides[2] + tap * dims.dilations[2] - dims.pads[2], low, high))
    steps = []
    for stride, dilation in zip(dims.strides, dims.dilations, strict=True):
        tap_step = stride // gcd(stride, dilation)
        steps += [tap_step, tap_step * dilation // stride]
    return _Layout(
        way, tables[0], tables[1], _tiles(tables[2], dims.strides[2], limit), np.array(runs, np.int64),
        np.array((*steps, limit), np.int64), _spans(dims) if way == "scatter" else np.empty((0, 2), np.int64),
        np.array(_cuts(dims.narrow[2], cpu().rows[2]), np.int64),
    )  # fmt: skip


def _cuts(count: int, limit: int) -> list[int]:
    """Cut `count` things into equal parts of at most `limit`."""
    parts = ceil(count / limit)
    return [count * i // parts for i in range(parts + 1)] if parts else []


def _spans(dims: Dims) -> Ints:
    """List the kernel's lines for every src line: first lane, and the dst line's place in the sums or -1."""
    out, width = dims.wide_channels, dims.kernel[2]
    d, h, kd, kh = np.indices((*dims.narrow[:2], *dims.kernel[:2])).reshape(4, -1)
    plane = d * dims.strides[0] + kd * dims.dilations[0] - dims.pads[0]
    line = h * dims.strides[1] + kh * dims.dilations[1] - dims.pads[1]
    inside = (plane >= 0) & (plane < dims.wide[0]) & (line >= 0) & (line < dims.wide[1])
    place = np.where(inside, (plane * dims.wide[1] + line) * dims.wide[2] * out, -1)
    return np.column_stack([(kd * dims.kernel[1] + kh) * width * out, place])


def _reach(table: Ints, src_step: int) -> tuple[int, int]:
    """Give the span of src positions that some dst positions of an axis meet (see `_axis_taps`)."""
    live = table[table[:, 1] > 0]
    if not len(live):
        return 0, 0
    return int((live[:, 2] - (live[:, 1] - 1) * src_step).min()), int(live[:, 2].max()) + 1


class ConvTranspose:
    """ConvTranspose forward on register tiles."""

    name = "conv_transpose_tiles"

    def refuse(self, problem: ConvProblem) -> str | None:
        """Take every ConvTranspose."""
        return None if problem.forward else "computes ConvTranspose only"

    def units(self, problem: ConvProblem, workers: int) -> tuple[list[Unit], int]:
        """Share out images first, then groups, then lane blocks where the weights are the larger tensor."""
        dims, way = problem.dims, _way(problem.dims)
        groups = ceil(dims.groups / WIDTH) if way == "lanes" else dims.groups
        blocks = ceil(dims.wide_channels / (2 * WIDTH)) if way == "gather" else 1
        wanted = int(max(1, min(4 * workers, problem.macs // UNIT_MACS)))
        few_pixels = problem.n * prod(problem.src_spatial) < 2048 and blocks * groups >= wanted
        by_image = 1 if few_pixels else min(max(1, problem.n), wanted)
        by_group = min(groups, ceil(wanted / by_image))
        by_block = min(blocks, ceil(wanted / (by_image * by_group))) if by_group == groups else 1
        units: list[Unit] = []
        for i, g, b in np.ndindex(by_image, by_group, by_block):
            images = (problem.n * i // by_image, problem.n * (i + 1) // by_image)
            part = (groups * g // by_group, groups * (g + 1) // by_group)
            cuts = [min(dims.wide_channels, 2 * WIDTH * (blocks * k // by_block)) for k in (b, b + 1)]
            if way != "gather":
                cuts = [0, dims.wide_channels]
            unit = (*images, *part, *cuts)
            macs = problem.macs // (by_image * by_group * by_block)
            units.append(Unit(len(units), 0, *_box(problem, way, unit), macs, unit))
        return units, 0

    def run(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> bool:  # fmt: skip
        """Compute the dst box of one unit."""
        n0, n1, g0, g1, c0, c1 = unit.part
        way = _way(problem.dims)
        line = 4 * prod(problem.dims.kernel) * problem.dims.narrow_channels
        per_pass = max(2 * WIDTH, WEIGHTS_BYTES // line // (2 * WIDTH) * 2 * WIDTH) if way == "gather" else c1
        for g in range(g0, g1):
            for low in range(c0, c1, max(1, per_pass)):
                step = _Pass(problem, inputs, output, g, (low, min(c1, low + per_pass)))
                for n in range(n0, n1):
                    if not step.image(n, stop):
                        return False
        return True


def _box(problem: ConvProblem, way: str, part: Shape) -> tuple[Shape, Shape]:
    """Give offset and shape of a unit's part of dst."""
    n0, n1, g0, g1, c0, c1 = part
    each = problem.dims.wide_channels
    if way == "lanes":
        g0, g1 = g0 * WIDTH, min(problem.groups, g1 * WIDTH)
    channel, channels = g0 * each + c0, (g1 - 1 - g0) * each + c1 - c0
    zeros = (0,) * problem.rank
    if problem.data_format == "NCX":
        return (n0, channel, *zeros), (n1 - n0, channels, *problem.dst_spatial)
    return (n0, *zeros, channel), (n1 - n0, *problem.dst_spatial, channels)


class _Pass:
    """One group (or group of lanes) of one unit: its weights are packed once, its images done one by one."""

    def __init__(
        self, problem: ConvProblem, inputs: Sequence[Storage], output: Storage, g: int, channels: tuple[int, int]
    ) -> None:
        self.problem, self.dims, self.layout = problem, problem.dims, _layout(problem)
        self.src, self.weights, self.bias = inputs[0], inputs[1], inputs[2] if problem.bias else None
        self.low, self.high = channels
        self.by_lane = self.layout.way == "lanes"
        self.group = g * WIDTH if self.by_lane else g
        self.lanes_left = problem.groups - self.group
        self.kind = KINDS[problem.dtype]
        flat = output.reshape(-1)
        self.out32 = flat if problem.dtype == "f32" else np.empty(0, np.float32)
        self.out16 = np.empty(0, np.uint16) if problem.dtype == "f32" else flat
        self.out_steps = _steps(problem.data_format, problem.dst_channels, self.dims.wide)
        self.blocks = np.array(self._pack_weights(), np.int64)

    def _pack_weights(self) -> list[tuple[int, int, int, int]]:
        """Pack panels [tap][src channel][lanes]; give (address, first dst channel, valid lanes, vectors) of each."""
        dims, size = self.dims, self.weights.itemsize
        taps, channels = prod(dims.kernel), dims.narrow_channels
        group, wide, narrow, tap = (step * size for step in self.problem.weights_strides)
        start = self.weights.ctypes.data + self.group * group
        blocks: list[tuple[int, int, int, int]] = []
        if self.layout.way == "scatter":
            return self._pack_columns(start, wide, narrow, tap)
        if self.by_lane:
            count = self.high - self.low
            cuts = [(self.low + c, min(WIDTH, self.lanes_left), 1, group) for c in range(count)]
        else:
            firsts = range(self.low, self.high, 2 * WIDTH)
            valid = [min(2 * WIDTH, self.high - first) for first in firsts]
            cuts = [(f, v, 1 if v <= WIDTH else 2, wide) for f, v in zip(firsts, valid, strict=True)]
        floats = 2 * WIDTH * taps * channels
        panels = arena("weights", len(cuts) * floats)
        for i, (first, valid_lanes, vectors, lane) in enumerate(cuts):
            line = 4 * WIDTH * vectors
            dst = panels.ctypes.data + 4 * i * floats
            if tap == size and taps >= 8:  # X is innermost: taps are the run
                sizes, to, of = (1, 1, channels, taps), (0, 0, line, line * channels), (0, 0, narrow, tap, lane)
            else:
                sizes, to, of = (1, 1, taps, channels), (0, 0, line * channels, line), (0, 0, tap, narrow, lane)
            self._pack(WIDTH * vectors, valid_lanes, dst, sizes, to, start + first * wide, of, self.weights)
            blocks.append((dst, first, valid_lanes, vectors))
        return blocks

    def _pack_columns(self, start: int, wide: int, narrow: int, tap: int) -> list[tuple[int, int, int, int]]:
        """Pack one panel [block][src channel][lanes] whose lanes are (tap, dst channel) pairs."""
        dims, size = self.dims, self.weights.itemsize
        taps, out, channels = prod(dims.kernel), dims.wide_channels, dims.narrow_channels
        lanes = 2 * WIDTH
        count = ceil(taps * out / lanes)
        # the weights are small here: NumPy brings them to [src channel][tap][dst channel], zero-filled to whole blocks
        strided = np.lib.stride_tricks.as_strided(
            self.weights.reshape(-1)[(start - self.weights.ctypes.data) // size :],
            (channels, taps, out), (narrow, tap, wide),
        )  # fmt: skip
        ordered = np.zeros((channels, count * lanes), self.weights.dtype)
        ordered[:, : taps * out] = strided.reshape(channels, taps * out)
        panels = arena("weights", count * channels * lanes)
        for b in range(count):
            line = count * lanes * size
            self._pack(
                lanes, lanes, panels.ctypes.data + 4 * b * channels * lanes, (1, 1, 1, channels), (0, 0, 0, 4 * lanes),
                ordered.ctypes.data + b * lanes * size, (0, 0, 0, line, size), ordered,
            )  # fmt: skip
        return [(panels.ctypes.data, 0, out, count)]

    def _pack(
        self, lanes: int, valid: int, dst: int, sizes: Shape, to: Shape, source: int, of: Shape, tensor: Storage
    ) -> None:
        box = np.array((0, 0, 0, 0, *sizes), np.int64)
        operand = wrapped((source, tensor.ctypes.data + tensor.nbytes, 0, *of))
        pack_panel(self.kind, lanes, valid, dst, box, np.array(to, np.int64), source, operand)

    def _source(self, n: int, box: Box) -> tuple[int, Ints]:
        """Give the address of an image and the byte steps of (d, h, w, channel), packed where channels lie apart.

        What is packed are the src planes and lines of `box`; the address is that of plane 0 and line 0 all the same.
        """
        dims, size, problem = self.dims, self.src.itemsize, self.problem
        image, d, h, w, channel = (
            step * size for step in _steps(problem.data_format, problem.src_channels, dims.narrow)
        )
        channels = dims.narrow_channels
        source = self.src.ctypes.data + n * image + self.group * channels * channel
        if self.by_lane:
            lanes, valid, lane, lines = WIDTH, min(WIDTH, self.lanes_left), channels * channel, channels
            if problem.dtype == "f32" and channel == size and channels == 1 and valid == WIDTH:
                return source, np.array((d, h, w, 4), np.int64)
        elif problem.dtype == "f32" and channel == size:
            return source, np.array((d, h, w, channel), np.int64)
        else:
            lanes, valid, lane, lines = ceil(channels / 8) * 8, channels, channel, 1
        low, high, top, bottom = box
        depth, height, width = high - low, bottom - top, dims.narrow[2]
        line = 4 * lanes * lines
        packed = arena("source", depth * height * width * lanes * lines).ctypes.data
        to = (0, height * width * line, width * line, line)
        for c in range(lines):
            first = source + low * d + top * h + c * channel
            self._pack(
                lanes, valid, packed + 4 * lanes * c, (1, depth, height, width), to, first, (image, d, h, w, lane),
                self.src,
            )  # fmt: skip
        start = packed - low * to[1] - top * to[2]
        return start, np.array((to[1], to[2], to[3], 4 * lanes if self.by_lane else 4), np.int64)

    def _bands(self, band: Box) -> Iterator[tuple[Box, Box]]:
        """Cut dst planes and lines until the src that each part needs is small when packed; give both."""
        low, high, top, bottom = band
        layout, dims = self.layout, self.dims
        planes = _reach(layout.planes[low:high], int(layout.steps[1]))
        lines = _reach(layout.lines[top:bottom], int(layout.steps[3]))
        size = 4 * dims.narrow_channels * dims.narrow[2] * (planes[1] - planes[0]) * (lines[1] - lines[0])
        size *= WIDTH if self.by_lane else 1
        middle = ((low + high) // 2, (top + bottom) // 2)
        if size > SOURCE_BYTES and high - low > 1:
            yield from self._bands((low, middle[0], top, bottom))
            yield from self._bands((middle[0], high, top, bottom))
        elif size > SOURCE_BYTES and bottom - top > 1:
            yield from self._bands((low, high, top, middle[1]))
            yield from self._bands((low, high, middle[1], bottom))
        else:
            yield band, (*planes, *lines)

    def image(self, n: int, stop: Stop) -> bool:
        """Compute one image; False when `stop` said so."""
        if self.layout.way == "scatter":
            return self._scatter(n, stop)
        dims, layout = self.dims, self.layout
        sizes = np.array((dims.wide[2], dims.strides[2]), np.int64)
        most_lines = max(1, min(dims.wide[1], BLOCK_BYTES // (8 * WIDTH * dims.wide[2])))
        acc = arena("sums", most_lines * dims.wide[2] * 2 * WIDTH)
        kernel = np.array(dims.kernel[1:], np.int64)
        share = self.problem.macs // max(1, self.problem.n * dims.groups * len(self.blocks))
        step = max(1, STEP_MACS // max(1, share))
        for band, box in self._bands((0, dims.wide[0], 0, dims.wide[1])):
            src, src_steps = self._source(n, box)
            for i in range(0, len(self.blocks), step):
                if stop():
                    return False
                gather(
                    tile_table(), self.kind, self.by_lane, self.blocks[i : i + step], most_lines,
                    np.array(band, np.int64), sizes, layout.planes, layout.lines, layout.tiles, layout.runs,
                    layout.steps, kernel,
                    dims.narrow_channels, src, src_steps, acc, *self._target(n), self.out32, self.out16,
                )  # fmt: skip
        return True

    def _target(self, n: int) -> tuple[int, Ints, Ints]:
        """Give where lane 0 of an image goes in dst, and the steps of dst and bias that `gather` asks for."""
        image, d, h, w, channel = self.out_steps
        out = self.dims.wide_channels
        # a lane is a channel, or a group, whose channels follow each other
        lane = out if self.by_lane else 1
        size = 0 if self.bias is None else self.bias.itemsize
        bias = 0 if self.bias is None else self.bias.ctypes.data + self.group * out * size
        place = n * image + self.group * out * channel
        steps = (d, h, w, lane * channel, channel)
        return place, np.array(steps, np.int64), np.array((bias, lane * size, size), np.int64)

    def _scatter(self, n: int, stop: Stop) -> bool:
        """Compute one image by adding products where they belong."""
        dims, layout = self.dims, self.layout
        out, (depth, height, width) = dims.wide_channels, dims.narrow
        panel, _, _, blocks = (int(value) for value in self.blocks[0])
        acc = arena("sums", prod(dims.wide) * out)
        acc[...] = 0
        part = arena("part", LANE_ROWS * blocks * 2 * WIDTH)
        columns = (out, dims.kernel[2], -dims.pads[2], dims.strides[2], dims.dilations[2], dims.wide[2])
        line_macs = self.problem.macs // max(1, self.problem.n * dims.groups * depth * height)
        step = max(1, min(STEP_MACS // max(1, line_macs), SOURCE_BYTES // (4 * width * dims.narrow_channels)))
        for d, h in product(range(depth), range(0, height, step)):
            if stop():
                return False
            last = min(height, h + step)
            src, src_steps = self._source(n, (d, d + 1, h, last))
            scatter(
                tile_table(), d * height + h, d * height + last, layout.cuts, dims.narrow_channels, src, src_steps,
                panel, blocks, part, acc, layout.spans, np.array((*columns, depth * height, height), np.int64),
            )  # fmt: skip
        place, steps, bias = self._target(n)
        write_block(
            self.kind, acc, prod(dims.wide), out, out, place, steps[2:], bias[0], bias[1], self.out32, self.out16
        )
        return True


def _steps(data_format: str, channels: int, spatial: tuple[int, int, int]) -> tuple[int, int, int, int, int]:
    """Give the element steps of (n, d, h, w, channel) of a data tensor."""
    d, h, w = spatial
    if data_format == "NCX":
        return channels * d * h * w, h * w, w, 1, d * h * w
    return d * h * w * channels, h * w * channels, w * channels, channels, 1


CONV_TRANSPOSE = ConvTranspose()
