"""The model of an honest result: how large the errors of a sum in some order, rounded once, may be.

An honest kernel forms n products in f32, fused with the additions or not, adds them in f32 in some order, and rounds to
the dtype once; for f64 all of it is in f64. Let r be the exact sum and q the sum of the squared products. In a random
order the partial sums have

    E[S_k^2] = (k / n)^2 r^2 + k / n (1 - k / n) q,    sum over k:  V = n r^2 / 3 + n q / 6

and an addition rounds S_k by a uniform error of at most half a unit: 0.18 u^2 S_k^2 in the mean, where u is half a
unit of 1 and 0.18 is E[1 / m^2] / 3 for m in [1, 2) whose logarithm is uniform. So the variance of summing is

    acc = 0.18 u^2 ((n - 1) / n V + q)          and that of the one rounding          once = ulp(r)^2 / 12.

Neighbouring products of real data are alike. `coherence`, the mean of r^2 / q over the result, is 1 for random signs,
n for equal signs, and the length of the stretches that are alike for smooth data. r^2 is taken to be at least
`coherence` times q, so that an element that is small by chance is not held to less, and so is q in V.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
import numpy.typing as npt

from kernels.dtypes import DTYPES
from kernels.problem import ConvProblem
from verify.layout import is_bias

__all__ = ["EXACT", "SIGMAS", "Model", "accumulation_slack", "rounding_slack", "ulp"]

Array = npt.NDArray[np.float64]

_UNIFORM = 0.18
SIGMAS = 8.0
"""Standard deviations of summing that an element may be off."""

EXACT = 63 / 64
"""Share of the integers of the accumulator that exact sums may use; kernels that split products use a little more."""

_IMPROBABLE = 28.0
"""An honest result exceeds the slack of a mean with a probability of about exp(-28)."""


@dataclass(frozen=True)
class Model:
    """What is expected of sums of one dtype; `biased` sums are of values, not of products."""

    dtype: str
    products: bool
    coherence: float = 1.0
    scale: float = 1.0
    """Factor of the standard deviation of summing, where this data is harder than a random order."""

    exact_below: float = 0.0
    """Partial sums are exact where the sum of the products' magnitudes is below this."""

    @classmethod
    def of(cls, problem: ConvProblem, coherence: float) -> Model:
        """Return the model of a problem's results."""
        return cls(problem.dtype, not is_bias(problem), coherence)

    @property
    def unit(self) -> float:
        """Half a unit in the last place of 1 in the dtype that sums are accumulated in."""
        return 2.0**-53 if self.dtype == "f64" else 2.0**-24

    @property
    def integers(self) -> float:
        """Sums below so many of their unit are exact."""
        return EXACT / self.unit

    def summing(self, exact: Array, spread: Array, terms: Array) -> Array:
        """Return the standard deviation of the errors of summing, given exact sums and the roots of q."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            spread = np.maximum(spread, np.abs(exact) / np.sqrt(np.maximum(terms, 1.0)))  # q >= r^2 / n
            likely = np.maximum(np.abs(exact), sqrt(self.coherence) * spread)
            # A sum that is as wide as its dtype rounds its last addition once, which is counted as that rounding.
            added = np.maximum(terms - (1.0 if self.dtype in ("f32", "f64") else 0.0), 0.0)
            if terms.max(initial=0) <= 2 and not self.products:
                total = np.where(added > 1, np.abs(exact), 0.0)  # of two values: one addition
            else:
                more = np.sqrt(added / 6 * max(1.0, self.coherence) + self.products)
                total = self.norm(np.sqrt(added / 3) * likely, more * spread)
            sigma: Array = sqrt(_UNIFORM) * self.unit * self.scale * total
            if self.products:  # products below the smallest number are rounded to its multiples
                least = 2.0 ** DTYPES["f64" if self.dtype == "f64" else "f32"].smallest
                sigma = self.norm(sigma, np.sqrt(terms / 12) * least)
        return sigma

    def norm(self, a: Array, b: Array) -> Array:
        """Return the root of a^2 + b^2; only squares of f64 may be too large or too small."""
        found: Array = np.hypot(a, b) if self.dtype == "f64" else np.sqrt(a * a + b * b)
        return found


def ulp(values: Array, dtype: str) -> Array:
    """Return the distance of the numbers of a dtype around each value: that of the smallest ones around zero."""
    biased = np.asarray(values).view(np.int64) >> 52 & 0x7FF  # 0 for zeros and subnormal float64
    kind = DTYPES[dtype]
    exponent = np.clip(biased - (1022 + kind.digits), kind.smallest, kind.largest - kind.digits).astype(np.intc)
    step: Array = np.ldexp(1.0, exponent)
    return step


def rounding_slack(count: float) -> float:
    """Return the factor that the mean of squared rounding errors of so many elements may exceed its expectation by.

    0.8 is the variance of the square of a uniform number over its squared mean; 3 is its largest value.
    """
    return min(3.0, 1 + 6 * sqrt(0.8 / max(1.0, count)))


def accumulation_slack(count: float) -> float:
    """Return the same for errors of summing, which are normal: 4, or more where few elements are averaged.

    It is the tail bound of a chi-squared mean of Laurent and Massart (2000).
    """
    share = _IMPROBABLE / max(1.0, count)
    return max(4.0, 1 + 2 * sqrt(share) + 2 * share)
