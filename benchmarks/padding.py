"""Padding for a peer that pads both ends of an axis equally."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Padding", "padding"]


@dataclass(frozen=True)
class Padding:
    """One axis in PyTorch's terms: symmetric `pads`, `left_over` positions that no tap reaches, zeros to add.

    `low` and `high` positions are added to the ends of the wide tensor (see `kernels.problem.Dims`).
    """

    pads: int
    left_over: int
    low: int
    high: int


def padding(wide: int, narrow: int, kernel: int, stride: int, dilation: int, begin: int) -> Padding:
    """Return the symmetric padding of one axis that needs the fewest zeros.

    For a transposed convolution the left-over positions are its output_padding; a convolution ignores them. Either
    way PyTorch requires fewer than `stride`.
    """
    end = (narrow - 1) * stride + (kernel - 1) * dilation + 1 - wide - begin
    pads = max(0, min(begin, end + stride - 1))
    high = max(0, end - pads)
    return Padding(pads, pads + high - end, begin - pads, high)
