"""Tiles that are transformed at a time: whole images where these are small, or lines of one, or parts of a line.

Also the tensors that they are tiles of.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import Any

import numpy as np

from kernels.dtypes import KINDS
from kernels.emit.compiler import Records, Vector
from kernels.problem import ConvProblem, data_steps, storage_dtype
from kernels.target import target
from kernels.winograd.records import Channels, TileSlab

__all__ = ["channel_blocks", "cut_slabs", "most_positions", "side_of", "tiles_of"]


def channel_blocks(channels: int) -> Records:
    """Cut channels into blocks of two vectors, the last of one if it can; where they are packed is left open."""
    width = target().lanes
    firsts = np.arange(0, channels, 2 * width)
    blocks = np.zeros(len(firsts), Channels.dtype)
    blocks["first"], blocks["valid"] = firsts, np.minimum(2 * width, channels - firsts)
    blocks["vectors"] = 1 + (blocks["valid"] > width)
    return blocks


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


def most_positions(slabs: Records, more: int) -> int:
    """Count the positions of the largest slab; those of the wide tensor are `more` along each axis."""
    sizes = slabs["high"] - slabs["low"]
    return int((sizes[:, 0] * (2 * sizes[:, 1] + more) * (2 * sizes[:, 2] + more)).max())


def side_of(problem: ConvProblem, channels: int, spatial: tuple[int, int, int], **others: Any) -> dict[str, Any]:
    """Return what a `Side` has of a tensor with so many channels of a group, and `others`; a second group would start
    at `start`."""
    size = storage_dtype(problem.dtype).itemsize
    *strides, channel = (size * step for step in data_steps(problem.data_format, channels * problem.groups, spatial))
    ready = problem.dtype == "f32" and channel == size and channels % target().lanes == 0
    return {
        "kind": KINDS[problem.dtype], "staged": not ready, "start": channels * channel, "channel": channel,
        "nbytes": size * problem.n * problem.groups * channels * prod(spatial), "strides": strides,
        "lines": spatial[1], "columns": spatial[2], **others,
    }  # fmt: skip
