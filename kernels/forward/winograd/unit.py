"""Convolution and ConvTranspose of 3x3 kernels by Winograd's F(2x2, 3x3): 16 products of channels where direct sums
have 36.

Loops, outermost first: (7) groups; (6) depths of dst; (5) slabs of tiles, between which a worker may stop; (4) the 16
products, a slab being transformed for the four of each vertical one; (3) pairs of vectors of dst channels; (2) tiles as
rows of register tiles, the batch-reduce micro-kernels of the direct sums; (1) src channels of each tap in the first
axis. Loops 1 to 5 are compiled (`kernels.forward.winograd.driver`). Weights are transformed once for a call, by the
units of a first stage.

Each output is a sum in one order whatever slab, unit or register tile it lies in, so its bits depend on neither.

Sums of integers are exact up to 36 C S G = 2**24 with C products of a tap and S and G the largest magnitudes: V and U
are up to 4 S and 9/4 G, U in quarters, and no sum of the outer transforms exceeds 9 C S G. Inf and NaN reach every
element that direct sums give them to, and others of the same tile, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, prod

import numpy as np

from kernels.arena import address, arena, arena_address
from kernels.blocks import STEPS, SUMS
from kernels.cache import cached
from kernels.costs import COSTS
from kernels.dtypes import KINDS
from kernels.emit.brgemm import FLUSH, FLUSH_FIRST, Element, micro_table
from kernels.emit.compiler import Records, row_of
from kernels.emit.winograd import FACTORS
from kernels.forward.share import LANES
from kernels.forward.tiles import cut_units, way_cycles
from kernels.forward.winograd.driver import KERNEL, Filters, Outputs, add_products, transform_filters
from kernels.gradient.roles import lane_blocks
from kernels.plan import Stop, Storage, Unit
from kernels.problem import ConvProblem, Dims, data_steps, storage_dtype
from kernels.reference import widen
from kernels.target import target
from kernels.winograd.rules import WinogradKernel, plane_products, plane_tiles
from kernels.winograd.slabs import cut_slabs, side_of, tiles_of
from kernels.winograd.tiles import GAP, PAIR, PRODUCTS, VECTOR, WIDTH

__all__ = ["ForwardWinograd"]


class ForwardWinograd(WinogradKernel):
    """Convolution and ConvTranspose by Winograd's F(2x2, 3x3)."""

    name = "forward_winograd"
    of = "Convolution", "ConvTranspose"

    def _slower(self, problem: ConvProblem) -> str | None:
        filters = _filters(problem)
        if filters.total * filters.block > SUMS.winograd_weights_bytes:
            return (
                f"algorithm is auto; winograd pays up to {SUMS.winograd_weights_bytes} bytes of transformed weights,"
                f" and they have {filters.total * filters.block}"
            )
        return super()._slower(problem)

    def cycles(self, problem: ConvProblem) -> tuple[float, float]:
        """Estimate the cycles of Winograd and of direct sums, which skip taps in the padding."""
        dims, lanes = problem.dims, target().lanes
        src, dst = ceil(dims.src_channels / lanes), ceil(dims.dst_channels / lanes)
        tiles, products = dims.n * plane_tiles(dims.dst[1:]), dims.n * plane_products(dims.dst[1:])
        frames, filters = dims.met(0), dims.kernel[0] * dims.src_channels * dst
        cycles = frames * products * dims.src_channels * (dst // 2 + COSTS.single * (dst % 2))
        cycles += COSTS.tiled * tiles * (frames * src + dims.dst[0] * dst)
        cycles += COSTS.filtered * filters
        if problem.data_format == "NCX":
            cycles += COSTS.turned * dims.n * (frames * src * prod(dims.src[1:]) + dst * prod(dims.dst))
        met = prod(dims.met(axis) / max(1, dims.kernel[axis] * dims.narrow[axis]) for axis in range(3))
        return dims.groups * cycles, way_cycles(problem) * met + COSTS.packed * dims.groups * filters

    def units(self, problem: ConvProblem, workers: int) -> tuple[list[Unit], int]:
        """Share out the weights by vectors of dst channels, then dst in whole tiles."""
        filters = _filters(problem)
        wanted = max(1, min(workers, filters.total, prod(problem.weights_shape) // STEPS.winograd_unit_weights))
        each = ceil(filters.total / wanted)
        parts = ceil(filters.total / each)  # equal shares of the scratch; the last one may be used in part
        first = [
            Unit(i, 0, None, None, 0, (i * each, min(filters.total, (i + 1) * each))) for i in range(parts)
        ]  # fmt: skip
        second = [replace(unit, index=parts + unit.index, stage=1) for unit in _dst_units(problem, workers)]
        return first + second, parts * each * filters.block

    def run(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> bool:  # fmt: skip
        """Transform some of the weights, or compute the dst box of one unit."""
        if stop():
            return False
        assert scratch is not None
        if unit.offset is None:
            filters, (low, high) = _filters(problem), unit.part
            return filters.run(inputs[1], low, high, address(scratch) + low * filters.block, stop)
        return _share(problem, unit.part).run(inputs, output, scratch, stop)


def _dst_units(problem: ConvProblem, workers: int) -> list[Unit]:
    """Share out images, groups, then lines of tiles; few tiles by groups and dst channels, for each of which they are
    transformed anew."""
    dims = problem.dims
    sizes, steps = (problem.n, dims.groups, dims.dst_channels, *dims.dst), (1, 1, LANES, 1, 2, 2)
    cells = [ceil(size / step) for size, step in zip(sizes, steps, strict=True)]
    wanted = int(max(1, min(4 * workers, problem.macs // STEPS.unit_macs)))
    counts = [1] * 6
    order = 0, 1, max(range(3, 6), key=lambda axis: cells[axis])
    if prod(cells) // max(1, cells[2]) < STEPS.winograd_slab_tiles * wanted:
        wanted, order = min(wanted, workers), (1, 2, 0)
    for axis in order:
        counts[axis] = max(1, min(cells[axis], ceil(wanted / prod(counts))))
    return cut_units(problem, sizes, steps, counts)


class _FilterShare:
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
        self._batch = max(1, STEPS.unit_sums_bytes // self.block)
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


class _Share:
    """Some images, groups, dst channels and positions of dst."""

    def __init__(self, problem: ConvProblem, part: Sequence[int]) -> None:
        self.problem, self.filters = problem, _filters(problem)
        images, self.groups, self.span, self.depths, *plane = zip(part[::2], part[1::2], strict=True)
        dims, size, out = problem.dims, storage_dtype(problem.dtype).itemsize, self.span[1] - self.span[0]
        met = [_met(dims, depth) for depth in range(*self.depths)]
        taps = max(1, *map(len, met)) if met else 1

        vectors, dst_vectors = ceil(dims.src_channels / WIDTH), ceil(out / WIDTH)
        a_row, c_row = (count * VECTOR + GAP for count in (vectors, dst_vectors))
        tiles = [(low // 2, ceil(high / 2)) for low, high in plane]
        limit = max(1, STEPS.unit_sums_bytes // (PRODUCTS * (taps * a_row + c_row)))
        self.slabs = cut_slabs([images, *tiles], dims.dst[1:], min(STEPS.winograd_slab_tiles, limit))
        most = int(tiles_of(self.slabs).max(initial=0))

        self.blocks = lane_blocks(dims.src_channels)
        pads = dims.pads[1:] if dims.gathers else tuple(2 - pad for pad in dims.pads[1:])
        side = side_of(
            problem, dims.src_channels, dims.src, self.slabs, wide=True, first=0, step=1, frames=1, pads=pads,
            line=a_row, block=PAIR, plane=most * a_row + GAP,
        )  # fmt: skip
        self._group = dims.src_channels * int(side["channel"][0])  # bytes
        stage, panels, self._tables = len(self.blocks) * int(side["staged"][0]), FACTORS * int(side["plane"][0]), []
        for some in met:
            sides, number = side.repeat(len(some)), np.arange(len(some))
            sides["start"] += np.array([place for _, place in some], np.int64) * side["strides"][:, 1]
            sides["stage"], sides["panels"] = number * stage, number * panels
            self._tables.append((sides, self._elements([tap for tap, _ in some], panels)))

        self._steps = [size * step for step in data_steps(problem.data_format, problem.dst_channels, dims.dst)]
        in_place = problem.dtype == "f32" and self._steps[4] == size and out % WIDTH == 0
        self._outputs = row_of(
            Outputs, kind=KINDS[problem.dtype], in_place=in_place, start=0, strides=tuple(self._steps[:4]),
            channel=self._steps[4], channels=out, c_row=c_row, c_plane=most * c_row + GAP, b_plane=self.filters.plane,
            filters=0, bias=0, sums=0, staged=0,
        )  # fmt: skip
        self._rooms = {
            "stage": taps * stage,
            "panels": taps * panels,
            "sums": PRODUCTS * (most * c_row + GAP),
            "staged": 0 if in_place else 4 * most * PAIR,
        }
        macs = problem.macs * most * 4 // max(1, problem.groups * prod(dims.dst))
        self._batch = max(1, STEPS.batch_macs // max(1, macs))

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
                sides = sides.copy()
                sides["start"] += src + group * self._group
                sides["end"] += src
                sides["stage"] += rooms["stage"]
                sides["panels"] += rooms["panels"]
                for low in range(0, len(self.slabs), self._batch):
                    if stop():
                        return False
                    slabs = self.slabs[low : low + self._batch]
                    add_products(micro_table(), sides, self.blocks, slabs, outputs, elements)
        return True

    def _elements(self, taps: Sequence[int], panels: int) -> Records:
        """List what a product sums: the src channels of each tap in the first axis, in parts of `SUMS.flush_steps`.

        `panels` are the bytes of a tap.
        """
        channels = self.problem.dims.src_channels
        parts = ceil(channels / SUMS.flush_steps)
        firsts = [channels * i // parts for i in range(parts + 1)]
        table = np.zeros(len(taps) * parts, Element.dtype)
        for row, (place, part) in zip(table, np.ndindex(len(taps), parts), strict=True):
            first, end = firsts[part], firsts[part + 1]
            row["a"] = place * panels + 4 * first
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
def _filters(problem: ConvProblem) -> _FilterShare:
    """Prepare the weights' tables once."""
    return _FilterShare(problem)


@cached
def _share(problem: ConvProblem, part: tuple[int, ...]) -> _Share:
    """Prepare a unit's tables once."""
    return _Share(problem, part)
