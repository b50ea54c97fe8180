"""Problems drawn as rows of a covering array, so that few of them have all pairs of border values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import numpy as np

from convgrad._check.problems import PER_AXIS, Ints, Problem, Takes

__all__ = ["LEVELS", "covering", "random_problem"]

T = TypeVar("T")

LEVELS = 31
"""Levels of each attribute in `covering`: a prime, and at least as many as there are attributes."""


def covering(rng: np.random.Generator, row: int) -> Callable[[Sequence[T]], T]:
    """Return a function that chooses from one sequence after the other, for a row of a covering array.

    Attribute k of row (x, y, z) has level x + k y + k^2 z modulo 31, as in a Reed-Solomon code: 31 rows have each
    level of each attribute, 961 each pair of levels of two attributes, and 29,791 each triple. `rng` permutes the
    levels, the same for all rows.
    """
    x, y, z = (row // LEVELS**power % LEVELS for power in range(3))
    attributes = count(0)

    def choose(values: Sequence[T]) -> T:
        k = next(attributes)
        level = rng.permutation(LEVELS)[(x + k * y + k * k * z) % LEVELS]
        return values[int(level) % len(values)]

    return choose


# Border values of the attributes: the small ones, and those around the powers of two; frequent ones more than once.
# An `_ANY` is any number up to 300, small ones more likely.
_ANY = 0
_BORDERS = (7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
_SIZES = (1, 2, 3, 4, 5, 5, 6, *_BORDERS, 2, 3, 4, 9, _ANY, _ANY)
_CHANNELS = (1, 2, 3, 4, 5, 6, 1, 2, 3, 4, *_BORDERS, 12, _ANY, _ANY)
_BATCHES = (1, 2, 3, 4, 5, 6, *[1] * 6, 2, 2, 2, 3, *_BORDERS[:12], 129, 255, _ANY)
_GROUPS = (*[1] * 14, 2, 3, 4, 5, 2, *_BORDERS[:9:2], 6, 8, 16, 64, 65, 129, _ANY)
_KERNELS = (1, 2, 3, 4, 5, 6, *[1] * 4, *[3] * 5, 2, 5, *_BORDERS[:10], 65, 129, 12, _ANY)
_STEPS = (1, 2, 3, 4, 5, 6, *[1] * 9, *[2] * 3, 3, *_BORDERS[:9], 64, 129, _ANY)
_LEVELS = {"n": _BATCHES, "groups": _GROUPS, "I": _CHANNELS, "O": _CHANNELS}
_AXIS_LEVELS = {"size": _SIZES, "kernel": _KERNELS, "stride": _STEPS, "dilation": _STEPS}


def _no_pad(_: int) -> int:
    return 0


# Pads by the extent of the kernel.
_PADS: tuple[Callable[[int], int], ...] = (
    *[_no_pad] * 9, *[lambda _: 1] * 5, *[lambda _: 2] * 2, *[lambda _: 3] * 2, *[lambda extent: extent // 2] * 4,
    *[lambda extent: extent - 1] * 3, lambda extent: extent, lambda extent: extent + 1,
    lambda _: 4, lambda _: 7, lambda _: 8, lambda _: 17,
)  # fmt: skip


@dataclass
class _Draft:
    """A problem whose sizes may still be reduced: `pads` follow the extent of the kernel.

    `of_narrow` says of each axis whether its size is that of the narrow tensor, `grows` whether a kernel that does not
    fit gets more padding or a wider tensor, and `rest` which share of a stride is left over.
    """

    takes: Takes
    members: dict[str, Any]
    sizes: dict[str, int]
    pads: Sequence[tuple[Callable[[int], int], ...]]
    of_narrow: list[int]
    grows: list[int]
    rest: list[float]

    def problem(self) -> Problem:
        """Return the problem as it is."""
        groups, i = self.sizes["groups"], self.sizes["I"]
        names = ("wide", *PER_AXIS)
        axes: Any = zip(*map(self._axis, range(len(self.pads))), strict=True)
        return Problem(**self.members, n=self.sizes["n"], groups=groups, src_channels=groups * i,
                       dst_channels=groups * self.sizes.get("O", i), **dict(zip(names, axes, strict=True)))  # fmt: skip

    def _axis(self, axis: int) -> Ints:
        size, kernel, stride, dilation = (self.sizes.get(f"{name} {axis}", 1) for name in _SIZED)
        extent = (kernel - 1) * dilation + 1
        begin, end = (min(pad(extent), 300) for pad in self.pads[axis]) if self.takes.pads else (0, 0)
        end = end if self.takes.uneven_pads else begin
        if self.of_narrow[axis]:
            size = max(1, (size - 1) * stride + extent - begin - end + int(self.rest[axis] * stride))
        missing = max(0, extent - size - begin - end)
        if self.grows[axis] and self.takes.pads and self.takes.uneven_pads:
            return size, kernel, stride, dilation, begin, end + missing
        return size + missing, kernel, stride, dilation, begin, end

    def reduce(self, macs: int, order: Sequence[str]) -> None:
        """Halve the largest sizes, but the first three of `order` only if all others are small."""
        kept = 3
        while self.problem().work > macs and max(self.sizes.values()) > 1:
            name = max(order[kept:], key=lambda each: self.sizes[each])
            if self.sizes[name] > 2 or not kept:
                self.sizes[name] //= 2
            else:
                kept -= 1


_SIZED = ("size", "kernel", "stride", "dilation")


def random_problem(
    rng: np.random.Generator, takes: Takes, op: str, dtype: str, macs: int, choose: Callable[[Sequence[Any]], Any]
) -> Problem:
    """Return the problem whose attributes `choose` chooses, reduced to about `macs` multiply-adds.

    What has no levels, and what is reduced first, is drawn by `rng`.
    """
    ranks = [rank for rank in takes.ranks if not (op == "BiasAddBackward" and rank == 1)]
    rank = choose([each for each in (1, 2, 2, 2, 3) if each in ranks] or ranks)
    members = {"op": op, "dtype": dtype, "data_format": choose(takes.data_formats),
               "weights_format": choose(takes.weights_formats),
               "bias": choose((False, True)) and takes.bias and op in ("Convolution", "ConvTranspose")}  # fmt: skip
    sizes = {name: choose(values) for name, values in _LEVELS.items()}
    multiplier = choose((None, None, None, (1, 1), (1, 2), (3, 1)))
    square, pads = choose((False, True)), []
    for axis in range(rank):
        sizes |= {f"{name} {axis}": choose(_AXIS_LEVELS[name]) for name in _SIZED}
        pads.append((choose(_PADS), choose(_PADS)))
        if square and axis:
            sizes |= {f"{name} {axis}": sizes[f"{name} 0"] for name in _SIZED[1:]}
            pads[axis] = pads[0]
    if sizes["groups"] != 1 and multiplier:  # depthwise, with a multiplier, and its reverse
        sizes["I"], sizes["O"] = multiplier
    left_out = {"groups"} if not takes.groups else set()
    left_out |= {"stride"} if not takes.strides else set()
    left_out |= {"dilation"} if not takes.dilations else set()
    if op.startswith("BiasAdd"):
        left_out, pads = {"groups", "O", *_SIZED[1:]}, [(_no_pad, _no_pad)] * rank
    for name, size in sizes.items():
        chosen = size if size != _ANY else int(np.exp(rng.uniform(0.7, 5.7)))
        sizes[name] = 1 if name.split()[0] in left_out and name != "O" else chosen
    if "O" in left_out:
        del sizes["O"]
    of_narrow, grows = rng.integers(2, size=(2, rank)).tolist()
    draft = _Draft(takes, members, sizes, pads, of_narrow, grows, rng.random(rank).tolist())
    draft.reduce(macs, [str(name) for name in rng.permutation(list(sizes))])
    found = takes.limited(draft.problem())
    assert found is not None
    return found
