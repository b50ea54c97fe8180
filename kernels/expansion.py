"""Sums of float64 without rounding errors that matter: a few float64 whose sum is meant, along the first axis.

Only additions, subtractions and products that are rounded once take part, so the bits are the same on every processor.
The compiled form of the same chain is in `kernels.emit.doubles`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.emit.doubles import PARTS

__all__ = ["Layer", "add", "add_product", "layers", "pair", "two_sum"]

Array = npt.NDArray[np.float64]

_LOWEST, _HIGHEST = 2.0**-480, 2.0**480
"""Between these magnitudes no error of a product is below the smallest number, and no sum of products overflows."""

_FIELD_OF_ONE, _FIELD_OF_INF = 1023, 2047
_FIELDS = 960
"""Values of the exponent field between both magnitudes."""

_SCANNED = 1 << 18
"""Values that are looked at together: what is computed of them stays in a cache."""


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return a + b rounded, and the rounding error (Knuth)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def _halves(values: Array) -> tuple[Array, Array]:
    """Split values into the nearest of 26 bits and the rest, of 26 bits at most."""
    high = ((values.view(np.int64) + (1 << 26)) & -(1 << 27)).view(np.float64)
    return high, values - high


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return a * b rounded, and the rounding error (Dekker)."""
    product = a * b
    (a, a_rest), (b, b_rest) = _halves(a), _halves(b)
    return product, ((a * b - product) + a * b_rest + a_rest * b) + a_rest * b_rest


def add_product(sums: Array, a: Array, b: Array) -> None:
    """Add products to sums: rounded where a sum is one float64, else exact, as three."""
    if len(sums) == 1:
        sums[0] += a * b
        return
    product, error = two_product(a, b)
    high, lost = two_sum(sums[0], product)
    middle, of_lost = two_sum(sums[1], lost)
    middle, of_error = two_sum(middle, error)
    sums[0], sums[1] = high, middle
    sums[2] += of_lost + of_error


def add(sums: Array, more: Array) -> None:
    """Add sums to sums: one float64 each, or three."""
    if len(sums) == 1:
        sums += more
        return
    high, lost = two_sum(sums[0], more[0])
    middle, of_more = two_sum(sums[1], more[1])
    middle, of_lost = two_sum(middle, lost)
    sums[0], sums[1] = high, middle
    sums[2] += more[2] + (of_more + of_lost)


def pair(sums: Array) -> tuple[Array, Array]:
    """Return sums of three float64 rounded to one, and what is missing."""
    assert len(sums) == PARTS
    middle, rest = two_sum(sums[1], sums[2])
    high, lost = two_sum(sums[0], middle)
    return two_sum(high, lost + rest)


@dataclass(frozen=True)
class Layer:
    """The values of a tensor whose exponent fields are from `low` to `high`, times a power of two; zero for others."""

    low: int
    high: int
    shift: int

    def of(self, values: Array) -> Array:
        """Return this layer of some values."""
        fields = _fields(values)
        return np.ldexp(np.where((fields >= self.low) & (fields <= self.high), values, 0.0), self.shift)


def layers(values: Array) -> tuple[Layer | None, ...]:
    """Split values by exponent into layers whose products neither overflow nor underflow.

    None, nearly always the only layer, stands for all values, unchanged. Inf and NaN are in no layer.
    """
    flat = values.reshape(-1)
    blocks = [flat[start : start + _SCANNED] for start in range(0, flat.size, _SCANNED)]
    if all(_is_moderate(block) for block in blocks):
        return (None,)
    present = np.zeros(_FIELD_OF_INF + 1, np.bool_)
    for block in blocks:
        present[_fields(block[block != 0])] = True
    fields = np.flatnonzero(present[:_FIELD_OF_INF]).tolist()
    found = []
    while fields:
        # subnormal values, whose field is 0, are a layer of their own
        high = fields[-1]
        low = max(1, high - _FIELDS + 1) if high else 0
        found.append(Layer(low, high, _FIELD_OF_ONE + _FIELDS // 2 - 1 - high if high else _FIELD_OF_ONE))
        fields = [field for field in fields if field < low]
    return tuple(found) or (Layer(1, 0, 0),)


def _is_moderate(values: Array) -> bool:
    magnitudes = np.abs(values)
    most = magnitudes.max(initial=0.0)
    return bool(most < _HIGHEST and magnitudes.min(initial=1.0, where=magnitudes > 0) >= _LOWEST)


def _fields(values: Array) -> npt.NDArray[np.int64]:
    return values.view(np.int64) >> 52 & _FIELD_OF_INF
