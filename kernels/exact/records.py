"""What compiled code reads of a unit of the reference: packed tensors, segments of positions, spans of taps."""

from __future__ import annotations

from kernels.emit.compiler import Record, Vector, numbers

__all__ = ["ForwardJob", "GradientJob", "Operand", "Segment", "Span", "WeightsSource"]


class Operand(Record):
    """A box of positions of a data tensor, and where it is packed as f64 `[n][d][h][w][line / 8]`.

    `place` is the address of its first value in the tensor, `steps` lead from position to position there, `channel`
    and `group` to the next channel and group, all in bytes. Packed values are multiplied with the f64 at `factor`, if
    that is an address, and squared if `square` is not 0.
    """

    kind: int
    place: int
    steps: Vector = numbers(4)
    sizes: Vector = numbers(4)
    channels: int
    channel: int
    group: int
    packed: int
    line: int
    factor: int
    square: int


class WeightsSource(Record):
    """Weights in memory, from the first tap of a pass on, like an `Operand`: byte steps between groups, src channels,
    dst channels and taps."""

    kind: int
    place: int
    group: int
    src: int
    dst: int
    tap: int
    factor: int
    square: int


class Segment(Record):
    """Positions of dst along an axis that meet the same taps, an arithmetic progression of them.

    The first position meets the first tap at byte `a` of the packed src; `a_row` leads to where the next position meets
    it, `a_tap` to the next tap. Sums lie at byte `c`, `c_row` apart. Taps are numbered within the pass.
    """

    a: int
    a_row: int
    a_tap: int
    c: int
    c_row: int
    count: int
    tap: int
    tap_step: int
    taps: int


class Span(Record):
    """Positions of a slab along an axis for which a tap is inside, and the byte offsets of the first in `a` and `b`.

    `at` is the first one's number in the whole tensor.
    """

    count: int
    a: int
    b: int
    at: int


class ForwardJob(Record):
    """A unit of a forward operation, for some taps and src channels of them.

    `lanes` dst channels of each group, or groups if `lanewise`, are summed in blocks of `width`. Weights of a block are
    packed at `panel`. Sums lie `[group][n][d][h][w][line / 8]`; `split` is 0, or the most products of an element.
    """

    entry: int
    rows: int
    width: int
    split: int
    lanewise: bool
    src: Operand
    weights: WeightsSource
    panel: int
    taps: int
    lanes: int
    blocks: int
    sums: int
    group: int
    word: int
    first: Vector = numbers(4)
    segments: Vector = numbers(4)
    most: int


class GradientJob(Record):
    """A slab of pixels of a weight gradient: rows of sums are channels of `a`, their lanes those of `b`.

    Sums lie `[group][tap][row][line / 8]`. Without `a` the values of `b` themselves are summed.
    """

    entry: int
    rows: int
    width: int
    split: int
    lanewise: bool
    has_a: bool
    a: Operand
    b: Operand
    a_steps: Vector = numbers(4)
    b_steps: Vector = numbers(4)
    images: int
    spans: Vector = numbers(3)
    sums: int
    group: int
    tap: int
    line: int
    word: int
    most: int
