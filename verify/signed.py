"""Random projections of tensors: lines added up with signs, in compiled loops or, where there are none, in NumPy."""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt

from kernels.arena import address, arena_address
from kernels.dtypes import DTYPES, KINDS
from kernels.emit.compiler import Records, row_of
from kernels.plan import Storage
from kernels.problem import Dims
from kernels.reference import widen
from kernels.signed_sums import ACROSS, Lines, Meeting, Planes, Signed, add_lines, add_planes
from kernels.target import target

__all__ = ["add_products", "add_signed", "meetings"]

Array = npt.NDArray[np.float64]


def add_signed(
    tensor: Storage, dtype: str, signs: Array, sums: Array, squares: Array | None = None, powers: Array | None = None,
    *, fresh: bool = False,
) -> None:  # fmt: skip
    """Add to `sums`, (projections, groups, values), the lines of a tensor, (groups * lines, values), with `signs`.

    `signs` are (projections, groups, lines), of a multiple of 4 projections. `squares` and `powers`, (groups, values),
    get the squares of the values, and those of the powers of two at or below them, of at least 2 to the power of
    `DType.least`. All these are written, not added to, if they are `fresh`. The tensor may be PyTorch's, on a GPU.
    """
    if not isinstance(tensor, np.ndarray):
        from kernels.gpu.projections import add_signed as add_on_gpu  # loads PyTorch

        add_on_gpu(tensor, DTYPES[dtype].least, signs, sums, squares, powers, fresh=fresh)
        return
    rows, groups, lines = signs.shape
    values = tensor.shape[1]
    if not target().compiles:
        for each in (sums, squares, powers) if fresh else ():
            if each is not None:
                each[...] = 0
        _add_signed(widen(tensor, dtype).reshape(groups, lines, values), dtype, signs, sums, squares, powers)
        return
    adjacent = tensor.strides[1] == tensor.itemsize or values == 1
    panel = 0 if adjacent else arena_address("transposed", groups * lines * ACROSS)
    by_four = np.ascontiguousarray(signs.reshape(-1, 4, groups, lines).transpose(2, 0, 3, 1))
    given = row_of(
        Lines, source=address(tensor), step=tensor.strides[0 if adjacent else 1], groups=groups, count=lines,
        values=values, panel=panel,
    )  # fmt: skip
    to = row_of(
        Signed, signs=address(by_four), rows=rows, sums=address(sums), step=sums.strides[0], group=sums.strides[1],
        squares=0 if squares is None else address(squares), powers=0 if powers is None else address(powers),
        least=DTYPES[dtype].least, fresh=fresh,
    )  # fmt: skip
    add_lines(KINDS[dtype], given, to)


def _add_signed(
    values: Array, dtype: str, signs: Array, sums: Array, squares: Array | None, powers: Array | None
) -> None:
    """Do the same with NumPy."""
    for line in range(values.shape[1]):
        some = values[:, line]
        with np.errstate(invalid="ignore", over="ignore"):
            sums += signs[:, :, line, None] * some
            if squares is not None:
                squares += some * some
        if powers is not None:
            exponents = np.clip((some.view(np.int64) >> 52 & 0x7FF) - 1023, DTYPES[dtype].least, 127)
            powers += np.square(np.ldexp(1.0, exponents.astype(np.intc)))


def meetings(dims: Dims) -> Records:
    """Return where the pixels meet in each tap."""
    found = np.zeros(dims.kernel, Meeting.dtype)
    for axis in range(3):
        low, high = dims.tap_ranges(axis).T
        start = dims.wide_at(axis, np.arange(dims.kernel[axis]), low)
        shape = [-1 if at == axis else 1 for at in range(3)]
        for name, values in (("narrow", low), ("wide", np.where(high > low, start, 0)), ("counts", high - low)):
            found[name][..., axis] = values.reshape(shape)
    return found.reshape(-1)


def add_products(dims: Dims, wide: Array, narrow: Array, meet: Records, first: int, sums: Array) -> None:
    """Add to `sums`, (projections, taps), what the planes of each projection add to taps from the `first` one on.

    The planes are (projections, groups, pixels), and `meet` says where their pixels meet in these taps.
    """
    strides = tuple([min(stride, max(dims.wide)) for stride in dims.strides])
    if not target().compiles:
        a, b = wide.reshape(*wide.shape[:2], *dims.wide), narrow.reshape(*narrow.shape[:2], *dims.narrow)
        for tap, each in enumerate(meet):
            at_wide = [
                slice(at, at + (count - 1) * stride + 1 if count else at, stride)
                for at, count, stride in zip(each["wide"], each["counts"], strides, strict=True)
            ]
            at_narrow = [slice(at, at + count) for at, count in zip(each["narrow"], each["counts"], strict=True)]
            with np.errstate(invalid="ignore", over="ignore"):
                sums[:, first + tap] += np.einsum("pgzyx,pgzyx->p", a[:, :, *at_wide], b[:, :, *at_narrow])
        return
    table = row_of(
        Planes, wide=address(wide), narrow=address(narrow), projections=len(wide), groups=wide.shape[1],
        wide_sizes=(prod(dims.wide), prod(dims.wide[1:]), dims.wide[2]),
        narrow_sizes=(prod(dims.narrow), prod(dims.narrow[1:]), dims.narrow[2]), strides=strides,
    )  # fmt: skip
    add_planes(table, meet, first, sums.reshape(-1))
