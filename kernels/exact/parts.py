"""How the reference cuts a problem into units, and where in memory a unit lies."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from kernels.exact.tables import Pair
from kernels.plan import Unit
from kernels.problem import ConvProblem

__all__ = [
    "MOST_MACS",
    "Part",
    "Tensor",
    "data_tensor",
    "dst_tensor",
    "is_lanewise",
    "padded",
    "part_of",
    "units_of",
    "words",
]

UNIT_MACS = 10_000_000
"""Multiply-adds that make a unit worth its message to a worker."""

MOST_MACS = 100_000_000
"""Multiply-adds from one look at whether to stop to the next, some milliseconds of them."""

MOST_SUMS = 1 << 20
"""Sums of a unit at the most: 8 MiB, or 24 where each takes three words."""

MOST_SRC = 1 << 21
"""Values of src of one tap that a unit of a forward operation packs at the most: 16 MiB."""

BLOCK = 32
"""Channels that are not cut apart."""


def words(problem: ConvProblem) -> int:
    """Return how many f64 hold a sum."""
    return 3 if problem.dtype == "f64" else 1


def padded(channels: int) -> int:
    """Return the f64 of a line of sums: whole vectors on every target."""
    return -(-channels // 8) * 8


def is_lanewise(problem: ConvProblem) -> bool:
    """Whether lanes are groups: each has one channel of src and one of dst."""
    convolves = not problem.op.startswith("BiasAdd")
    return convolves and 1 < problem.groups == problem.src_channels == problem.dst_channels


@dataclass(frozen=True)
class Tensor:
    """Steps in values of a data tensor: between positions (n, d, h, w), channels and groups."""

    sizes: tuple[int, int, int, int]
    steps: tuple[int, int, int, int]
    channel: int
    group: int


def data_tensor(problem: ConvProblem, channels: int, spatial: tuple[int, ...]) -> Tensor:
    """Return src or dst of a problem, with so many channels in all."""
    if problem.op.startswith("BiasAdd"):
        spatial = (1, 1, prod(spatial))
    d, h, w = (1,) * (3 - len(spatial)) + spatial
    n, pixels, of_group = problem.n, d * h * w, channels // problem.groups
    if problem.data_format == "NCX":
        return Tensor((n, d, h, w), (channels * pixels, h * w, w, 1), pixels, of_group * pixels)
    return Tensor((n, d, h, w), (channels * pixels, h * w * channels, w * channels, channels), 1, of_group)


def dst_tensor(problem: ConvProblem) -> Tensor:
    """Return dst or diff_dst of a problem."""
    return data_tensor(problem, problem.dst_channels, problem.dst_spatial)


@dataclass(frozen=True)
class Part:
    """What a unit computes: groups, channels of src and dst inside each, and positions of dst or taps.

    Those are (n, d, h, w) and (d, h, w).
    """

    groups: Pair
    src: Pair
    dst: Pair
    axes: tuple[Pair, ...]

    @property
    def positions(self) -> int:
        """Count positions or taps."""
        return prod(high - low for low, high in self.axes)


def part_of(unit: Unit) -> Part:
    """Return what a unit computes."""
    pairs = [(unit.part[i], unit.part[i + 1]) for i in range(0, len(unit.part), 2)]
    return Part(pairs[0], pairs[1], pairs[2], tuple(pairs[3:]))


class _Cut:
    """How many parts each axis is cut into: groups, channels of src and dst, then positions of dst or taps."""

    def __init__(self, problem: ConvProblem) -> None:
        self.problem, self.lanewise = problem, is_lanewise(problem)
        groups = 1 if problem.op.startswith("BiasAdd") else problem.groups
        self.sizes = [groups, problem.src_channels // groups, problem.dst_channels // groups]
        if problem.forward:
            self.sizes += dst_tensor(problem).sizes
        elif problem.computes == "diff_bias":
            self.sizes[1] = 1
            self.sizes += [1, 1, 1]
        else:
            self.sizes += problem.dims.kernel
        self.counts = [1] * len(self.sizes)

    def _most(self, axis: int) -> int:
        """Return how many parts an axis can have: src of a forward operation is not cut, channels only in one group."""
        if axis in (1, 2):
            whole = self.counts[0] < self.sizes[0] or (axis == 1 and self.problem.forward)
            whole = whole or (axis == 2 and self.problem.op == "BiasAdd")
            return 1 if whole else -(-self.sizes[axis] // BLOCK)
        return self.sizes[axis]

    def _part(self, axis: int) -> int:
        return -(-self.sizes[axis] // self.counts[axis])

    def _sums(self) -> int:
        """Return the sums of a part."""
        groups, rows, lanes = (self._part(axis) for axis in range(3))
        positions = prod(self._part(axis) for axis in range(3, len(self.sizes)))
        if self.lanewise:
            return positions * padded(groups)
        if self.problem.forward:
            return groups * positions * padded(lanes)
        return groups * positions * max(padded(rows) * lanes, rows * padded(lanes))

    def _reads_much(self) -> bool:
        """Whether a unit of a forward operation packs too much, or computes too long until it may stop."""
        if not self.problem.forward:
            return False
        positions = prod(self._part(axis) for axis in range(3, 7))
        channels = self._part(0) if self.lanewise else self.sizes[1]
        macs = positions * channels * prod(self.problem.kernel) * (1 if self.lanewise else min(BLOCK, self._part(2)))
        return positions * padded(channels) > MOST_SRC or macs > MOST_MACS

    def _packed(self, axis: int) -> int:
        """Return how many values all units pack if an axis is cut once more."""
        counts = [count * (1 + (i == axis)) for i, count in enumerate(self.counts)]
        sizes = [prod(shape) for shape in self.problem.input_shapes] + [0]
        places = prod(counts[3:])
        if self.problem.forward:
            return sizes[0] * counts[2] + sizes[1] * places
        return (sizes[0] * counts[2] + sizes[1] * counts[1]) * places

    def run(self, wanted: int) -> None:
        """Cut until there are so many parts, none of them too large, or nothing can be cut."""
        while True:
            few, large, much = prod(self.counts) < wanted, self._sums() > MOST_SUMS, self._reads_much()
            axes = [axis for axis in range(3 if much else 0, len(self.sizes)) if self.counts[axis] < self._most(axis)]
            if not axes or not (few or large or much):
                return
            axis = min(axes, key=self._packed)
            self.counts[axis] = min(2 * self.counts[axis], self._most(axis))

    def parts(self) -> list[Part]:
        """Return all parts."""
        ranges = []
        for axis, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            step = BLOCK if axis in (1, 2) and count > 1 else 1
            blocks = -(-size // step)
            edges = [min(size, blocks * i // count * step) for i in range(count + 1)]
            ranges.append(list(pairwise(edges)))
        return [Part(found[0], found[1], found[2], found[3:]) for found in product(*ranges)]


def units_of(problem: ConvProblem, workers: int) -> list[Unit]:
    """Cut a problem into units: by what takes the least packing, no sum in two."""
    cut = _Cut(problem)
    cut.run(max(1, min(4 * workers, problem.macs // UNIT_MACS)) if workers > 1 else 1)
    parts = cut.parts()
    units = []
    for index, part in enumerate(parts):
        offset, shape = _box(problem, part)
        pairs = (part.groups, part.src, part.dst, *part.axes)
        flat = tuple(value for pair in pairs for value in pair)
        images = part.axes[0][1] if problem.forward else None
        units.append(Unit(index, 0, offset, shape, problem.macs // len(parts), flat, images))
    return units


def _box(problem: ConvProblem, part: Part) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the box of the output that a part is."""
    if problem.computes == "diff_bias":
        pairs: list[Pair] = [part.dst]
    elif problem.forward:
        channels = _channels(part, problem.dst_channels // problem.groups, part.dst)
        spatial = part.axes[4 - problem.rank :]
        if problem.op == "BiasAdd":  # whole images
            channels, spatial = (0, problem.dst_channels), tuple((0, size) for size in problem.dst_spatial)
        pairs = (
            [part.axes[0], channels, *spatial] if problem.data_format == "NCX" else [part.axes[0], *spatial, channels]
        )
    else:
        pairs = []
        for letter in problem.weights_format:
            if letter == "X":
                pairs += part.axes[3 - problem.rank :]
                continue
            channels = part.src if letter == "I" else part.dst
            size = (problem.src_channels if letter == "I" else problem.dst_channels) // problem.groups
            pairs.append(channels if letter == problem.groups_axis else _channels(part, size, channels))
    return tuple(low for low, _ in pairs), tuple(high - low for low, high in pairs)


def _channels(part: Part, of_group: int, channels: Pair) -> Pair:
    """Return channels of the whole tensor: those of one group, or all of several."""
    low, high = part.groups
    return low * of_group + channels[0], (high - 1) * of_group + channels[1]
