"""ConvTranspose forward as a gather: each dst pixel collects the taps that reach it, so it is written once.

A dst pixel ``u`` meets tap ``k`` at src pixel ``x = (u + pad - k * dilation) / stride`` where that is whole and inside.
Along an axis the taps of one pixel are an arithmetic progression, and pixels one stride apart share them: six such
pixels are the rows of a register tile, dst channels its vectors, and the sum runs over taps and src channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from math import gcd, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels._jit import Floats, Halves, Table, Vector, jit
from kernels.arena import arena
from kernels.cpu import cpu
from kernels.packing import F16, F32, KINDS, pack_panel
from kernels.plan import Stop, Storage, Unit
from kernels.problem import ConvProblem, Dims
from kernels.simd import call_tile, load_value, round_bits
from kernels.tiles import tile_table

__all__ = ["CONV_TRANSPOSE"]

Ints = npt.NDArray[np.int64]

UNIT_MACS = 20_000_000
STEP_MACS = 250_000_000
WEIGHTS_BYTES = 24 << 20
"""Packed weights of one unit; more dst channels are done one part after another."""

_round_f16 = round_bits("f16")
_round_bf16 = round_bits("bf16")
_load_f32, _load_f16, _load_bf16 = (load_value(kind) for kind in KINDS)
WIDTH = cpu().width


class _AxisTaps(NamedTuple):
    """For every dst position of an axis: first tap, number of taps, first src position; and both steps a tap."""

    table: list[tuple[int, int, int]]
    tap_step: int
    src_step: int


def _axis_taps(dims: Dims, axis: int) -> _AxisTaps:
    stride, dilation, pad = dims.strides[axis], dims.dilations[axis], dims.pads[axis]
    step = stride // gcd(stride, dilation)
    table = []
    for u in range(dims.wide[axis]):
        live = [
            (k, (u + pad - k * dilation) // stride)
            for k in range(dims.kernel[axis])
            if (u + pad - k * dilation) % stride == 0 and 0 <= (u + pad - k * dilation) // stride < dims.narrow[axis]
        ]
        table.append((live[0][0], len(live), live[0][1]) if live else (0, 0, 0))
    return _AxisTaps(table, step, step * dilation // stride)


class Layout(NamedTuple):
    """Tables that the compiled driver reads."""

    planes: Ints  # for every dst plane: first tap, taps, first src plane
    lines: Ints  # the same for dst lines
    tiles: Ints  # first dst column, rows, first tap, taps, first src column
    steps: Ints  # tap and src steps of d, h, w


@lru_cache(maxsize=256)
def _layout(problem: ConvProblem) -> Layout:
    dims = problem.dims
    axes = [_axis_taps(dims, axis) for axis in range(3)]
    stride = dims.strides[2]
    limit = min(cpu().rows.values())
    tiles = []
    for phase in range(min(stride, dims.wide[2])):
        columns = [(u, *axes[2].table[u]) for u in range(phase, dims.wide[2], stride)]
        for _, run in groupby(columns, key=lambda c: (c[1], c[2])):
            members = list(run)
            parts = -(-len(members) // limit)
            for i in range(parts):
                part = members[len(members) * i // parts : len(members) * (i + 1) // parts]
                tiles.append((part[0][0], len(part), *part[0][1:]))
    steps = [(axis.tap_step, axis.src_step) for axis in axes]
    return Layout(
        np.array(axes[0].table, np.int64).reshape(-1, 3),
        np.array(axes[1].table, np.int64).reshape(-1, 3),
        np.array(tiles, np.int64).reshape(-1, 5),
        np.array(steps, np.int64).reshape(-1),
    )


@jit
def _bias_value(kind: int, address: int) -> float:
    """Read one bias value as f32."""
    if kind == F32:
        return _load_f32(address)  # type: ignore[no-any-return]
    if kind == F16:
        return _load_f16(address)  # type: ignore[no-any-return]
    return _load_bf16(address)  # type: ignore[no-any-return]


@jit
def _lines(
    table: Table, kind: int, n: int, first: int, last: int, planes: Table, lines: Table, tiles: Table, steps: Vector,
    kernel: Vector,
    src: int, src_steps: Vector, weights: int, channels: int, lane: Vector, bias: int, out32: Floats, out16: Halves,
) -> None:  # fmt: skip
    """Compute dst lines ``first..last`` (over all planes) of image `n` for the lane blocks of one group.

    `src_steps` are the bytes of src for (n, d, h, w, channel); `kernel` is (KH, KW); `lane` is (first dst channel,
    dst channels, packed bytes of one lane block of full width, then dst's element steps n, d, h, w, channel, stride
    w). Packed weights are [lane block][tap][src channel][lanes].
    """
    acc = np.empty((8, 2 * WIDTH), np.float32)
    offsets = np.empty(8, np.int64)
    stride = lane[8]
    for m in range(8):
        offsets[m] = m * src_steps[3]
    sums = acc.ctypes.data
    walk = np.empty(10, np.int64)
    walk[0], walk[1], walk[2] = steps[2] * kernel[1] * channels, steps[4] * channels, 1
    walk[3], walk[4], walk[5] = -steps[3] * src_steps[2], -steps[5] * src_steps[3], src_steps[4]
    walk[9] = 1
    low = lane[0]
    while low < lane[0] + lane[1]:
        valid = min(2 * WIDTH, lane[0] + lane[1] - low)
        vectors = 1 if valid <= WIDTH else 2
        lanes = vectors * WIDTH
        line_bytes = 4 * lanes
        tap_bytes = channels * line_bytes
        panel = weights + (low - lane[0]) // (2 * WIDTH) * lane[2]
        for line in range(first, last):
            d, h = line // lines.shape[0], line % lines.shape[0]
            for t in range(tiles.shape[0]):
                rows = tiles[t, 1]
                for m in range(rows):
                    for j in range(lanes):
                        acc.ravel()[m * lanes + j] = 0.0
                if lines[h, 1] > 0 and tiles[t, 3] > 0:
                    for k in range(planes[d, 1]):
                        tap = ((planes[d, 0] + k * steps[0]) * kernel[0] + lines[h, 0]) * kernel[1] + tiles[t, 2]
                        place = n * src_steps[0] + (planes[d, 2] - k * steps[1]) * src_steps[1]
                        place += lines[h, 2] * src_steps[2] + tiles[t, 4] * src_steps[3]
                        walk[6], walk[7], walk[8] = lines[h, 1], tiles[t, 3], channels
                        call_tile(
                            table[vectors, rows], walk.ctypes.data, panel + tap * tap_bytes, src + place,
                            offsets.ctypes.data, sums,
                        )  # fmt: skip
                flat = acc.ravel()
                for m in range(rows):
                    to = n * lane[3] + d * lane[4] + h * lane[5] + (tiles[t, 0] + m * stride) * lane[6] + low * lane[7]
                    for j in range(valid):
                        value = flat[m * lanes + j]
                        if bias != 0:
                            value += _bias_value(kind, bias + (low + j) * (4 if kind == F32 else 2))
                        if kind == F32:
                            out32[to + j * lane[7]] = value
                        elif kind == F16:
                            out16[to + j * lane[7]] = _round_f16(value)
                        else:
                            out16[to + j * lane[7]] = _round_bf16(value)
        low += valid


class ConvTranspose:
    """ConvTranspose forward on register tiles (`_lines`)."""

    name = "conv_transpose_tiles"

    def refuse(self, problem: ConvProblem) -> str | None:
        """Take every ConvTranspose."""
        return None if problem.forward else "computes ConvTranspose only"

    def units(self, problem: ConvProblem, workers: int) -> tuple[list[Unit], int]:
        """Share out images first, then groups and blocks of dst channels where the weights are the larger tensor."""
        dims = problem.dims
        blocks = -(-dims.wide_channels // (2 * WIDTH))
        wanted = int(max(1, min(4 * workers, problem.macs // UNIT_MACS)))
        lane_macs = problem.n * prod(problem.src_spatial)
        by_image = 1 if lane_macs < 2048 else min(max(1, problem.n), wanted)
        by_group = min(dims.groups, -(-wanted // by_image))
        by_block = min(blocks, max(1, -(-wanted // (by_image * by_group)))) if by_group == dims.groups else 1
        units: list[Unit] = []
        for i in range(by_image):
            for g in range(by_group):
                for b in range(by_block):
                    images = (problem.n * i // by_image, problem.n * (i + 1) // by_image)
                    groups = (dims.groups * g // by_group, dims.groups * (g + 1) // by_group)
                    cut = [min(dims.wide_channels, 2 * WIDTH * (blocks * k // by_block)) for k in (b, b + 1)]
                    part = (*images, *groups, cut[0], cut[1])
                    units.append(Unit(len(units), 0, *self._box(problem, part), problem.macs // 1, part))
        macs = problem.macs // len(units)
        return [Unit(u.index, 0, u.offset, u.shape, macs, u.part) for u in units], 0

    def _box(self, problem: ConvProblem, part: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        n0, n1, g0, g1, c0, c1 = part
        each = problem.dims.wide_channels
        channel, channels = g0 * each + c0, (g1 - 1 - g0) * each + c1 - c0
        zeros = (0,) * problem.rank
        if problem.data_format == "NCX":
            return (n0, channel, *zeros), (n1 - n0, channels, *problem.dst_spatial)
        return (n0, *zeros, channel), (n1 - n0, *problem.dst_spatial, channels)

    def run(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> bool:  # fmt: skip
        """Compute the dst box of one unit."""
        n0, n1, g0, g1, c0, c1 = unit.part
        dims = problem.dims
        taps = prod(dims.kernel)
        block = 2 * WIDTH
        per_pass = max(block, WEIGHTS_BYTES // (4 * taps * dims.narrow_channels) // block * block)
        for g in range(g0, g1):
            for low in range(c0, c1, per_pass):
                high = min(c1, low + per_pass)
                panels = self._pack_weights(problem, inputs[1], g, low, high)
                for n in range(n0, n1):
                    if not self._image(problem, inputs, output, (n, g, low, high), panels, stop):
                        return False
        return True

    def _pack_weights(self, problem: ConvProblem, weights: Storage, g: int, low: int, high: int) -> int:
        """Pack one group's weights of dst channels ``low..high`` as [lane block][tap][src channel][lanes]."""
        dims = problem.dims
        taps, channels, size = prod(dims.kernel), dims.narrow_channels, weights.itemsize
        group, wide, narrow, tap = (step * size for step in problem.weights_strides)
        block = 2 * WIDTH
        panels = arena("weights", -(-(high - low) // block) * block * taps * channels + 16)
        end = weights.ctypes.data + weights.nbytes
        for i, first in enumerate(range(low, high, block)):
            valid = min(block, high - first)
            lanes = WIDTH if valid <= WIDTH else block
            line = 4 * lanes
            dst = panels.ctypes.data + i * block * taps * channels * 4
            source = weights.ctypes.data + g * group + first * wide
            if tap == size and taps >= 8:  # X is innermost: taps are the run
                sizes, dst_steps, src_steps = (
                    [1, 1, channels, taps],
                    [0, 0, line, line * channels],
                    [0, 0, narrow, tap, wide],
                )
            else:
                sizes, dst_steps, src_steps = (
                    [1, 1, taps, channels],
                    [0, 0, line * channels, line],
                    [0, 0, tap, narrow, wide],
                )
            pack_panel(
                KINDS[problem.dtype], lanes, valid, dst, np.array(sizes, np.int64), np.array(dst_steps, np.int64),
                source, np.array(src_steps, np.int64), end,
            )  # fmt: skip
        return int(panels.ctypes.data)

    def _image(
        self, problem: ConvProblem, inputs: Sequence[Storage], output: Storage, part: tuple[int, int, int, int],
        panels: int, stop: Stop,
    ) -> bool:  # fmt: skip
        """Compute one image of one group for some dst channels."""
        n, g, low, high = part
        dims, layout = problem.dims, _layout(problem)
        src, steps = self._source(problem, inputs[0], n, g)
        total = dims.wide[0] * dims.wide[1]
        share = problem.macs // max(1, problem.n * dims.groups) * (high - low) // dims.wide_channels
        step = max(1, int(total * STEP_MACS // max(1, share)))
        flat = output.reshape(-1)
        none32, none16 = np.empty(0, np.float32), np.empty(0, np.uint16)
        out32, out16 = (flat, none16) if problem.dtype == "f32" else (none32, flat)
        d, h, w = dims.wide
        all_channels = problem.dst_channels
        if problem.data_format == "NCX":
            out_steps = [all_channels * d * h * w, h * w, w, 1, d * h * w]
        else:
            out_steps = [d * h * w * all_channels, h * w * all_channels, w * all_channels, all_channels, 1]
        first = g * dims.wide_channels + low
        lane = [
            first,
            high - low,
            2 * WIDTH * 4 * prod(dims.kernel) * dims.narrow_channels,
            *out_steps,
            dims.strides[2],
        ]
        bias = inputs[2].ctypes.data if problem.bias else 0
        for line in range(0, total, step):
            if stop():
                return False
            _lines(
                tile_table(), KINDS[problem.dtype], n, line, min(total, line + step),
                layout.planes, layout.lines, layout.tiles, layout.steps, np.array(dims.kernel[1:], np.int64), src,
                np.array(steps, np.int64), panels,
                dims.narrow_channels, np.array(lane, np.int64), bias, out32, out16,
            )  # fmt: skip
        return True

    def _source(self, problem: ConvProblem, src: Storage, n: int, g: int) -> tuple[int, list[int]]:
        """Give the address of image 0 and the byte steps of src with adjacent channels, packed where it is not so."""
        dims, size = problem.dims, src.itemsize
        d, h, w = dims.narrow
        channels, total = dims.narrow_channels, problem.src_channels
        if problem.data_format == "NXC":
            steps = [d * h * w * total * size, h * w * total * size, w * total * size, total * size, size]
            first = src.ctypes.data + g * channels * size
            if problem.dtype == "f32":
                return first, steps
        else:
            steps = [total * d * h * w * size, h * w * size, w * size, size, d * h * w * size]
            first = src.ctypes.data + g * channels * d * h * w * size
        lanes = -(-channels // 8) * 8
        line = 4 * lanes
        packed = arena("source", d * h * w * lanes + 16)
        dst_steps = np.array([0, h * w * line, w * line, line], np.int64)
        pack_panel(
            KINDS[problem.dtype], lanes, channels, packed.ctypes.data, np.array([1, d, h, w], np.int64), dst_steps,
            first + n * steps[0], np.array(steps, np.int64), src.ctypes.data + src.nbytes,
        )  # fmt: skip
        return int(packed.ctypes.data), [0, h * w * line, w * line, line, 4]


CONV_TRANSPOSE = ConvTranspose()
