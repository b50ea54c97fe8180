"""What the kernels do with single numbers: widen, multiply, add, round."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_exactly", "divide", "is_not_finite", "multiply", "round_pair", "rounded", "two_sum", "widened"]


@triton.jit
def widened(values: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Return stored values in float32 or float64, exactly."""
    if values.dtype == tl.float64:
        return values.to(DTYPE)
    return values.to(tl.float32).to(DTYPE)


@triton.jit
def rounded(values: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Round sums once, to nearest even; every NaN becomes NumPy's."""
    if DTYPE == tl.float64 or DTYPE == tl.float32:  # noqa: SIM300
        found = values.to(DTYPE)
    else:
        near = values.to(tl.float32)
        bits = near.to(tl.int32, bitcast=True)
        if values.dtype == tl.float64:
            # over a float32 rounded to odd, which keeps the second rounding exact
            bits = tl.where(tl.abs(near.to(tl.float64)) > tl.abs(values), bits - 1, bits)
            toward_zero = bits.to(tl.float32, bitcast=True)
            bits = tl.where(toward_zero.to(tl.float64) != values, bits | 1, bits)
        if DTYPE == tl.bfloat16:  # noqa: SIM300
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return tl.where(values != values, 0x7FC0, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)
        found = bits.to(tl.float32, bitcast=True).to(DTYPE)
    return tl.where(values != values, tl.full(values.shape, float("nan"), DTYPE), found)


@triton.jit
def is_not_finite(values: tl.tensor) -> tl.tensor:
    """Return where values are Inf or NaN."""
    return (values - values) != 0.0


@triton.jit
def two_sum(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return a + b rounded, and the rounding error (Knuth)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


@triton.jit
def _halves(values: tl.tensor) -> tl.tensor:
    """Split values into the nearest of 26 bits and the rest, of 26 bits at most."""
    bits = (values.to(tl.int64, bitcast=True) + (1 << 26)) & -(1 << 27)
    high = bits.to(tl.float64, bitcast=True)
    return high, values - high


@triton.jit
def add_exactly(high: tl.tensor, middle: tl.tensor, low: tl.tensor, a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Add a * b to a sum of three float64, as `kernels.expansion.add_product` does; must not fuse operations."""
    product = a * b
    a_high, a_rest = _halves(a)
    b_high, b_rest = _halves(b)
    error = ((a_high * b_high - product) + a_high * b_rest + a_rest * b_high) + a_rest * b_rest
    high, lost = two_sum(high, product)
    middle, of_lost = two_sum(middle, lost)
    middle, of_error = two_sum(middle, error)
    return high, middle, low + (of_lost + of_error)


@triton.jit
def round_pair(high: tl.tensor, middle: tl.tensor, low: tl.tensor, bias: tl.tensor) -> tl.tensor:
    """Round a sum of three float64 and a bias once."""
    middle, rest = two_sum(middle, low)
    high, lost = two_sum(high, middle)
    high, low = two_sum(high, lost + rest)
    high, error = two_sum(high, bias)
    return high + (low + error)


@triton.jit
def multiply(
    total: tl.tensor, a0: tl.tensor, a1: tl.tensor, a2: tl.tensor,
    b0: tl.tensor, b1: tl.tensor, b2: tl.tensor, PARTS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return total + a b for tiles whose values are sums of `PARTS` parts.

    With three, the six largest of nine products are summed from zero on the matrix units, smallest first, and added to
    the total outside of them, which round their sums down.
    """
    if PARTS == 1:
        return tl.dot(a0, b0, total)
    block = tl.dot(a2, b0)
    block = tl.dot(a0, b2, block)
    block = tl.dot(a1, b1, block)
    block = tl.dot(a1, b0, block)
    block = tl.dot(a0, b1, block)
    return total + tl.dot(a0, b0, block)


@triton.jit
def divide(n: tl.tensor, factor: tl.tensor, shift: tl.tensor) -> tl.tensor:
    """Return n // d for 0 <= n < 2**31, with factor and shift of `kernels.gpu.tables.magic`."""
    unsigned = n.to(tl.uint32, bitcast=True)
    factors = tl.zeros_like(unsigned) + factor.to(tl.uint32, bitcast=True)
    return ((tl.umulhi(unsigned, factors) + unsigned) >> shift.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)
