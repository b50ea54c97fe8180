"""How much an f32 sum may err, for tests with real-valued data."""

from __future__ import annotations

import numpy as np

from tests import naive
from tests.kernels.harness import compute
from tests.problems import Case

UNIT = 2.0**-24  # half a unit in the last place of 1 in f32
DIGITS = {"f32": 24, "f16": 11, "bf16": 8}
SMALLEST_EXPONENT = {"f32": -126, "f16": -14, "bf16": -126}


def tolerance(case: Case, exact: naive.Array, magnitude: naive.Array) -> naive.Array:
    """Bound ``|result - exact|`` where `magnitude` is the sum of the products' absolute values.

    Summing L products in f32, in any order, errs by at most about ``L * UNIT * magnitude``, and for
    independent roundings by a few ``sqrt(L) * UNIT * magnitude`` (Higham & Mary, 2019); 4 of these
    deviations are allowed. f16 and bf16 add half a unit in their last place for the one rounding at the
    end.
    """
    summing: naive.Array = 4 * np.sqrt(case.sum_length) * UNIT * magnitude
    if case.dtype == "f32":
        return summing
    largest = np.abs(exact) + summing
    exponent = np.maximum(np.frexp(largest)[1] - 1, SMALLEST_EXPONENT[case.dtype])
    rounding: naive.Array = np.ldexp(0.5, exponent - DIGITS[case.dtype] + 1)
    return summing + rounding


def assert_nothing_is_lost(case: Case, inputs: dict[str, naive.Array]) -> None:
    """Compare sums of very large and very small f32 with float64, wherever f32 can represent their products."""
    exact = case.exact(inputs)
    magnitude = case.exact({name: np.abs(values.astype(np.float64)) for name, values in inputs.items()})
    result = compute(case, inputs).astype(np.float64)
    held = magnitude < np.finfo(np.float32).max
    # rounding below the smallest normal number is allowed once per product, as in any f32 sum
    allowed = tolerance(case, exact, magnitude) + case.sum_length * 2.0**-149
    assert (np.abs(result - exact)[held] <= allowed[held]).all()


def assert_accurate(case: Case) -> None:
    """Check every element for normally distributed data against the bound."""
    inputs = case.floats()
    exact = case.exact(inputs)
    magnitude = case.exact({name: np.abs(values.astype(np.float64)) for name, values in inputs.items()})
    error = np.abs(compute(case, inputs).astype(np.float64) - exact)
    allowed = tolerance(case, exact, magnitude)
    worst = np.max(error - allowed, initial=0.0)
    assert worst <= 0, f"error exceeds its bound by {worst}: {case}"
