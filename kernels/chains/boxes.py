"""What both kinds of sums share: boxes of positions that a cache holds, and how tensors are packed as float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import ceil, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.dtypes import DTYPES
from kernels.emit.compiler import Records
from kernels.gradient.geometry import Tensor
from kernels.pack.doubles import Operand, packed_values
from kernels.problem import Span, wrapped

__all__ = ["Array", "Stored", "bytes_of", "cut", "operand", "records", "room_of", "together", "up"]

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
    if len(images) == 1:
        return [slice(images.start, images.stop)]
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


def bytes_of(kind: int) -> int:
    """Return the bytes of a value."""
    return list(DTYPES.values())[kind].size


def operand(
    tensor: Tensor, kind: int, count: int, part: tuple[Span, Span], width: int, sizes: Sequence[int], *,
    lanewise: bool, turned: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the fields of an `Operand`: a part of the groups and of their channels, in boxes of at most `sizes`.

    The whole tensor has `count` values. If it is `turned`, h and w change places when it is packed.
    """
    groups, some = part
    size, many, channels = bytes_of(kind), groups[1] - groups[0], some[1] - some[0]
    channel, group = size * tensor.channel, size * tensor.group
    steps = [prod(sizes), sizes[1] * sizes[2], *((1, sizes[1]) if turned else (sizes[2], 1))]
    start = size * tensor.origin + groups[0] * group + some[0] * channel
    begin, *strides = wrapped([start, *(size * step for step in tensor.steps)]).tolist()
    named = {"kind": kind, "start": begin, "nbytes": size * count, "group": group * (width if lanewise else 1)}
    if lanewise:
        named |= {"groups": ceil(many / width), "channel": group, "channels": many, "width": width, "panel": channel}
    else:
        named |= {"groups": many, "channel": channel, "channels": channels, "width": width, "panel": width * channel}
    panels = channels if lanewise else ceil(channels / width)
    lay = {"panels": panels, "lanewise": lanewise, "strides": strides, "steps": steps, "positions": prod(sizes)}
    return named | lay


def records(operands: Sequence[dict[str, Any]]) -> Records:
    """Return operands as a table."""
    return np.array([tuple(each.values()) for each in operands], Operand.dtype)


def room_of(operand: dict[str, Any]) -> int:
    """Return the values of all panels of a group."""
    return int(operand["panels"]) * packed_values(operand["positions"], operand["width"])
