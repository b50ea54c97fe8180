"""What both kinds of sums share: boxes of positions that a cache holds, and how tensors are packed as float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import ceil, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.dtypes import DTYPES
from kernels.emit.compiler import Records, row_of
from kernels.gradient.geometry import Tensor
from kernels.pack.doubles import Operand, packed_values
from kernels.problem import Span, wrapped

__all__ = ["Array", "Stored", "cut", "operand", "room_of", "together", "up"]

Array = npt.NDArray[np.float64]

Stored = Callable[[int, slice], npt.NDArray[Any]]
"""Returns some images of an input, given its number, as stored or in float64; weights are the same for all images."""

_BOX_BYTES = 1 << 19
"""What the panels of a box should take: they stay in L2."""

_POSITIONS = 1 << 8
"""Positions of a box, even if they take more of a cache: packing fewer takes as long."""

_LEAST_POSITIONS, _CALL_MACS = 1 << 6, 1 << 28
"""Positions of a box at least, multiply-adds at most: a unit checks every few milliseconds if it was cancelled."""

_IMAGES_VALUES = 1 << 14
"""Values of all images of a call."""


def together(images: range, values: int, macs: int) -> list[slice]:
    """Group small images, so that one call sums several; `values` and `macs` are those of one image."""
    step = max(1, min(_IMAGES_VALUES // max(1, values), _CALL_MACS // max(1, macs)))
    return [slice(first, min(first + step, images.stop)) for first in images[::step]]


def up(count: int, step: int) -> int:
    """Round up to a multiple of a step."""
    return ceil(count / step) * step


def cut(sizes: Sequence[int], position_bytes: int, position_macs: int) -> list[tuple[list[int], list[int]]]:
    """Cut a box into boxes, low and high, that a cache and a call should hold; positions follow each other in order."""
    held = max(_POSITIONS, _BOX_BYTES // position_bytes)
    most = max(_LEAST_POSITIONS, min(held, _CALL_MACS // max(1, position_macs)))
    axis = next(axis for axis in range(3) if axis == 2 or prod(sizes[axis + 1 :]) <= most)
    step = max(1, most // max(1, prod(sizes[axis + 1 :])))
    step = max(1, ceil(sizes[axis] / max(1, ceil(sizes[axis] / step))))  # as equal as they can be
    boxes = []
    for *place, at in product(*map(range, sizes[:axis]), range(0, sizes[axis], step)):
        low = [*place, at, *[0] * (2 - axis)]
        boxes.append((low, [*(one + 1 for one in place), min(sizes[axis], at + step), *sizes[axis + 1 :]]))
    return boxes


def operand(
    tensor: Tensor, kind: int, count: int, part: tuple[Span, Span], width: int, sizes: Sequence[int], *, lanewise: bool
) -> Records:
    """Return an `Operand`, a table of one: a part of the groups and of their channels, in boxes of at most `sizes`.

    The whole tensor has `count` values.
    """
    (low, high), (first, last) = part
    size, many, channels = list(DTYPES.values())[kind].size, high - low, last - first
    channel, group = size * tensor.channel, size * tensor.group
    start = size * tensor.origin + low * group + first * channel
    begin, *strides = wrapped([start, *(size * step for step in tensor.steps)]).tolist()
    if lanewise:
        lanes = {"group": group * width, "groups": ceil(many / width), "channel": group, "channels": many}
        panels = {"panel": channel, "panels": channels}
    else:
        lanes = {"group": group, "groups": many, "channel": channel, "channels": channels}
        panels = {"panel": width * channel, "panels": ceil(channels / width)}
    return row_of(
        Operand, kind=kind, start=begin, nbytes=size * count, width=width, lanewise=lanewise, strides=strides,
        steps=[prod(sizes), sizes[1] * sizes[2], sizes[2], 1], positions=prod(sizes), **lanes, **panels,
    )  # fmt: skip


def room_of(operand: Any) -> int:
    """Return the values of all panels of a group."""
    return int(operand["panels"] * packed_values(operand["positions"], operand["width"]))
