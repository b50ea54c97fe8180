"""A result beside what it should be, and its errors beside what is allowed of an honest sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf, sqrt

import numpy as np
import numpy.typing as npt

from kernels.dtypes import DTYPES
from kernels.plan import Storage
from kernels.problem import ConvProblem
from kernels.reference import narrow, widen
from verify.arithmetic import Arithmetic
from verify.blocks import Block as Cut
from verify.blocks import largest_within, within
from verify.layout import pixel_axes, tap_axes
from verify.model import SIGMAS, Model, ulp
from verify.parts import part_of
from verify.terms import products_of, term_counts

__all__ = ["Block", "Compared", "block_of"]

Array = npt.NDArray[np.float64]

_TORN, _TORN_PRODUCTS = 256, 1 << 20
"""Elements of a block, and their products, that are looked at to tell whether both signs overflow."""


@dataclass(frozen=True)
class Compared:
    """What a report is about: the call, the result to verify, and what it should be (see `verify.sums.Sums`).

    The inputs are as the kernel reads them, by the arithmetic that it declares.
    """

    problem: ConvProblem
    inputs: Sequence[Storage]
    result: Storage
    exact: Array
    low: Array | None
    spread: Array
    explain: bool = False
    arithmetic: Arithmetic = field(kw_only=True)

    def near(self, index: tuple[int, ...], elements: int) -> Compared:
        """Return a part of about so many elements, one of them at `index`."""
        part = part_of(self.problem, self.inputs, index, elements)
        return replace(
            self, problem=part.problem, inputs=part.inputs, result=np.ascontiguousarray(self.result[part.place]),
            exact=self.exact[part.place], low=None if self.low is None else self.low[part.place],
            spread=self.spread[part.place],
        )  # fmt: skip

    @cached_property
    def terms(self) -> Array:
        """How many products each element sums, in a shape that broadcasts to the result."""
        return term_counts(self.problem)

    @cached_property
    def sources(self) -> tuple[Array, Array]:
        """The sums and spreads that errors come from: the largest of those that an algorithm computes together."""
        reach = self.arithmetic.reach(self.problem)
        axes = pixel_axes(self.problem) if self.problem.forward else tap_axes(self.problem)
        found = self.exact, self.spread
        for axis, far in zip(axes, reach, strict=True) if any(reach) else ():
            found = largest_within(found[0], axis, far), largest_within(found[1], axis, far)
        return found


@dataclass
class Block:
    """Elements of a result beside what they should be; all arrays have one shape."""

    stored: Storage
    rounded: Storage
    equal: npt.NDArray[np.bool_]  # a NaN equals any NaN
    got: Array
    nearest: Array
    exact: Array
    error: Array  # without sign; infinite where Inf or NaN is wrong or missing
    rounding: Array  # error of the rounded reference
    step: Array
    sigma: Array
    spread: Array
    exactly: npt.NDArray[np.bool_]  # every partial sum is exact
    unknown: npt.NDArray[np.bool_]  # the accumulator may have overflowed on the way

    @property
    def measures(self) -> tuple[Array, ...]:
        """What `Tally.sums` sums."""
        return self.error, self.rounding, self.step / sqrt(12), self.sigma, self.spread, self.exact

    def allowed(self, dtype: str) -> Array:
        """Return the largest error that rule 2 allows."""
        smallest, huge = 2.0 ** (4 - DTYPES[dtype].largest), 2.0 ** (DTYPES[dtype].largest - 1)
        size = np.abs(self.exact)
        border = (size < smallest) | (size > huge * (1 - 2.0**-8) * 2)
        return self.step * np.where(border, 1.5, 0.5) + SIGMAS * self.sigma

    def share(self, allowed: Array) -> Array:
        """Return the errors as shares of what is allowed, infinite where a wrong element should be exact."""
        with np.errstate(invalid="ignore", over="ignore"):
            share = self.error / allowed
        share[(self.error == 0) | self.unknown] = 0.0
        share[self.exactly] = np.where(self.equal[self.exactly], 0.0, np.inf)
        share[np.isnan(share)] = np.inf
        return share


def block_of(compared: Compared, model: Model, part: Cut) -> Block:
    """Return some elements of a result beside what they should be, by a model of honest errors."""
    dtype = compared.problem.dtype
    exact, spread = compared.exact[part], compared.spread[part]
    stored, rounded = compared.result[part], narrow(exact, dtype)
    got, nearest = widen(stored, dtype), widen(rounded, dtype)
    low = 0.0 if compared.low is None else compared.low[part]
    few = compared.terms[within(part, compared.terms.shape)]
    # An overflow counts as the first number that is too large, so that a sum just below it may overflow too.
    huge = inf if dtype == "f64" else 2.0 ** DTYPES[dtype].largest
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs((np.clip(got, -huge, huge) - exact) - low)
        rounding = np.abs((nearest - exact) - low)
        equal = (got == nearest) | (np.isnan(got) & np.isnan(nearest))
        error[~np.isfinite(exact) | np.isnan(got)] = np.inf
        error[equal & ~np.isfinite(got)] = 0.0  # an Inf is as far off as the exact value is large, but right
        reach = np.abs(exact) + SIGMAS * sqrt(model.coherence) * spread
        limit, magnitudes = model.arithmetic.limit, np.sqrt(few) * spread
        exactly = np.isfinite(exact) & (magnitudes < min(model.exact_below, limit))
        unknown = ~np.isfinite(got) & np.isfinite(nearest) & (reach >= limit)
        # A sum that is too large may be NaN or the other Inf where the products of the other sign overflow as well.
        torn = np.isfinite(exact) & np.isinf(nearest) & ~equal & ~np.isfinite(got)
        torn &= magnitudes - np.abs(exact) >= 2 * limit
    # a sum that is not of zeros alone is never -0
    equal &= ~(exactly & (got == 0) & (spread > 0) & (np.signbit(got) != np.signbit(nearest)))
    most = int(max(1, min(_TORN, _TORN_PRODUCTS // max(1.0, float(few.max(initial=1.0))))))
    places = np.argwhere(torn)
    for at in places[:: ceil(len(places) / most) or 1]:
        torn[tuple(at)] = _against(compared, part, at) >= limit
    unknown |= torn
    from_exact, from_spread = (each[part] for each in compared.sources)
    sigma = model.summing(from_exact, from_spread, few, model.growth[within(part, model.growth.shape)])
    return Block(
        stored, rounded, equal, got, nearest, exact, error, rounding, ulp(exact, dtype), sigma, spread, exactly, unknown
    )


def _against(compared: Compared, part: Cut, at: npt.NDArray[np.int64]) -> float:
    """Return the magnitude of the sum of an element's products whose sign is not that of the whole sum."""
    index = tuple([int(x) + (each.start or 0) for x, each in zip(at, part, strict=True)])
    products = products_of(compared.problem, compared.inputs, index) * np.sign(compared.exact[index])
    return -float(products[products < 0].sum())
