"""Random projections of tensors: lines added up with signs, in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.dtypes import DTYPES
from kernels.plan import Stop, Storage
from kernels.problem import Dims
from kernels.reference import taps, widen
from verify.evaluate import CHUNK
from verify.stopping import until

__all__ = ["add_products", "add_signed"]

Array = npt.NDArray[np.float64]


def add_signed(
    tensor: Storage, dtype: str, signs: Array, sums: Array, squares: Array | None = None, powers: Array | None = None,
    *, fresh: bool = False,
) -> None:  # fmt: skip
    """Add to `sums`, (projections, groups, values), the lines of a tensor, (groups * lines, values), with `signs`.

    `signs` are (projections, groups, lines). `squares` and `powers`, (groups, values), get the squares of the values,
    and those of the powers of two at or below them, of at least 2 to the power of `DType.least`. All these are written,
    not added to, if they are `fresh`. The tensor may be PyTorch's, on a GPU.
    """
    least = DTYPES[dtype].least
    if not isinstance(tensor, np.ndarray):
        from kernels.gpu.projections import add_signed as add_on_gpu  # loads PyTorch

        add_on_gpu(tensor, least, signs, sums, squares, powers, fresh=fresh)
        return
    for each in (sums, squares, powers) if fresh else ():
        if each is not None:
            each[...] = 0
    by_group = signs.transpose(1, 0, 2)
    step = max(64, CHUNK // max(1, len(tensor)))
    for start in range(0, tensor.shape[1], step):
        some = slice(start, start + step)
        values = widen(tensor[:, some], dtype)
        values = values.reshape(*signs.shape[1:], values.shape[1])
        with np.errstate(invalid="ignore", over="ignore"):
            sums[:, :, some] += (by_group @ values).transpose(1, 0, 2)
            if squares is not None:
                squares[:, some] += np.einsum("glv,glv->gv", values, values)
        if powers is not None:
            exponents = np.clip(values.view(np.int64) >> 52 & 0x7FF, least + 1023, 127 + 1023)
            below = (exponents << 52).view(np.float64)
            powers[:, some] += np.einsum("glv,glv->gv", below, below)


def add_products(dims: Dims, wide: Array, narrow: Array, sums: Array, stop: Stop) -> None:
    """Add to `sums`, (projections, taps), what the planes of each projection, (projections, groups, pixels), give."""
    a, b = wide.reshape(*wide.shape[:2], *dims.wide), narrow.reshape(*narrow.shape[:2], *dims.narrow)
    with np.errstate(invalid="ignore", over="ignore"):
        for tap, at_narrow, at_wide in until(stop, taps(dims)):
            sums[:, tap] += np.einsum("pgzyx,pgzyx->p", a[:, :, *at_wide], b[:, :, *at_narrow])
