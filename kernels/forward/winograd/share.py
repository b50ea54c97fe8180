"""One unit's share of a forward operation by Winograd, as tables for the compiled loops."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

import numpy as np

from kernels.arena import address, arena, arena_address
from kernels.blocks import STEPS, SUMS
from kernels.cache import cached
from kernels.dtypes import KINDS
from kernels.emit.brgemm import FLUSH, FLUSH_FIRST, Element, micro_table
from kernels.emit.compiler import Records, row_of
from kernels.emit.winograd import FACTORS
from kernels.forward.winograd.driver import KERNEL, Filters, Outputs, add_products, transform_filters
from kernels.gradient.roles import lane_blocks
from kernels.plan import Stop, Storage
from kernels.problem import ConvProblem, Dims, data_steps, storage_dtype
from kernels.reference import widen
from kernels.winograd.slabs import cut_slabs, side_of, tiles_of
from kernels.winograd.tiles import GAP, PAIR, PRODUCTS, VECTOR, WIDTH

__all__ = ["FilterShare", "WinogradShare", "filter_share", "share"]


class FilterShare:
    """The weights, which are transformed once for a call."""

    def __init__(self, problem: ConvProblem) -> None:
        dims, size = problem.dims, storage_dtype(problem.dtype).itemsize
        group, wide, narrow, tap = problem.weights_strides
        dst, src = (narrow, wide) if dims.gathers else (wide, narrow)
        self.vectors = ceil(dims.dst_channels / WIDTH)
        """Vectors of dst channels of a group."""
        self.plane = dims.kernel[0] * dims.src_channels * VECTOR
        self.block = PRODUCTS * self.plane
        self.total = dims.groups * self.vectors
        self._batch = max(1, STEPS.winograd_batch_bytes // self.block)
        self._room = KERNEL * dims.src_channels * WIDTH
        self._filters = row_of(
            Filters, kind=KINDS[problem.dtype], nbytes=size * prod(problem.weights_shape), group=size * group,
            dst_channel=size * dst, src_channel=size * src, tap=size * tap, turned=not dims.gathers,
            src_channels=dims.src_channels, dst_channels=dims.dst_channels, depths=dims.kernel[0],
        )  # fmt: skip

    def run(self, weights: Storage, low: int, high: int, to: int, stop: Stop) -> bool:
        """Transform the weights of some vectors of dst channels, counted through all groups; False if stopped."""
        room = arena_address("taps", self._room)
        for first in range(low, high, self._batch):
            if stop():
                return False
            place = to + (first - low) * self.block
            transform_filters(self._filters, address(weights), first, min(high, first + self._batch), room, place)
        return True


class WinogradShare:
    """Some images, groups, dst channels and positions of dst."""

    def __init__(self, problem: ConvProblem, part: Sequence[int]) -> None:
        self.problem, self.filters = problem, filter_share(problem)
        images, self.groups, self.span, self.depths, *plane = zip(part[::2], part[1::2], strict=True)
        dims, size, out = problem.dims, storage_dtype(problem.dtype).itemsize, self.span[1] - self.span[0]
        met = [_met(dims, depth) for depth in range(*self.depths)]
        taps = max(1, *map(len, met)) if met else 1

        vectors, dst_vectors = ceil(dims.src_channels / WIDTH), ceil(out / WIDTH)
        a_row, c_row = (count * VECTOR + GAP for count in (vectors, dst_vectors))
        tiles = [(low // 2, ceil(high / 2)) for low, high in plane]
        limit = max(1, STEPS.winograd_slab_bytes // (PRODUCTS * (taps * a_row + c_row)))
        self.slabs = cut_slabs([images, *tiles], dims.dst[1:], min(STEPS.winograd_slab_tiles, limit))
        most = int(tiles_of(self.slabs).max(initial=0))

        self.blocks = lane_blocks(dims.src_channels)
        pads = dims.pads[1:] if dims.gathers else tuple(2 - pad for pad in dims.pads[1:])
        side = side_of(
            problem, dims.src_channels, dims.src, self.slabs, wide=True, first=0, step=1, frames=1, pads=pads,
            line=a_row, block=PAIR, plane=most * a_row + GAP,
        )  # fmt: skip
        self._group = dims.src_channels * int(side["channel"][0])  # bytes
        self._tables = []
        for some in met:
            sides = side.repeat(len(some))
            sides["start"] += np.array([place for _, place in some], np.int64) * side["strides"][:, 1]
            self._tables.append((sides, self._elements([tap for tap, _ in some], int(side["plane"][0]))))
        self._stage, self._panels = len(self.blocks) * int(side["staged"][0]), FACTORS * int(side["plane"][0])

        self._steps = [size * step for step in data_steps(problem.data_format, problem.dst_channels, dims.dst)]
        in_place = problem.dtype == "f32" and self._steps[4] == size and out % WIDTH == 0
        self._outputs = row_of(
            Outputs, kind=KINDS[problem.dtype], in_place=in_place, start=0, strides=tuple(self._steps[:4]),
            channel=self._steps[4], channels=out, c_row=c_row, c_plane=most * c_row + GAP, b_plane=self.filters.plane,
            filters=0, bias=0, sums=0, staged=0,
        )  # fmt: skip
        self._rooms = {
            "stage": taps * self._stage,
            "panels": taps * self._panels,
            "sums": PRODUCTS * (most * c_row + GAP),
            "staged": 0 if in_place else 4 * most * PAIR,
        }
        macs = problem.macs * most * 4 // max(1, problem.groups * prod(dims.dst))
        self._batch = max(1, STEPS.band_batch_macs // max(1, macs))

    def run(self, inputs: Sequence[Storage], output: Storage, scratch: Storage, stop: Stop) -> bool:
        """Compute the share; False when `stop` ended it early."""
        dims, outputs, src = self.problem.dims, self._outputs.copy(), address(inputs[0])
        rooms = {name: arena_address(name, nbytes // 4) for name, nbytes in self._rooms.items()}
        outputs["sums"], outputs["staged"] = rooms["sums"], rooms["staged"]
        for group in range(*self.groups):
            first = group * self.filters.vectors + self.span[0] // WIDTH
            outputs["filters"] = address(scratch) + first * self.filters.block
            outputs["bias"] = address(self._bias(inputs, group))
            channel = group * dims.dst_channels + self.span[0]
            for depth, (sides, elements) in zip(range(*self.depths), self._tables, strict=True):
                outputs["start"] = address(output) + channel * self._steps[4] + depth * self._steps[1]
                sides, taps = sides.copy(), np.arange(len(sides))
                sides["start"] += src + group * self._group
                sides["end"] += src
                sides["stage"] = rooms["stage"] + taps * self._stage
                sides["panels"] = rooms["panels"] + taps * self._panels
                for low in range(0, len(self.slabs), self._batch):
                    if stop():
                        return False
                    slabs = self.slabs[low : low + self._batch]
                    add_products(micro_table(), sides, self.blocks, slabs, outputs, elements)
        return True

    def _elements(self, taps: Sequence[int], plane: int) -> Records:
        """List what a product sums: the src channels of each tap in the first axis, in parts of `SUMS.flush_steps`."""
        channels = self.problem.dims.src_channels
        parts = ceil(channels / SUMS.flush_steps)
        firsts = [channels * i // parts for i in range(parts + 1)]
        table = np.zeros(len(taps) * parts, Element.dtype)
        for row, (place, part) in zip(table, np.ndindex(len(taps), parts), strict=True):
            first, end = firsts[part], firsts[part + 1]
            row["a"] = place * FACTORS * plane + 4 * first
            row["b"] = (taps[place] * channels + first) * VECTOR
            row["steps"] = end - first
        table["flush"][:-1] = FLUSH
        table["flush"][: len(table) > 1] = FLUSH_FIRST
        return table

    def _bias(self, inputs: Sequence[Storage], group: int) -> Storage:
        """Return the bias of a group's channels as f32, in whole pairs of vectors, or zeros."""
        low, high = self.span
        line = arena("winograd bias", ceil((high - low) / (2 * WIDTH)) * 2 * WIDTH)
        line.fill(0)
        if len(inputs) > 2:
            first = group * self.problem.dims.dst_channels
            line[: high - low] = widen(inputs[2][first + low : first + high], self.problem.dtype)
        return line


def _met(dims: Dims, depth: int) -> list[tuple[int, int]]:
    """Return the taps that a depth of dst meets along the first axis, each with the depth of src."""
    found = []
    for tap in range(dims.kernel[0]):
        shift = tap * dims.dilations[0] - dims.pads[0]
        place, rest = (depth * dims.strides[0] + shift, 0) if dims.gathers else divmod(depth - shift, dims.strides[0])
        if rest == 0 and 0 <= place < dims.src[0]:
            found.append((tap, place))
    return found


@cached
def filter_share(problem: ConvProblem) -> FilterShare:
    """Prepare the weights' tables once."""
    return FilterShare(problem)


@cached
def share(problem: ConvProblem, part: tuple[int, ...]) -> WinogradShare:
    """Prepare a unit's tables once."""
    return WinogradShare(problem, part)
