"""ConvTranspose and Convolution on register tiles, in one of three ways, chosen from the problem alone.

Gather: every dst pixel sums its taps; pixels that share them are the rows of register tiles, dst channels their lanes.
Lanes: the same with groups as lanes, for depthwise and other small groups, or with all channels of several groups.

Scatter, for ConvTranspose: with few dst channels, lanes are (tap, dst channel) pairs; the products of a src pixel are
added to the dst pixels that they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from itertools import chain, pairwise, product
from math import ceil, prod
from operator import sub

from kernels.blocks import STEPS, SUMS
from kernels.cache import cached
from kernels.costs import COSTS
from kernels.emit.depthwise import grouped
from kernels.forward.operands import Share
from kernels.forward.share import LANES, Way, share
from kernels.plan import Stop, Storage, Unit, macs_of, work_of
from kernels.problem import ConvProblem, Dims, OpName
from kernels.target import target

__all__ = ["CONVOLUTION", "CONV_TRANSPOSE", "FORWARD_DOTS", "ForwardTiles", "cut_units", "way_costs"]

Shape = tuple[int, ...]
Grid = tuple[Sequence[int], Sequence[int]]
Order = Sequence[Sequence[int]]
WIDTH = target().lanes

WAITING = 1.1
"""Times as long as with the best order of axes that the busiest worker may compute, before that one is taken."""


def way_costs(dims: Dims, *, dots: bool = False) -> dict[Way, float]:
    """Estimate the cycles for one pixel of one group of the narrow tensor, which meets all taps.

    With `dots` products are those of bf16 pairs where they are gathered, or lanes exchanged. Where lanes are groups
    with several dst channels, but not as many src channels, lines of src fill more than a cache.
    """
    taps, out, channels = prod(dims.kernel), dims.dst_channels, dims.src_channels
    pixels, src = (prod(each) / max(1, prod(dims.narrow)) for each in (dims.dst, dims.src))
    whole, rest = divmod(out, LANES)
    lines = taps if dims.dilations[2] > 1 else taps // dims.kernel[2]
    same, words = grouped(channels, out, dots=dots), ceil(channels / 2) if dots else channels
    product = COSTS.exchanged if same else 1 if out > 1 else COSTS.single
    vectors = ceil(dims.groups * out / WIDTH) if same else out * ceil(dims.groups / WIDTH)
    costs: dict[Way, float] = {
        "gather": taps * words * (whole + (COSTS.single if 0 < rest <= WIDTH else rest > 0))
        + COSTS.gathered * pixels * ceil(out / LANES),
        "lanes": (product * taps * (words if same else channels) + COSTS.gathered_lanes * pixels)
        * vectors
        / dims.groups
        + (out > 1 and not same) * COSTS.copied * channels * out * src,
        "scatter": channels * ceil(taps * out / LANES)
        + COSTS.scattered_line * lines
        + COSTS.scattered_sum * taps * out
        + COSTS.scattered_pixel * pixels,
    }
    if same and dots:
        del costs["gather"]  # it packs each group by itself
    if dims.gathers or 4 * prod(dims.wide) * out > SUMS.weights_bytes:
        del costs["scatter"]
    return costs


def _way(problem: ConvProblem) -> Way:
    costs = way_costs(problem.dims, dots=target().dots == "avx512bf16" and problem.dtype == "bf16")
    return min(costs, key=lambda way: costs[way])


def way_cycles(problem: ConvProblem) -> float:
    """Estimate the cycles of the best way on register tiles."""
    dims = problem.dims
    return min(way_costs(dims).values()) * dims.groups * dims.n * prod(dims.narrow)


class ForwardTiles:
    """A forward operation on register tiles."""

    def __init__(self, name: str, op: OpName, *, dots: bool = False) -> None:
        self.name = name
        self.op = op
        self.dots = dots

    def refuse(self, problem: ConvProblem) -> str | None:
        """Take every problem of the operation; with `dots` those that dot products of bf16 compute."""
        if problem.op != self.op:
            return f"computes {self.op} only"
        if self.dots and problem.dtype != "bf16":
            return "computes bf16 only"
        one, way = problem.dims, _way(problem)
        pairs = way == "gather" or (way == "lanes" and grouped(one.src_channels, one.dst_channels, dots=self.dots))
        return None if pairs or not self.dots else "groups are lanes, or products are scattered"

    def speed(self, _: ConvProblem) -> int:
        """Return the speed, as a multiple of that on register tiles."""
        return 1

    def units(self, problem: ConvProblem, workers: int) -> tuple[list[Unit], int]:
        """Share out images, dst lines, groups, then lane blocks; lanes first where weights are the larger tensor.

        Units of images or lines pack all weights each, units of lanes all of src. So where the weights are not small,
        each worker gets one unit, or a few large ones between which those of other calls run.
        """
        sizes, steps = self.grid(problem)
        work, unit = work_of(problem), STEPS.unit_macs * self.speed(problem)
        wanted = max(1, min(workers, ceil(work / unit)), min(4 * workers, work // (2 * unit)))
        weights, src = prod(problem.weights_shape), prod(problem.src_shape)
        small, gathers = wanted * weights < src, _way(problem) == "gather"
        if not (small and gathers):
            turns = max(1, ceil(problem.macs / (workers * STEPS.most_forward_macs)))
            wanted = min(wanted, workers * turns)
        lanes, lines, cells = (1, 2), (3, 4, 5), _cells(sizes, steps)
        orders = [((0,), lines, lanes), ((0, *lanes), lines), (lines, (0, *lanes))]
        if weights > src and cells[1] * cells[2] >= wanted:
            orders.insert(0, (lanes, lines))
        elif not (small and (gathers or problem.data_format == "NXC")):
            orders.insert(0, orders[1])
        return cut_units(problem, (sizes, steps), orders, wanted, workers), 0

    def grid(self, problem: ConvProblem) -> Grid:
        """Return the sizes of (n, groups, a group's dst channels, d, h, w), and the steps in which units are cut."""
        dims, way = problem.dims, _way(problem)
        channels = LANES if way == "gather" else max(1, dims.dst_channels)
        sizes = problem.n, dims.groups, dims.dst_channels, *dims.dst
        return sizes, (1, WIDTH if way == "lanes" else 1, channels, 1, 1, 1)

    def run(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> bool:  # fmt: skip
        """Compute the dst box of one unit."""
        return not stop() and self.share(problem, unit).run(inputs, output, stop)

    @cached
    def share(self, problem: ConvProblem, unit: Unit) -> Share:
        """Prepare a unit's tables once: a service sees the same shapes again and again."""
        return share(problem, _way(problem), unit.part)


def _cells(sizes: Sequence[int], steps: Sequence[int]) -> list[int]:
    """Count the steps along each axis of `ForwardTiles.grid`; the last vector of groups is a whole one."""
    cells = [ceil(size / step) for size, step in zip(sizes, steps, strict=True)]
    cells[1] = max(min(1, sizes[1]), sizes[1] // steps[1])
    return cells


def _counts(cells: Sequence[int], order: Order, wanted: int) -> list[int]:
    """Cut into at least `wanted` parts if there are as many `cells`: axes in an `order`, one of d, h and w."""
    counts = [1] * len(cells)
    for axes in order:
        lines = next((axis for axis in axes if cells[axis] >= 2 * wanted), 5)
        for axis in (lines,) if axes[0] == 3 else axes:
            counts[axis] = min(wanted, max(1, cells[axis]))
            wanted = ceil(wanted / counts[axis])
    return counts


def _edges(size: int, step: int, cells: int, count: int) -> list[int]:
    """Cut an axis into parts as equal as whole cells allow."""
    return [*(step * (cells * i // count) for i in range(count)), size]


def cut_units(problem: ConvProblem, grid: Grid, orders: Sequence[Order], wanted: int, workers: int) -> list[Unit]:
    """Cut dst into about `wanted` units, along the axes of `ForwardTiles.grid`.

    The first of the `orders` of axes is taken, unless some workers would then wait for others: then the order in which
    they wait least.
    """
    wanted -= wanted % workers if wanted > workers else 0
    cells, cuts, times = _cells(*grid), [], []
    for order in orders:
        counts = _counts(cells, order, wanted)
        cuts.append([_edges(*axis) for axis in zip(*grid, cells, counts, strict=True)])
        loads = [0] * workers
        for sizes in product(*(map(sub, each[1:], each) for each in cuts[-1])):
            heapreplace(loads, loads[0] + prod(sizes))
        times.append(max(loads))
    edges = cuts[0 if times[0] <= WAITING * min(times) else times.index(min(times))]
    units: list[Unit] = []
    for spans in product(*(pairwise(each) for each in edges)):
        offset, shape = _box(problem, part := tuple(chain(*spans)))
        units.append(Unit(len(units), 0, offset, shape, macs_of(problem, shape), part))
    return units


def _box(problem: ConvProblem, part: Sequence[int]) -> tuple[Shape, Shape]:
    """Return offset and shape of a unit's part of dst."""
    n0, n1, g0, g1, c0, c1 = part[:6]
    each = problem.dims.dst_channels
    channel, channels = g0 * each + c0, (g1 - 1 - g0) * each + c1 - c0
    first, last = part[6::2][-problem.rank :], part[7::2][-problem.rank :]
    sizes = [high - low for low, high in zip(first, last, strict=True)]
    if problem.data_format == "NCX":
        return (n0, channel, *first), (n1 - n0, channels, *sizes)
    return (n0, *first, channel), (n1 - n0, *sizes, channels)


CONV_TRANSPOSE = ForwardTiles("conv_transpose_tiles", "ConvTranspose")
CONVOLUTION = ForwardTiles("convolution_tiles", "Convolution")
FORWARD_DOTS = (
    ForwardTiles(f"conv_transpose_{target().dots}", "ConvTranspose", dots=True),
    ForwardTiles(f"convolution_{target().dots}", "Convolution", dots=True),
)
