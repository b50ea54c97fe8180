"""What the compiled loops of a forward operation by Winograd read: the weights, and a unit's dst."""

from __future__ import annotations

from kernels.emit.compiler import Record, Vector, numbers

__all__ = ["Filters", "Outputs"]


class Filters(Record):
    """The weights, in bytes: their size and steps, and whether the taps of a plane are `turned` by 180 degrees.

    A group has so many src and dst channels and a tap `depths` positions in the first axis. The transformed weights of
    a vector of dst channels are `block` bytes, [product][depth][src channel][lanes]; each group begins with a new one.
    """

    kind: int
    nbytes: int
    group: int
    dst_channel: int
    src_channel: int
    tap: int
    turned: bool
    src_channels: int
    dst_channels: int
    depths: int
    block: int


class Outputs(Record):
    """dst of one group of a unit, in bytes: position 0 of its first channel lies at the address `start`; so many
    `channels` are computed, which are `vectors`. Outputs are written where they belong, or staged first.

    `strides` are between positions (n, d, h, w) and `channel` between channels. Sums of a tile's products have `c_row`
    bytes, those of all tiles `plane` for each of the 16. Transformed tiles have `a_row` bytes, transformed weights of a
    product `b_plane` and of a vector of dst channels `b_block`.
    """

    kind: int
    in_place: bool
    start: int
    strides: Vector = numbers(4)
    channel: int
    channels: int
    vectors: int
    c_row: int
    plane: int
    a_row: int
    b_plane: int
    b_block: int
