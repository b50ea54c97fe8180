"""Lines of tensors added up with signs, and products of the projected planes."""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

from kernels.dtypes import DTYPES
from kernels.reference import narrow, widen
from tests.kernels.harness import problem_of
from tests.problems import Case
from verify.model import ulp
from verify.signed import add_products, add_signed

Array = npt.NDArray[np.float64]
NAMES = ("f32", "f16", "bf16")


def drawn_signs(rng: np.random.Generator, *shape: int) -> Array:
    """Return +1 and -1 at random."""
    return np.where(rng.integers(0, 2, shape) == 0, -1.0, 1.0)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize(
    ("groups", "lines", "values"), [(1, 1, 1), (2, 5, 37), (3, 13, 1100), (1, 130, 49), (2, 3, 64)]
)
def test_signed_lines(groups: int, lines: int, values: int, dtype: str, order: str) -> None:
    """Each sum is that of its lines with their signs, whether positions or channels are adjacent."""
    rng = np.random.default_rng([groups, lines, values])
    drawn = rng.standard_normal((groups * lines, values)) * 2.0 ** rng.integers(-20, 10, (groups * lines, values))
    stored = narrow(drawn, dtype)
    tensor = stored if order == "C" else np.asarray(stored.T, order="C").T
    signs, (sums, extra) = (
        drawn_signs(rng, 8, groups, lines),
        (np.empty((8, groups, values)), np.empty((2, groups, values))),
    )
    add_signed(tensor, dtype, signs, sums, extra[0], extra[1], fresh=True)
    wide = widen(stored, dtype).reshape(groups, lines, values)
    expected, squares, steps = np.zeros_like(sums), np.zeros((groups, values)), np.zeros((groups, values))
    for line in range(lines):
        expected += signs[:, :, line, None] * wide[:, line]
        squares += wide[:, line] ** 2
        steps += (ulp(wide[:, line], dtype) * 2.0 ** (DTYPES[dtype].digits - 1)) ** 2
    for found, each in ((sums, expected), (extra[0], squares), (extra[1], steps)):
        np.testing.assert_allclose(found, each, rtol=1e-12, atol=1e-9)
    add_signed(tensor, dtype, -signs, sums)  # not fresh: the sums cancel
    np.testing.assert_allclose(sums, 0, atol=1e-9)


@pytest.mark.parametrize("dtype", NAMES)
def test_the_powers_of_the_smallest_and_largest(dtype: str) -> None:
    """Zeros and subnormal numbers count as the smallest normal one; Inf and NaN do not spread to the powers."""
    smallest = 2.0 ** DTYPES[dtype].least
    stored = narrow(np.array([[0.0, smallest / 4, -smallest, 3 * smallest, np.inf, np.nan]]), dtype)
    powers, sums = np.zeros((1, 6)), np.zeros((4, 1, 6))
    add_signed(stored, dtype, np.ones((4, 1, 1)), sums, None, powers)
    np.testing.assert_array_equal(powers[0, :4], np.square([smallest, smallest, smallest, 2 * smallest]))
    assert np.isfinite(powers).all()
    assert np.isnan(sums[:, 0, 5]).all()
    assert np.isposinf(sums[:, 0, 4]).all()


@pytest.mark.parametrize(
    ("op", "strides"),
    [*product(["ConvolutionBackwardWeights", "ConvTransposeBackwardWeights"], [(1, 1), (2, 3)]),
     ("ConvolutionBackwardWeights", (2, 2**61))],
)  # fmt: skip
def test_products_of_planes(op: str, strides: tuple[int, int]) -> None:
    """Each tap sums the products of the pixels that meet in it; NaN spreads to the taps that it meets."""
    wide_size, narrow_size = (9, 39), (6 // strides[0] + 1, 39 // strides[1] + 1)
    src, dst = (narrow_size, wide_size) if op.startswith("ConvT") else (wide_size, narrow_size)
    case = Case(
        op=op, src_channels=2, dst_channels=2, groups=2, kernel=(3, 4), strides=strides, dilations=(2, 1),
        pads_begin=(1, 2), pads_end=(1, 2), src_spatial=src, dst_spatial=dst,
    )  # fmt: skip
    dims = problem_of(case).dims
    rng = np.random.default_rng(3)
    wide = rng.integers(-9, 10, (4, 2, *dims.wide)).astype(np.float64)
    near = rng.integers(-9, 10, (4, 2, *dims.narrow)).astype(np.float64)
    wide[1, 0, 0, 1, 1] = np.nan
    found, expected = np.zeros((4, 12)), np.zeros((4, 12))
    add_products(dims, wide.reshape(4, 2, -1), near.reshape(4, 2, -1), found, lambda: False)
    for tap_y, tap_x, y, x in np.ndindex(3, 4, *dims.narrow[1:]):
        at = dims.wide_at(1, tap_y, y), dims.wide_at(2, tap_x, x)
        if 0 <= at[0] < dims.wide[1] and 0 <= at[1] < dims.wide[2]:
            expected[:, 4 * tap_y + tap_x] += (wide[:, :, 0, *at] * near[:, :, 0, y, x]).sum(1)
    np.testing.assert_array_equal(found, expected)
    assert 0 < np.isnan(found[1]).sum() < 12
