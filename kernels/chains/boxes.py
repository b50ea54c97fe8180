"""What both kinds of sums share: boxes of positions that a cache holds, and tensors packed as float64 by NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.arena import arena
from kernels.emit.compiler import Records
from kernels.problem import ConvProblem

__all__ = ["Array", "Stored", "box_of", "cut", "groups_of", "panels_of", "room", "steps_of", "up"]

Array = npt.NDArray[np.float64]

Stored = Callable[[int, int], npt.NDArray[Any]]
"""Returns an image of an input in f32 or float64, given both numbers; weights and bias are the same for each image."""

_BOX_BYTES = 1 << 19
"""What a box should take of a cache: it stays in L2."""

_POSITIONS = 1 << 8
"""Positions of a box, even if they take more of a cache: packing fewer takes as long."""

_LEAST_POSITIONS, _CALL_MACS = 1 << 6, 1 << 28
"""Positions of a box at least, multiply-adds at most: a unit checks every few milliseconds if it was cancelled."""

_MOST_BYTES = 1 << 22
"""What all groups of a box may take: scratch."""


def up(count: int, step: int) -> int:
    """Round up to a multiple of a step."""
    return ceil(count / step) * step


def cut(sizes: Sequence[int], group: int, whole: int, macs: int) -> list[tuple[list[int], list[int]]]:
    """Cut a box into boxes, low and high, whose positions follow each other in order.

    A position takes `group` bytes for each group and `whole` for all of them, and so many multiply-adds.
    """
    most = min(max(_POSITIONS, _BOX_BYTES // group), _MOST_BYTES // whole, _CALL_MACS // max(1, macs))
    most = max(_LEAST_POSITIONS, most)
    axis = next(axis for axis in range(3) if axis == 2 or prod(sizes[axis + 1 :]) <= most)
    step = max(1, most // max(1, prod(sizes[axis + 1 :])))
    step = max(1, ceil(sizes[axis] / max(1, ceil(sizes[axis] / step))))  # as equal as they can be

    def boxes() -> Iterator[tuple[list[int], list[int]]]:
        for place in np.ndindex(*sizes[:axis], ceil(sizes[axis] / step)):
            low = [*place[:axis], place[axis] * step, *[0] * (2 - axis)]
            high = [*(at + 1 for at in place[:axis]), min(sizes[axis], (place[axis] + 1) * step), *sizes[axis + 1 :]]
            yield low, high

    return list(boxes())


def room(name: str, *shape: int) -> Array:
    """Return scratch memory of this thread; its content is undefined."""
    count = prod(shape)
    return arena(name, 2 * count)[: 2 * count].view(np.float64).reshape(shape)


def steps_of(unit: int, sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the steps along (n, d, h, w) of a dense box whose positions take a `unit`."""
    return np.array([unit * prod(sizes[axis:]) for axis in range(4)], np.int64)


def box_of(values: npt.NDArray[Any], box: Records) -> npt.NDArray[Any]:
    """Return what is inside a `kernels.gradient.tiles.records.Box`."""
    first, sizes = box["first"][0, 1:].tolist(), box["sizes"][0, 1:].tolist()
    return values[*(slice(low, low + size) for low, size in zip(first, sizes, strict=True))]


def groups_of(tensor: npt.NDArray[Any], problem: ConvProblem) -> npt.NDArray[Any]:
    """View an image of a data tensor as (D, H, W, groups, channels of a group)."""
    last = tensor[0] if problem.data_format == "NXC" else np.moveaxis(tensor[0], 0, -1)
    found: npt.NDArray[Any] = last.reshape(*(1,) * (4 - last.ndim), *last.shape[:-1], problem.groups, -1)
    return found


def panels_of(lines: npt.NDArray[Any], lanes: int) -> Array:
    """Pack (blocks, .., lanes) as float64 panels (blocks, panels of so many lanes, .., lanes), padded with zeros."""
    outer, *inner, count = lines.shape
    panels = np.zeros((outer, ceil(count / lanes), *inner, lanes))
    for panel in range(panels.shape[1]):
        some = lines[..., panel * lanes : (panel + 1) * lanes]
        panels[:, panel, ..., : some.shape[-1]] = some
    return panels
