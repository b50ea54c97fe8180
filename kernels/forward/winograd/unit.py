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

from kernels.arena import address
from kernels.blocks import STEPS, SUMS
from kernels.costs import COSTS
from kernels.forward.share import LANES
from kernels.forward.tiles import cut_units, way_cycles
from kernels.forward.winograd.share import filter_share, share
from kernels.plan import Stop, Storage, Unit
from kernels.problem import ConvProblem
from kernels.target import target
from kernels.winograd.rules import WinogradKernel, plane_products, plane_tiles

__all__ = ["ForwardWinograd"]


class ForwardWinograd(WinogradKernel):
    """Convolution and ConvTranspose by Winograd's F(2x2, 3x3)."""

    name = "forward_winograd"
    of = "Convolution", "ConvTranspose"

    def _slower(self, problem: ConvProblem) -> str | None:
        filters = filter_share(problem)
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
        filters = filter_share(problem)
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
            filters, (low, high) = filter_share(problem), unit.part
            return filters.run(inputs[1], low, high, address(scratch) + low * filters.block, stop)
        return share(problem, unit.part).run(inputs, output, scratch, stop)


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
