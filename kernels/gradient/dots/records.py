"""What the compiled loops of products of bf16 pairs read: a unit's facts, and the rows of its tables.

Positions are (n, d, h, w) of the narrow tensor.
"""

from __future__ import annotations

from kernels.emit.compiler import Record, Vector, numbers
from kernels.pack.pairs import PackedBox, Packing

__all__ = ["DotCall", "DotShare", "DotSlab", "DotTap", "DotWork", "PackedBox", "Packing", "PairSpan", "Peaks"]


class DotSlab(Record):
    """Positions that are packed at a time."""

    low: Vector = numbers(4)
    high: Vector = numbers(4)


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


class PairSpan(Record):
    """Pairs that are summed in registers, from `begin` to `end`, and whether to `flush` the sums then.

    Those at `origin` have offset 0.
    """

    begin: int
    end: int
    origin: int
    flush: int


class Peaks(Record):
    """The least and the most of the largest values of a block's channels, as bf16; 0 is the most where all are zero."""

    least: int
    most: int


class DotShare(Record):
    """The facts of a unit: `groups` groups, all channels of the wide tensor `a`, some blocks of the narrow `b`.

    Sums are [block of b][channel of a][tap][16], `acc_block` bytes from a block to the next, `acc_group` from a group.
    Of the taps so many meet data (`live`). A slab has `phases` boxes of `a`. Its last image has so many `pixels`, up to
    its last one. `a_group` and `b_group` are bytes between groups in the tensors. Tiles have rows of up to
    `tile_channels` channels, `row_bytes` apart in the planes and `row_sums` rows of sums. In both packings sources are
    counted from the tensor's first value, targets and scratch from the panels.
    """

    groups: int
    taps: int
    live: int
    phases: int
    pixels: int
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


class DotWork(Record):
    """What is summed: the blocks of rows from `first` to `end`, over so many `steps`.

    `a` and `acc` are the addresses of a's planes and of the accumulators, `b` and `stage` those of b's pairs and staged
    rows. Tiles of rows go `down` at a time.
    """

    first: int
    end: int
    steps: int
    a: int
    b: int
    stage: int
    acc: int
    down: int
