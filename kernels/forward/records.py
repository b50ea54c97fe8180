"""What the compiled loops of the forward operations read: a unit's facts, its passes, and the rows of its tables.

Positions and steps are along (n, d, h, w), or (d, h, w) where there are three.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels.emit.brgemm import Element
from kernels.emit.compiler import Record, Rows, Vector, numbers, together
from kernels.emit.depthwise import KernelLine

__all__ = [
    "Axis", "Band", "Call", "Data", "Filter", "GatherShare", "Grid", "LaneGroups", "LineSums",
    "Lists", "MicroTile", "Pass", "Phase", "PhasePart", "Piece", "SrcReading", "SumOrder", "Tables", "Tap",
    "WeightPanel", "Work",
]  # fmt: skip


class Data(Record):
    """src or dst, in bytes: where position 0 of the first group lies, all of it, and steps to what is next."""

    start: int
    nbytes: int
    group: int
    strides: Vector = numbers(4)
    channel: int


class Filter(Record):
    """The weights, as `Data` is."""

    start: int
    nbytes: int
    group: int
    dst_channel: int
    src_channel: int
    tap: int


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
    """Groups and dst `channels` of which the packed weights have room, and where their tensors begin, as does the bias.

    Lanewise there is one group, whose dst channels are those of all groups.
    """

    src: Data
    weights: Filter
    bias: int
    dst: Data
    groups: int
    channels: int


class Tap(Record):
    """A tap of an axis: its `number` in the packed weights, and which positions of its phase meet it, `low` to `high`.

    The first of them meets it at the position `src`.
    """

    number: int
    low: int
    high: int
    src: int


class Phase(Record):
    """Dst positions of an axis that meet the same taps, a stride apart: the first of them.

    Their taps are so many (`taps`) from the place `first` on; src positions rise from tap to tap. Where taps are
    summed by lines, `adjacent` of them are summed at once.
    """

    dst: int
    first: int
    taps: int
    adjacent: int


class Axis(Record):
    """An axis: its `phases` from the place `first` on, and the steps from one position of a phase to the next."""

    first: int
    phases: int
    dst_step: int
    src_step: int


@together
class Tables(NamedTuple):
    """The axes of a forward operation, and their phases and taps."""

    axes: Rows[Axis]
    phases: Rows[Phase]
    taps: Rows[Tap]


class Piece(Record):
    """A tap that a class of positions of an axis meets, or a tile of them.

    The first of the positions meets it at `src`; `case` says which rows of a tile do (see
    `kernels.emit.brgemm.Element`).
    """

    number: int
    src: int
    case: int


@together
class Lists(NamedTuple):
    """Room for what a tile sums: a quarter of the `pieces` for each axis, and all combinations of them."""

    pieces: Rows[Piece]
    elements: Rows[Element]


class Grid(Record):
    """Dst positions that are cut into bands of `step`."""

    low: Vector = numbers(4)
    high: Vector = numbers(4)
    step: Vector = numbers(4)


class WeightPanel(Record):
    """How packed weights lie, and how many steps a tap has.

    A tap has so many `words` of the channels of a group: `line` bytes lead to the next one, `tap_bytes` to the next
    tap, and all taps of a vector of dst channels have `block_bytes`. `kernel` counts taps along (d, h, w), `order` is 1
    where they are numbered forwards, -1 where backwards, 0 otherwise.
    """

    words: int
    line: int
    tap_bytes: int
    block_bytes: int
    kernel: Vector = numbers(3)
    order: int


class SrcReading(Record):
    """How src is read: in place unless it is `packed`; `word` bytes lead to the next word.

    A packed position has `pixel_bytes`. With `joined` taps side by side are one run of words. With `staged` src is
    padded, so that all positions meet all taps of their phase, and tiles are as tall as they can be
    (`kernels.forward.staging`).
    """

    word: int
    packed: bool
    joined: bool
    pixel_bytes: int
    staged: bool


class SumOrder(Record):
    """Where sums are cut, which decides their bits.

    Sums of more than `chunk` words of a tap are cut; other sums begin anew with every `group` lines of taps, or taps of
    a line if `within_line`. Only with `flushes` are they then added up by themselves. A batch has `most` steps of
    several elements, 0 for any number; sums of more are stored in between.
    """

    chunk: int
    group: int
    within_line: bool
    flushes: bool
    most: int


class LaneGroups(Record):
    """What lanes are: dst channels, or with `lanewise` groups, or `multiplier` dst channels of each.

    At most `step` lanes are summed at a time, line by line. Lanes are `grouped` where src has the same ones, because a
    group has as many src as dst channels.
    """

    lanewise: bool
    grouped: bool
    multiplier: int
    step: int


class LineSums(Record):
    """Sums of whole lines of taps by `kernels.emit.depthwise`: the address of its `kernel`, or 0 for none.

    Where that is one of dots, the one of `pairs` takes its place. Src has `width` positions along the rows' axis. With
    `ahead` the src of the tile below is prefetched, otherwise a band prefetches all of its src first.
    """

    kernel: int
    pairs: int
    width: int
    ahead: bool


class GatherShare(Record):
    """The facts of a unit in which dst pixels gather their taps.

    Values are stored as `kind` and multiplied as `micro` says (a place in `kernels.emit.brgemm.micro_table`), in tiles
    of at most `limits` rows by their vectors (for `lines` of the first, or of up to the second), along the last of the
    axes in the order of the `loops`. A group has so many src `channels`. A tap may leave out `skips` rows at either end
    of a tile. With `direct` tiles are written to dst itself. With `rounds` sums are stored as `kind` at once. `covered`
    says that every dst position meets a tap.
    """

    kind: int
    micro: int
    limits: Vector = numbers(2)
    loops: Vector = numbers(4)
    channels: int
    skips: int
    direct: bool
    rounds: bool
    covered: bool
    grid: Grid
    panel: WeightPanel
    src: SrcReading
    sums: SumOrder
    lanes: LaneGroups
    lines: LineSums


class Band(Record):
    """Dst positions from `low` to `high`, and the src positions that they meet: the `first` ones, and `sizes`."""

    low: Vector = numbers(4)
    high: Vector = numbers(4)
    first: Vector = numbers(4)
    sizes: Vector = numbers(4)


class PhasePart(Record):
    """Positions that are summed: along each axis those of a phase from `at` to `end`, which meet `counts` taps.

    Of the row axis those are the rows of `repeat` tiles. `Phase.dst` is the first position of a phase.
    """

    phase: Vector = numbers(4)
    at: Vector = numbers(4)
    end: Vector = numbers(4)
    counts: Vector = numbers(4)
    repeat: int


class MicroTile(Record):
    """Tiles of some dst channels: the place of their micro-kernel in the table, and the `limit` of their rows.

    There are so many `blocks` of two vectors, `pair` bytes apart in dst; the micro-kernel of the `last` one, of whose
    last vector `valid` lanes are written, has an address.
    """

    micro: int
    limit: int
    blocks: int
    pair: int
    last: int
    valid: int


class Work(Record):
    """What is at hand: where src and dst lie, in bytes to the next position, and what is summed.

    `start` and `place` are the addresses of position 0; that of src may be packed. `line` is for lines of taps.
    """

    src: Vector = numbers(4)
    start: int
    dst: Vector = numbers(4)
    place: int
    band: Band
    part: PhasePart
    tile: MicroTile
    line: KernelLine
