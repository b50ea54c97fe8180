"""What the compiled loops of Winograd's algorithm read: tensors, their channels, and the slabs of tiles."""

from __future__ import annotations

from kernels.emit.compiler import Record, Vector, numbers
from kernels.emit.winograd import FACTORS

__all__ = ["GAP", "PRODUCTS", "Channels", "Room", "Side", "TileSlab"]

PRODUCTS = FACTORS * FACTORS
"""Products of a tile."""

GAP = 64
"""Bytes between lines and between planes, whose sizes are often powers of two: they must not meet in one set."""


class Side(Record):
    """One of the two tensors of one group and one depth of the kernel.

    `start` leads from the tensor's address to channel 0 of position 0, `nbytes` is its size; `strides` are between its
    positions (n, d, h, w) and `channel` between channels, all in bytes. A frame is an image's plane (h, w), of so many
    `lines` and `columns`; frame f has depth ``first + f % frames`` times `stride`, plus `shift`. Tile t along an axis
    begins ``2 t - pad``. Where lines are `staged` they are copied as f32 first, two vectors of channels together.
    Transformed tiles have a `plane` of bytes for each factor.
    """

    wide: bool
    kind: int
    staged: bool
    start: int
    nbytes: int
    channel: int
    strides: Vector = numbers(4)
    lines: int
    columns: int
    frames: int
    first: int
    stride: int
    shift: int
    pad: Vector = numbers(2)
    plane: int


class Channels(Record):
    """Adjacent channels of one side, one vector of them or two.

    The first is `first`, and `valid` exist. Transformed tiles lie at `panel` bytes of a plane, a `line` of bytes each;
    staged lines begin at `stage`. Sums, where these channels are lanes, begin at byte `sums` of the group's, in
    `plane` bytes for each product.
    """

    first: int
    valid: int
    vectors: int
    line: int
    panel: int
    stage: int
    sums: int
    plane: int


class TileSlab(Record):
    """Tiles that are transformed at a time, along (frames, lines, columns); whether the last line or column is odd,
    that is, has one narrow position."""

    low: Vector = numbers(3)
    high: Vector = numbers(3)
    odd: Vector = numbers(2)


class Room(Record):
    """Addresses of one side: its tensor, staged lines, panels of transformed tiles, and two vectors of zeros.

    A slab reads the lines and columns of the `window`, low and high of each; staged, a frame of it has `frame` bytes.
    """

    tensor: int
    stage: int
    panels: int
    zeros: int
    window: Vector = numbers(4)
    frame: int
