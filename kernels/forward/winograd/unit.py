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

from kernels.arena import address
from kernels.blocks import STEPS, SUMS
from kernels.cache import cached
from kernels.costs import COSTS
from kernels.emit.brgemm import FLUSH, FLUSH_FIRST, Element, micro_table
from kernels.emit.compiler import Records, row_of
from kernels.emit.winograd import FACTORS
from kernels.forward.operands import Share
from kernels.forward.share import LANES
from kernels.forward.tiles import cut_units, way_cycles
from kernels.forward.winograd.driver import KERNEL, Tiling, add_products, transform_filters
from kernels.gradient.roles import lane_blocks
from kernels.plan import Stop, Storage, Unit
from kernels.problem import ConvProblem, Dims
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
        nbytes = problem.groups * _vectors(problem) * _block(problem)
        if nbytes > SUMS.winograd_weights_bytes:
            return (
                f"algorithm is auto; winograd pays up to {SUMS.winograd_weights_bytes} bytes of transformed weights,"
                f" and they have {nbytes}"
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
        total = problem.groups * _vectors(problem)
        wanted = max(1, min(workers, total, prod(problem.weights_shape) // STEPS.winograd_unit_weights))
        each = ceil(total / wanted)
        parts = ceil(total / each)  # equal shares of the scratch; the last one may be used in part
        first = [Unit(i, 0, None, None, 0, (i * each, min(total, (i + 1) * each))) for i in range(parts)]
        second = [replace(unit, index=parts + unit.index, stage=1) for unit in _dst_units(problem, workers)]
        return first + second, parts * each * _block(problem)

    def run(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> bool:  # fmt: skip
        """Transform some of the weights, or compute the dst box of one unit."""
        if stop():
            return False
        assert scratch is not None
        return _share(problem, unit.part).run(inputs, scratch if unit.offset is None else output, stop, scratch)


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
    return cut_units(problem, sizes, steps, cells, counts)


def _vectors(problem: ConvProblem) -> int:
    """Count the vectors of dst channels of a group."""
    return ceil(problem.dims.dst_channels / WIDTH)


def _block(problem: ConvProblem) -> int:
    """Return the bytes of the transformed weights of one vector of dst channels."""
    return PRODUCTS * problem.dims.kernel[0] * problem.dims.src_channels * VECTOR


class _FilterShare(Share):
    """The weights of some vectors of dst channels, which are transformed once for a call."""

    def __init__(self, problem: ConvProblem, part: Sequence[int]) -> None:
        dims = problem.dims
        super().__init__(problem, (0, dims.n, 0, dims.groups, 0, dims.dst_channels, *(0, 0) * 3))
        self.low, self.high = part
        self.floats["panels"] = KERNEL * dims.src_channels * WIDTH
        self.part = self.one_pass(0, dims.groups, dims.dst_channels)
        self.share = _tiling(self, in_place=False, c_row=0, c_plane=0)

    def run(
        self, inputs: Sequence[Storage], output: Storage, stop: Stop, scratch: Storage | None = None
    ) -> bool:  # fmt: skip
        """Transform them to their place in the `output`, which is the scratch of all units."""
        call, block = self.call(inputs, output), _block(self.problem)
        step = max(1, STEPS.winograd_batch_bytes // block)
        for first in range(self.low, self.high, step):
            if stop():
                return False
            last, to = min(self.high, first + step), address(output) + first * block
            transform_filters(self.share, self.part, call, first, last, to)
        return True


class _Share(Share):
    """Some images, groups, dst channels and positions of dst."""

    def __init__(self, problem: ConvProblem, part: Sequence[int]) -> None:
        super().__init__(problem, part)
        dims, out = self.dims, self.channels[1] - self.channels[0]
        images, self.depths, *plane = self.spans
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
        stage, panels, self._tables = len(self.blocks) * int(side["staged"][0]), FACTORS * int(side["plane"][0]), []
        for some in met:
            sides, number = side.repeat(len(some)), np.arange(len(some))
            sides["start"] += np.array([place for _, place in some], np.int64) * side["strides"][:, 1]
            sides["stage"], sides["panels"] = number * stage, number * panels
            self._tables.append((sides, self._elements([tap for tap, _ in some], panels)))

        c_plane, in_place = most * c_row + GAP, problem.dtype == "f32" and self.near_dst and out % WIDTH == 0
        self.share = _tiling(self, in_place=in_place, c_row=c_row, c_plane=c_plane)
        self.floats["source"], self.floats["panels"] = taps * stage // 4, taps * panels // 4
        self.floats["products"] = PRODUCTS * c_plane // 4 + ceil(out / LANES) * LANES
        self.floats["sums"] = 0 if in_place else most * PAIR
        macs = problem.macs * most * 4 // max(1, problem.groups * prod(dims.dst))
        self._batch = max(1, STEPS.band_batch_macs // max(1, macs))

    def run(
        self, inputs: Sequence[Storage], output: Storage, stop: Stop, scratch: Storage | None = None
    ) -> bool:  # fmt: skip
        """Compute the share with the transformed weights in `scratch`; False when `stop` ended it early."""
        assert scratch is not None
        call, (low, high) = self.call(inputs, output), self.channels
        for group in range(self.g0, self.g1):
            part = self.one_pass(group - self.g0, 1, high - low, low)
            vector = group * _vectors(self.problem) + low // WIDTH
            call["weights"] = address(scratch) + vector * _block(self.problem)
            part["dst"]["start"] += self.depths[0] * part["dst"]["strides"][:, 1]
            for sides, elements in self._tables:
                sides = sides.copy()
                sides["start"] += call["src"] + part["src"]["start"]
                sides["end"] += call["src"]
                sides["stage"] += call["source"]
                sides["panels"] += call["panels"]
                for first in range(0, len(self.slabs), self._batch):
                    if stop():
                        return False
                    slabs = self.slabs[first : first + self._batch]
                    add_products(micro_table(), sides, self.blocks, slabs, self.share, part, call, elements)
                part["dst"]["start"] += part["dst"]["strides"][:, 1]
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


def _tiling(share: Share, *, in_place: bool, c_row: int, c_plane: int) -> Records:
    """Return the facts of a share."""
    dims = share.dims
    return row_of(
        Tiling, kind=share.kind, turned=not dims.gathers, channels=dims.src_channels, depths=dims.kernel[0],
        in_place=in_place, c_row=c_row, c_plane=c_plane,
    )  # fmt: skip


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
def _share(problem: ConvProblem, part: tuple[int, ...]) -> _FilterShare | _Share:
    """Prepare a unit's tables once."""
    return _FilterShare(problem, part) if len(part) == 2 else _Share(problem, part)
