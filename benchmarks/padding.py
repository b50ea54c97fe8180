"""Padding for a peer that pads both ends of an axis equally."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Padding", "padding"]


@dataclass(frozen=True)
class Padding:
    """One axis as PyTorch takes it: symmetric `pads`, `left_over` positions that no tap reaches, zeros to add.

    `low` and `high` positions are added to the ends of the wide tensor (see `kernels.problem.Dims`).
    """

    pads: int
    left_over: int
    low: int
    high: int


def padding(wide: int, narrow: int, kernel: int, stride: int, dilation: int, begin: int) -> Padding:
    """Find the symmetric padding of one axis that needs the fewest zeros.

    A transposed convolution has the left-over positions as its output_padding, and the other one does not look at
    them; either way PyTorch wants fewer than `stride`.
    """
    end = (narrow - 1) * stride + (kernel - 1) * dilation + 1 - wide - begin
    pads = max(0, min(begin, end + stride - 1))
    high = max(0, end - pads)
    return Padding(pads, pads + high - end, begin - pads, high)
