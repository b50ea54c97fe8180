"""What the compiled loops of forward operations on products of bf16 read: a unit's facts, its passes, its tables.

Positions and steps are along (d, h, w), or (n, d, h, w) where there are four.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels.emit.compiler import Record, Rows, Vector, numbers, together

__all__ = ["Cell", "CellLine", "CellPhase", "CellShare", "CellTables", "Cut", "Magnitudes"]


class CellShare(Record):
    """The facts of a unit: how values are stored, in how many `parts` products take them, and cells.

    A group's src `channels` take so many steps (`depth`) of a tile's channels, and a segment of a panel has so many
    `positions` for each, with `pitches` between them; panels have `segments` along each axis, whose positions are
    `src_strides` apart in src. A phase has at most so many `rows`; `strides` lead from one of its dst positions to the
    next. The unit has so many cells (`counts`) from the `first` on, of whole dst the first one; one has so many
    `images`, of `n`.
    """

    kind: int
    parts: int
    channels: int
    depth: int
    positions: int
    rows: int
    block_bytes: int
    n: int
    images: int
    segments: Vector = numbers(3)
    pitches: Vector = numbers(3)
    strides: Vector = numbers(3)
    src_strides: Vector = numbers(3)
    first: Vector = numbers(4)
    counts: Vector = numbers(4)


class CellLine(Record):
    """A cell along one axis: so many (`count`) positions from `dst` on, and so many (`met`) from `src` on.

    The latter are those of one segment, and begin at a `place` in it.
    """

    dst: int
    count: int
    src: int
    met: int
    place: int


class Cell(Record):
    """A cell: `images` from `n` on, and for each axis what a `CellLine` has."""

    n: int
    images: int
    dst: Vector = numbers(3)
    counts: Vector = numbers(3)
    src: Vector = numbers(3)
    met: Vector = numbers(3)
    places: Vector = numbers(3)


class CellPhase(Record):
    """Dst positions that meet the same taps: the first of a cell, the first tap, and the number of taps."""

    first: Vector = numbers(3)
    tap: int
    taps: int


class Cut(Record):
    """How the positions of a phase in a cell, `counts` in each of so many `images`, are summed: in pieces of `tiles`.

    The pieces are `LINES`, `PLANES`, or `WHOLE`, one row of the panel. They are summed for one or two blocks `across`,
    of which so many channels are `valid`. Sums `begin` at zero, or at what lies there. Rows go to dst itself, from the
    address `to` on, or among the sums of a cell, where it is 0.
    """

    images: int
    counts: Vector = numbers(3)
    kind: int
    tiles: int
    across: int
    valid: int
    begin: bool
    to: int


@together
class CellTables(NamedTuple):
    """Cells along (d, h, w), phases, and the byte offsets of their taps in a panel."""

    planes: Rows[CellLine]
    lines: Rows[CellLine]
    columns: Rows[CellLine]
    phases: Rows[CellPhase]
    offsets: Vector


class Magnitudes(Record):
    """The least exponent of some values, and whether all are finite."""

    least: int
    finite: bool
