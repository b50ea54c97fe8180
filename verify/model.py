"""The model of an honest result: how large the errors of a sum in some order, rounded once, may be.

An honest kernel forms n products in f32, fused with the additions or not, adds them in f32 in some order, and rounds to
the dtype once; for f64 all of it is in f64. Let r be the exact sum and q the sum of the squared products. In a random
order the partial sums have

    E[S_k^2] = (k / n)^2 r^2 + k / n (1 - k / n) q,    sum over k:  V = n r^2 / 3 + n q / 6

and an addition rounds S_k by a uniform error of at most half a unit: 0.18 u^2 S_k^2 in the mean, where u is half a
unit of 1 and 0.18 is E[1 / m^2] / 3 for m in [1, 2) whose logarithm is uniform. So the variance of summing is

    acc = 0.18 u^2 ((n - 1) / n V + q)          and that of the one rounding          once = ulp(r)^2 / 12.

A kernel may declare another arithmetic (`verify.arithmetic`). Sums that are kept in another dtype have its u. Where the
sums of K segments are added in a dtype whose half unit is w, each of these and each of their partial sums is rounded:

    0.18 w^2 (K r^2 / 3 + K q / 6 + r^2 / K + q)

is added to acc, and noise^2 q for products that are split. Winograd's growth multiplies the root of it all.

Tensor cores cut where others round: they add the products of a block to the sum so far, each cut at the unit of the
largest one, and cut what they get to f32 (Fasi, Higham, Mikaitis and Pranesh, Numerical behavior of NVIDIA tensor
cores, 2021). Every cut is toward zero. That of many bits takes half a unit in the mean, 0.72 u |S_k| where 0.72 is
E[1 / m], that of one extra bit a quarter. These do not cancel, because partial sums keep their sign for long: m blocks
in a row leave an error of -0.36 u (S_1 + .. + S_m), whose mean square is 0.13 u^2 m^2 (r^2 / 4 + q / 12). Where
products have one sign, so do their own cuts: of n products with a `coherence` c they leave 0.52 u^2 n c r^2 / 4. Blocks
have at least 4 products (TF32 on an A100, with one extra bit; 8 and two on an H100), and segments their own sums.

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
from verify.arithmetic import Arithmetic
from verify.layout import is_bias

__all__ = ["EXACT", "SIGMAS", "UNIFORM", "Model", "accumulation_slack", "rounding_slack", "ulp"]

Array = npt.NDArray[np.float64]

UNIFORM = 0.18
_CUT_SUM, _CUT_PRODUCT, _BLOCK = 0.13, 0.52, 4
"""The squared means of cutting a sum of a block and a product, and the products of the smallest block."""
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
    arithmetic: Arithmetic
    growth: Array
    """How many times larger the errors are than those of direct sums in a random order; broadcasts to the result."""

    coherence: float = 1.0
    exact_below: float = 0.0
    """Partial sums are exact where the sum of the products' magnitudes is below this."""

    @classmethod
    def of(cls, problem: ConvProblem, arithmetic: Arithmetic, coherence: float) -> Model:
        """Return the model of a problem's results."""
        growth = arithmetic.growth(problem)
        return cls(problem.dtype, not is_bias(problem), arithmetic, growth, coherence)

    @property
    def unit(self) -> float:
        """Half a unit in the last place of 1 in the dtype that sums are accumulated in."""
        return self.arithmetic.unit

    @property
    def integers(self) -> float:
        """Sums below so many of their unit are exact."""
        return EXACT / self.arithmetic.narrowest / self.arithmetic.exact_factor

    def weights(self, terms: Array) -> tuple[Array, ...]:
        """Return the variance of the errors of summing so many products, without growth, as three numbers.

        They are its parts for each unit of the squared sum and of q, and the rest.
        """
        said, once = self.arithmetic, UNIFORM * self.arithmetic.unit**2
        # A sum that is as wide as its dtype rounds its last addition once, which is counted as that rounding.
        added = np.maximum(terms - (1.0 if self.dtype == said.sum else 0.0), 0.0)
        alike = max(1.0, self.coherence)
        if terms.max(initial=0) <= 2 and not self.products:  # of two values: one addition
            return np.asarray(once * (added > 1)), np.zeros_like(terms), np.zeros_like(terms)
        products = self.products and (said.sum != "f64" or self.dtype == "f64")
        of_sum, of_spread = once * added / 3, once * (added / 6 * alike + float(products))
        of_spread = of_spread + said.noise**2
        if said.truncates:
            blocks, unit = _CUT_SUM * np.square(terms / _BLOCK), said.unit**2 / said.segments**2
            of_sum = of_sum + unit * (blocks + _CUT_PRODUCT * terms * np.minimum(alike, terms)) / 4
            of_spread = of_spread + unit * blocks * alike / 12
        if said.segment_unit:
            count, again = np.clip(terms, 1.0, said.segments), UNIFORM * said.segment_unit**2
            of_sum = of_sum + again * (count / 3 + 1 / count)
            of_spread = of_spread + again * (count / 6 + 1)
        # products below the smallest number are rounded to its multiples
        return (
            np.asarray(of_sum),
            np.asarray(of_spread),
            np.asarray(terms / 12 * (said.least**2 if self.products else 0.0)),
        )

    def summing(self, exact: Array, spread: Array, terms: Array, growth: Array | float = 1.0) -> Array:
        """Return the standard deviation of the errors of summing, given exact sums and the roots of q.

        `growth` is that of these elements.
        """
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            spread = np.maximum(spread, np.abs(exact) / np.sqrt(np.maximum(terms, 1.0)))  # q >= r^2 / n
            likely = np.maximum(np.abs(exact), sqrt(self.coherence) * spread) if self.products else np.abs(exact)
            of_sum, of_spread, rest = (np.sqrt(each) for each in self.weights(terms))
            found: Array = growth * self.norm(self.norm(of_sum * likely, of_spread * spread), rest)
        return found

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
