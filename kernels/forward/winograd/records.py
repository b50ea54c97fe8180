"""What the compiled loops of a forward operation by Winograd read: the weights, and a unit's dst."""

from __future__ import annotations

from kernels.emit.compiler import Record, Vector, numbers

__all__ = ["Filters", "Outputs", "ProductSteps"]


class Filters(Record):
    """The weights and how they are transformed; sizes and strides are in bytes.

    The taps of a plane are rotated by 180 degrees if `turned`. A group has `src_channels` and `dst_channels`, and a
    kernel `depths` planes. A block holds the transformed weights of one vector of dst channels,
    [product][depth][src channel][lanes]; each group begins with a new block.
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


class ProductSteps(Record):
    """Bytes between what the products of tiles and weights read and write.

    Sums of a tile's products have `c_row` bytes, those of all tiles `plane` for each of the 16. Transformed tiles have
    `a_row` bytes, transformed weights of a product `b_plane` and of a vector of dst channels `b_block`.
    """

    c_row: int
    plane: int
    a_row: int
    b_plane: int
    b_block: int


class Outputs(Record):
    """The part of dst that a unit computes of one group; strides and sizes are in bytes.

    `start` is the address of the first position of its first channel. Its `channels` fill so many `vectors`. Outputs
    are written directly if `in_place`, and otherwise staged first.

    `strides` are between positions (n, d, h, w) and `channel` between channels.

    Then there is a depth of dst, and addresses: of the group's transformed weights and bias, of sums of products,
    staged outputs, a second set of sums, and a buffer of 64 f32.
    """

    kind: int
    in_place: bool
    start: int
    strides: Vector = numbers(4)
    channel: int
    channels: int
    vectors: int
    steps: ProductSteps
    depth: int
    filters: int
    bias: int
    sums: int
    staged: int
    totals: int
    buffer: int
