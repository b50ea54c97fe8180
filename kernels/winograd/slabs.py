"""Tiles that are transformed at a time: whole images where these are small, or lines of one, or parts of a line.

Also the tensors that they are tiles of.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import Any

import numpy as np

from kernels.dtypes import KINDS
from kernels.emit.compiler import Records, Vector, row_of
from kernels.problem import ConvProblem, data_steps, storage_dtype, wrapped
from kernels.target import target
from kernels.winograd.tiles import PAIR, Side, TileSlab

__all__ = ["cut_slabs", "side_of", "tiles_of"]


def cut_slabs(spans: Sequence[tuple[int, int]], plane: Sequence[int], limit: int) -> Records:
    """Cut tiles into slabs of at most `limit`; `spans` are those of (frames, lines, columns) of tiles.

    `plane` has the lines and columns of all positions, two of which a tile has along each axis.
    """
    counts = [high - low for low, high in spans]
    sizes = [max(1, limit // max(1, counts[1] * counts[2])), max(1, limit // max(1, counts[2])), limit]
    cuts = []
    for (low, _), total, size in zip(spans, counts, sizes, strict=True):
        parts = ceil(total / size)
        cuts.append([(low + total * i // parts, low + total * (i + 1) // parts) for i in range(parts)])
    table = np.zeros([len(cut) for cut in cuts], TileSlab.dtype)
    for axis, cut in enumerate(cuts):
        shape = [-1 if other == axis else 1 for other in range(3)]
        first, end = np.array(cut, np.int64).reshape(-1, 2).T
        table["low"][..., axis], table["high"][..., axis] = first.reshape(shape), end.reshape(shape)
        if axis:
            odd = (plane[axis - 1] % 2 != 0) & (end == ceil(plane[axis - 1] / 2))
            table["odd"][..., axis - 1] = odd.reshape(shape)
    return table.reshape(-1)


def tiles_of(slabs: Records) -> Vector:
    """Count the tiles of each slab."""
    return (slabs["high"] - slabs["low"]).prod(1)  # type: ignore[no-any-return]


def side_of(
    problem: ConvProblem, channels: int, spatial: tuple[int, int, int], slabs: Records, *, wide: bool, first: int,
    step: int, **others: Any,
) -> Records:  # fmt: skip
    """Return the `Side` of a tensor with so many channels of a group, of whose depths each `step` is a frame.

    Addresses count from the tensor's, and `others` are as in `Side`.
    """
    size = storage_dtype(problem.dtype).itemsize
    image, depth, row, pixel, channel = (
        size * step for step in data_steps(problem.data_format, channels * problem.groups, spatial)
    )
    ready = problem.dtype == "f32" and channel == size and channels % target().lanes == 0
    # a wide tile is two positions longer than the step to the next one
    frames, lines, columns = (slabs["high"] - slabs["low"]).T * [[1], [2], [2]] + [[0], [2 * wide], [2 * wide]]
    return row_of(
        Side, wide=wide, kind=KINDS[problem.dtype], start=wrapped([first * depth])[0],
        end=size * problem.n * problem.groups * channels * prod(spatial),
        strides=(image, wrapped([step * depth])[0], row, pixel), channel=channel, sizes=spatial[1:],
        staged=0 if ready else PAIR * int((frames * lines * columns).max(initial=0)), stage=0, panels=0, **others,
    )  # fmt: skip
