"""What Winograd's algorithm costs for a problem, and which integers it sums exactly."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, prod

from kernels.problem import ConvProblem

__all__ = ["exact_factor", "plane_products", "plane_tiles", "winograd_macs"]


def winograd_macs(problem: ConvProblem) -> int:
    """Count the multiply-adds: 16 for each 2x2 tile and pair of channels, where direct sums have 36."""
    dims = problem.dims
    return 16 * _tiles(problem) * dims.kernel[0] * dims.groups * dims.wide_channels * dims.narrow_channels


def exact_factor(problem: ConvProblem) -> int:
    """Return the factor F: integers up to S and G in magnitude are summed exactly if F S G is at most 2**24.

    Transformed gradients have up to 4 S and 4 G, and are summed over all tiles. In forward operations a product has up
    to 4 S times 9/4 G, in quarters, and is summed over the src channels of all taps in the first axis.
    """
    dims = problem.dims
    return 36 * dims.src_channels * dims.kernel[0] if problem.forward else 16 * _tiles(problem)


def plane_tiles(plane: Iterable[int]) -> int:
    """Count the 2x2 tiles of a plane of so many lines and columns."""
    return prod(ceil(size / 2) for size in plane)


def plane_products(plane: Iterable[int]) -> int:
    """Count the products of these tiles: the last one of an odd line or column has three along it, not four."""
    return prod(4 * ceil(size / 2) - size % 2 for size in plane)


def _tiles(problem: ConvProblem) -> int:
    """Count the 2x2 tiles of dst, or those of the narrow tensor that one sum has at the most."""
    dims = problem.dims
    depths, *plane = dims.dst if problem.forward else dims.narrow
    return dims.n * depths * plane_tiles(plane)
