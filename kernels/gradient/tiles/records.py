"""What the compiled loops of a weight gradient read: a unit's facts, and the rows of its tables.

Positions are (n, d, h, w), or (d, h, w) where there are three. They are those of the narrow tensor unless a field says
otherwise; positions of a tensor's own are those of its data.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels.emit.brgemm import SKIPS, Element
from kernels.emit.compiler import Record, Rows, Vector, numbers, together
from kernels.emit.depthwise import TAPS

__all__ = [
    "Block", "Box", "Group", "Line", "Place", "Range", "Slab", "Source", "Tile", "TileCall", "TileShare", "Visit",
    "WalkTables", "Weights",
]  # fmt: skip


class Box(Record):
    """The part of a tensor that a slab needs, in its own positions."""

    first: Vector = numbers(4)
    sizes: Vector = numbers(4)


class Slab(Record):
    """Positions that are packed at a time, and what they need of both tensors."""

    low: Vector = numbers(4)
    high: Vector = numbers(4)
    vector: Box
    scalar: Box


class Block(Record):
    """Adjacent channels that are the lanes of a line: one vector or two of them.

    `lane` counts the lanes of the blocks before it. Its accumulators and its panel begin so many bytes from the
    group's.
    """

    first: int
    valid: int
    vectors: int
    lane: int
    acc: int
    panel: int


class Line(Record):
    """Channels that are packed to lines of so many `lanes`, the first `valid` ones channels.

    In bytes: from the group's first channel to that of the line, and from the group's panels to its own (`place`).
    """

    source: int
    valid: int
    lanes: int
    place: int


class Range(Record):
    """The positions (d, h, w) that a tap visits, with register tiles ``first..last``.

    For the tap the vector panel is shifted by `line` lines and the scalars by `scalar` bytes; its sums begin at
    accumulator row `row`. Ranges of the same `walk` are visited together, block of lanes by block of lanes.
    """

    low: Vector = numbers(3)
    high: Vector = numbers(3)
    line: int
    scalar: int
    first: int
    last: int
    row: int
    walk: int


class Tile(Record):
    """A tile: accumulator row counted from the range's, number of rows, byte offset of the first one's scalars.

    One of `kernels.emit.depthwise` has an offset for each row, and behind them the accumulator bytes of each. One that
    several taps share, alone in its range, leaves out at least 1, 2, 3 of its first rows at so many positions (`heads`)
    from the beginning of a line on, and of its last ones before the end (`tails`): there these taps are outside.
    """

    row: int
    rows: int
    heads: Vector = numbers(SKIPS)
    tails: Vector = numbers(SKIPS)
    offsets: Vector = numbers(2 * TAPS)


class Visit(Record):
    """What a block of positions has of a range: where its panel and scalars begin, and what its tiles sum.

    Positions are a box along (outer, row, column), their steps as the `moves` of a `Source` are. `shape` has how many
    there are along the first two, and the ends of the pieces of a line: those that leave out the first 3, 2 and 1 rows,
    none, and the last 1, 2 and 3. They were listed as so many `elements`; `listed` has the shape and the bytes of a
    panel line of that list.
    """

    line: int
    scalar: int
    first: int
    last: int
    row: int
    shape: Vector = numbers(3 + 2 * SKIPS)
    lines: Vector = numbers(3)
    scalars: Vector = numbers(3)
    elements: int
    listed: Vector = numbers(4 + 2 * SKIPS)


@together
class WalkTables(NamedTuple):
    """What a walk over blocks of positions visits, and room for the visits of one block and their elements."""

    blocks: Rows[Block]
    ranges: Rows[Range]
    tiles: Rows[Tile]
    visits: Rows[Visit]
    elements: Rows[Element]


class Source(Record):
    """One of the two tensors, in bytes: where position 0 of the first group lies, all of it, and steps.

    `lane` leads from one lane of a line to the next, `strides` from one of its own positions to the next. `steps` do
    the same in what is packed, in lines; `moves` are for a narrow position, in panel lines for the vector tensor, in
    bytes for the scalar one. A tensor that is read `in_place` is its own panel, of which position 0 is the first line.
    The panels of the next group are `panels` bytes on.
    """

    start: int
    nbytes: int
    group: int
    lane: int
    strides: Vector = numbers(4)
    steps: Vector = numbers(4)
    moves: Vector = numbers(4)
    in_place: bool
    panels: int


class TileShare(Record):
    """The facts of a unit: `groups` groups (or groups of lanes) and some blocks of lanes.

    So many groups are packed `together`. With `lanewise` every lane is a convolution group; `lane_groups` are left, and
    a tile sums so many `vectors` of them. From one row of a tile to the next it is `scalar_row` bytes and `acc_step`
    accumulator rows. Sums of `segment` positions, or some more, are formed in registers. Where taps share tiles
    (`merged`) these have heads and tails.
    """

    kind: int
    groups: int
    together: int
    lanewise: bool
    lane_groups: int
    vectors: int
    acc_bytes: int
    scalar_row: int
    acc_step: int
    segment: int
    merged: bool
    block: Vector = numbers(4)
    vector: Source
    scalar: Source


class Place(Record):
    """The addresses of a tensor and of memory for its panels, the caller's."""

    tensor: int
    panels: int


class TileCall(Record):
    """Where one call finds both tensors, and the address of the accumulators."""

    vector: Place
    scalar: Place
    acc: int


class Group(Record):
    """A group that is summed: the addresses of position 0 of both tensors and of its accumulators.

    The block at hand begins `at` (n, d, h, w).
    """

    panels: int
    scalars: int
    acc: int
    at: Vector = numbers(4)


class Weights(Record):
    """Where accumulators go: counts, f32 values and rows of accumulators, then elements of the output.

    A group has `floats` accumulators, of `taps` and `channels` so many rows apart. In the output the first group begins
    at `start`, and one step leads from a group to the next, from a block's first channel, a lane, a row's channel, a
    tap.
    """

    kind: int
    lane_groups: int
    groups: int
    floats: int
    taps: int
    channels: int
    tap_rows: int
    channel_rows: int
    start: int
    group_step: int
    block_step: int
    lane_step: int
    channel_step: int
    tap_step: int
