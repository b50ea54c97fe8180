"""What the compiled loops of products of bf16 pairs read: a unit's facts, and the rows of its tables.

Positions are (n, d, h, w) of the narrow tensor.
"""

from __future__ import annotations

from kernels.emit.compiler import Record, Vector, numbers
from kernels.pack.pairs import PackedBox, Packing

__all__ = ["DotCall", "DotShare", "DotSlab", "DotTap", "PackedBox", "Packing"]


class DotSlab(Record):
    """Positions that are packed at a time, and the `pairs` of pixels that they take, in whole steps."""

    low: Vector = numbers(4)
    high: Vector = numbers(4)
    pairs: int


class DotTap(Record):
    """A tap that meets data: its `number`, the positions that it visits, and its shift.

    The shift is in bytes, `plane` in the planes of the wide tensor and `source` in the tensor itself. Taps that are
    rows of a tile count as one, the first of so many `rows`, and visit all that one of them visits.
    """

    number: int
    plane: int
    source: int
    rows: int
    low: Vector = numbers(4)
    high: Vector = numbers(4)


class DotShare(Record):
    """The facts of a unit: `groups` groups, all channels of the wide tensor `a`, some blocks of the narrow `b`.

    Sums are [two blocks of b][channel of a][tap][32], `acc_block` bytes for each block, `acc_group` from a group to the
    next. Of the taps so many meet data (`live`). A slab has `phases` boxes of `a`. `a_group` and `b_group` are bytes
    between groups in the tensors. Tiles have rows of up to `tile_channels` channels, `row_bytes` apart in the planes
    and `row_sums` rows of sums. In both packings sources are counted from the tensor's first value, targets from the
    panels.
    """

    groups: int
    taps: int
    live: int
    phases: int
    acc_group: int
    acc_block: int
    a_group: int
    b_group: int
    tile_channels: int
    row_bytes: int
    row_sums: int
    a: Packing
    b: Packing


class DotCall(Record):
    """Addresses of one call, all of what the caller owns: both tensors, accumulators, and a's planes, b's pairs and
    staged rows in `panels`. So many (`rows`) `offsets`, int64, are those of `kernels.gradient.dots.schedule`."""

    a: int
    b: int
    panels: int
    acc: int
    offsets: int
    rows: int
