"""What the compiled loops of the forward operations read: a unit's facts, its passes, and the rows of its tables.

Positions and steps are along (n, d, h, w), or (d, h, w) where there are three.
"""

from __future__ import annotations

from kernels.emit.compiler import Record, Vector, numbers
from kernels.emit.register_tiles import Walk
from kernels.emit.tile_table import LANE_ROWS

__all__ = [
    "Bias", "Call", "Class", "Data", "Filter", "GatherShare", "Grid", "Lanes", "Pass", "Region", "ScatterShare",
    "Shape", "TapLine", "Walk", "Window", "Work",
]  # fmt: skip


class Data(Record):
    """src or dst, in bytes: where position 0 of the first group lies, all of it, and steps.

    `lane` leads from one lane of a packed line to the next, `channel` from one channel of a group.
    """

    start: int
    nbytes: int
    group: int
    strides: Vector = numbers(4)
    lane: int
    channel: int


class Filter(Record):
    """The weights, as `Data` is."""

    start: int
    nbytes: int
    group: int
    lane: int
    dst_channel: int
    src_channel: int
    tap: int


class Bias(Record):
    """The bias, as `Data` is."""

    start: int
    group: int
    lane: int
    dst_channel: int


class Call(Record):
    """Addresses of one call: its tensors, 0 for a bias that is none, and scratch memory."""

    src: int
    weights: int
    bias: int
    dst: int
    panels: int
    source: int
    products: int
    sums: int


class Pass(Record):
    """So many groups (or groups of lanes) of which the packed weights have room, and where their tensors begin.

    Where lanes are groups, `left` of them exist from the first on.
    """

    src: Data
    weights: Filter
    bias: Bias
    dst: Data
    groups: int
    left: int


class Shape(Record):
    """How values are stored, a group's src channels and taps, and how src is read.

    From a class's tap to the next one it is `tap_steps` in tap numbers and `src_steps` in src positions; from one of
    its dst positions to the next it is `strides` in dst and `src_strides` in src, one of which is 1. With `lanewise`
    lanes are groups; src that is not `packed` is read in place.
    """

    kind: int
    channels: int
    kernel: Vector = numbers(3)
    tap_steps: Vector = numbers(3)
    src_steps: Vector = numbers(3)
    strides: Vector = numbers(3)
    src_strides: Vector = numbers(3)
    lanewise: bool
    packed: bool


class Class(Record):
    """Dst positions of an axis that share their taps, `Shape.strides` apart (see `kernels.forward.classes`).

    They are so many (`count`) from `dst` on, and meet so many `taps` from the number `first` on; that tap meets `src`
    at the first of them. A line of one that `fills` register tiles has tiles of its own.
    """

    first: int
    taps: int
    dst: int
    count: int
    src: int
    fills: bool


class Lanes(Record):
    """Adjacent dst channels that are the lanes of a line: one vector or two of them."""

    first: int
    valid: int
    vectors: int


class Grid(Record):
    """Dst positions that are cut into bands of `step`."""

    low: Vector = numbers(4)
    high: Vector = numbers(4)
    step: Vector = numbers(4)


class GatherShare(Record):
    """The facts of a unit in which dst pixels gather their taps.

    Tiles have at most `limits` rows, lanewise and of one and two vectors. Packed weights of a group and block of lanes
    are `panel_bytes`; `order` is 1 where taps are numbered forwards, -1 where backwards, 0 otherwise. With `apart` src
    is packed class by class: where taps reach far, all that they meet would be too much. With `once` no dst position is
    in two classes. With `together` groups of lanes are computed at once, straight into dst: pixels and groups have the
    same layout where they are read and written.
    """

    shape: Shape
    grid: Grid
    limits: Vector = numbers(3)
    panel_bytes: int
    order: int
    apart: bool
    once: bool
    together: bool


class Window(Record):
    """Positions from `low` to `high`."""

    low: Vector = numbers(4)
    high: Vector = numbers(4)


class ScatterShare(Record):
    """The facts of a unit in which products of src pixels are scattered to so many dst channels of a group.

    The dst positions that are `wanted` meet the src positions in `reach`, whose lines are done so many (`lines`) at a
    time. Tiles have at most `limit` rows. Packed weights of a src channel are `line_bytes`. `dense` says that the taps
    of a line meet adjacent dst pixels.
    """

    shape: Shape
    channels: int
    wanted: Window
    reach: Window
    lines: int
    limit: int
    line_bytes: int
    dense: bool


class Region(Record):
    """A box of positions."""

    first: Vector = numbers(4)
    sizes: Vector = numbers(4)


class Work(Record):
    """What is at hand: the src of a band, the walk over a class's taps and channels, and its pixels.

    `src` are byte steps to the next position where tiles read it, `pixel` to the one of the next pixel, and `channel`
    to the next channel. `counts` is the number of pixels, which have byte steps in the `sums`. The next one to be
    listed is `at`; those of a call have byte `offsets` in src and `places` in the sums.
    """

    reach: Region
    src: Vector = numbers(4)
    pixel: Vector = numbers(4)
    channel: int
    walk: Walk
    counts: Vector = numbers(4)
    sums: Vector = numbers(4)
    at: Vector = numbers(4)
    offsets: Vector = numbers(LANE_ROWS)
    places: Vector = numbers(LANE_ROWS)


class TapLine(Record):
    """A line of taps that a src line meets dst with: bytes from a pixel's products to its own, address of its sums."""

    products: int
    sums: int
