"""Cycles of a forward operation by Winograd and of direct sums: what ``algorithm="auto"`` chooses by.

The constants are in `kernels.costs`; `python -m benchmarks.regret --algorithms` measures the choice.
"""

from __future__ import annotations

from math import ceil, prod

from kernels.costs import COSTS
from kernels.forward.tiles import way_cycles
from kernels.problem import ConvProblem
from kernels.target import target
from kernels.winograd.work import plane_products, plane_tiles

__all__ = ["direct_cycles", "winograd_cycles"]


def direct_cycles(problem: ConvProblem) -> float:
    """Estimate the cycles of direct sums, which skip taps in the padding, and of packing the weights for them."""
    dims = problem.dims
    met = prod(dims.met(axis) / max(1, dims.kernel[axis] * dims.narrow[axis]) for axis in range(3))
    filters = dims.groups * dims.kernel[0] * dims.src_channels * ceil(dims.dst_channels / target().lanes)
    return way_cycles(problem) * met + COSTS.packed * filters


def winograd_cycles(problem: ConvProblem) -> float:
    """Estimate the cycles of Winograd for a problem that breaks none of its rules."""
    dims, lanes = problem.dims, target().lanes
    src, dst = ceil(dims.src_channels / lanes), ceil(dims.dst_channels / lanes)
    tiles, products = dims.n * plane_tiles(dims.dst[1:]), dims.n * plane_products(dims.dst[1:])
    frames = dims.met(0)
    cycles = frames * products * dims.src_channels * (dst // 2 + COSTS.single * (dst % 2))
    cycles += COSTS.tiled * tiles * (frames * src + dims.dst[0] * dst)
    cycles += COSTS.filtered * dims.kernel[0] * dims.src_channels * dst
    if problem.data_format == "NCX":
        cycles += COSTS.turned * dims.n * (frames * src * prod(dims.src[1:]) + dst * prod(dims.dst))
    return dims.groups * cycles
