"""Cycles of a Winograd weight gradient and of direct sums: what ``algorithm="auto"`` chooses by.

The constants are in `kernels.costs`; `python -m benchmarks.regret --algorithms` measures the choice.
"""

from __future__ import annotations

from math import prod

from kernels.costs import COSTS
from kernels.gradient.geometry import geometry
from kernels.gradient.roles import lines_cost, role_costs
from kernels.gradient.winograd.layout import layout
from kernels.problem import ConvProblem
from kernels.winograd.work import plane_products, plane_tiles

__all__ = ["direct_cycles", "winograd_cycles"]


def direct_cycles(problem: ConvProblem) -> float:
    """Estimate the cycles of direct sums on f32 register tiles, which skip taps in the padding."""
    dims = problem.dims
    row = min(role_costs(problem, geometry(problem)).values()) / dims.kernel[2]
    met = prod(dims.met(axis) for axis in range(3))
    return dims.groups * dims.n * met * row


def winograd_cycles(problem: ConvProblem) -> float:
    """Estimate the cycles of Winograd for a problem that breaks none of its rules."""
    dims, plan = problem.dims, layout(problem)
    lanes, vectors = dims.narrow_channels, [int(side["vectors"].sum()) for side in (plan.lanes, plan.scalars)]
    narrow, wide = vectors
    if plan.lanes_are_wide:
        lanes, narrow, wide = dims.wide_channels, wide, narrow
    frames, sums = dims.n * dims.met(0), vectors[0] * plan.rows
    tiles, products = plane_tiles(dims.narrow[1:]), plane_products(dims.narrow[1:])
    cycles = frames * products * lines_cost(lanes, plan.rows, 1, merged=False)
    cycles += COSTS.transformed * frames * tiles * (narrow + wide)
    cycles += COSTS.tapped * sums * dims.kernel[0] + COSTS.summed * sums * sum(map(len, plan.slabs))
    if problem.data_format == "NCX":
        cycles += COSTS.turned * frames * (narrow * prod(dims.narrow[1:]) + wide * prod(dims.wide[1:]))
    return dims.groups * cycles
