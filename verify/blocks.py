"""Large arrays block by block, so that their float64 copies stay small."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt

__all__ = ["Block", "blocks", "largest_within", "within"]

Block = tuple[slice, ...]

_BLOCK = 1 << 15
"""Elements of a block: their float64 copies stay in a processor's cache."""


def blocks(shape: tuple[int, ...]) -> Iterator[Block]:
    """Cut an array into blocks of about `_BLOCK` elements along its two longest axes."""
    longest = sorted(range(len(shape)), key=lambda axis: -shape[axis])[:2]
    steps, size = list(shape), prod(shape)
    for axis in longest:
        if size > _BLOCK:
            steps[axis] = max(1, steps[axis] * _BLOCK // size)
            size = prod(steps)
    ranges = [range(0, extent, max(1, step)) for extent, step in zip(shape, steps, strict=True)]
    for starts in product(*ranges):
        yield tuple([slice(at, at + step) for at, step in zip(starts, steps, strict=True)])


def within(block: Block, shape: tuple[int, ...]) -> Block:
    """Return the block of an array of this shape, which broadcasts to the one that `block` was cut from."""
    return tuple([slice(None) if size == 1 else part for part, size in zip(block, shape, strict=True)])


def largest_within(values: npt.NDArray[np.float64], axis: int, far: int) -> npt.NDArray[np.float64]:
    """Return for each element the largest magnitude among those that are up to so far away along an axis."""
    found = np.nan_to_num(np.abs(values))
    moved = np.moveaxis(found, axis, 0)
    source = moved.copy()
    for step in range(1, min(far, len(moved) - 1) + 1):
        np.maximum(moved[step:], source[:-step], out=moved[step:])
        np.maximum(moved[:-step], source[step:], out=moved[:-step])
    return found
