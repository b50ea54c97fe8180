"""Projections for `verify` of tensors of PyTorch that are on a GPU, in float64, by PyTorch alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["add_signed", "facts"]

Array = npt.NDArray[np.float64]


def add_signed(
    tensor: Tensor, least: int, signs: Array, sums: Array, squares: Array | None, powers: Array | None, *, fresh: bool
) -> None:
    """Do what `verify.signed.add_signed` does for a tensor, (groups * lines, values), and arrays on the CPU."""
    values = tensor.double().reshape(*signs.shape[1:], -1)
    found = torch.from_numpy(signs).to(tensor.device).transpose(0, 1) @ values
    _add(sums, found.transpose(0, 1), fresh=fresh)
    if squares is not None:
        _add(squares, values.square().sum(1), fresh=fresh)
    if powers is not None:
        exponents = (values.view(torch.int64) >> 52 & 0x7FF).clamp(least + 1023, 127 + 1023)
        _add(powers, (exponents << 52).view(torch.float64).square().sum(1), fresh=fresh)


def _add(sums: Array, found: Tensor, *, fresh: bool) -> None:
    with np.errstate(invalid="ignore", over="ignore"):
        np.add(0.0 if fresh else sums, found.cpu().numpy(), out=sums)


def facts(tensor: Tensor) -> tuple[bool, float]:
    """Return whether all values are integers or Inf, and the largest magnitude."""
    if not tensor.numel():
        return True, 0.0
    return bool((tensor == tensor.round()).all()), float(tensor.abs().max())
