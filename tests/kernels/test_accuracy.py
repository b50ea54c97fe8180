"""Real-valued data: errors stay below the bound of an f32 sum and one rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests import naive
from tests.kernels.harness import compute
from tests.problems import Case, fit, random_case
from tests.traps import TRAPS

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


@pytest.mark.parametrize("block", range(4))
def test_random_problems(block: int) -> None:
    """Random problems with real data stay within the bound in every dtype."""
    rng = np.random.default_rng([5, block])
    for _ in range(50):
        assert_accurate(random_case(rng, macs=100_000, longer=int(rng.choice([1, 1, 8]))))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("trap", [trap for trap in TRAPS if trap.macs > 400_000], ids=lambda trap: trap.name)
def test_long_sums(trap: Case, dtype: str) -> None:
    """Long sums stay within the bound: f16 and bf16 are summed in f32, never in their own dtype."""
    assert_accurate(fit(replace(trap, dtype=dtype), macs=20_000_000))


def test_the_bound_notices_a_sum_in_bf16() -> None:
    """The bound is tight enough to catch a kernel that rounds to bf16 after each image."""
    case = Case(
        dtype="bf16",
        n=16,
        src_channels=8,
        dst_channels=8,
        src_spatial=(9, 9),
        dst_spatial=(9, 9),
        kernel=(1, 1),
    )
    inputs = case.floats()
    total = np.zeros(case.output_shape)
    for image in range(case.n):
        one = {name: values[image : image + 1] for name, values in inputs.items()}
        total = naive.round_to("bf16", total + replace(case, n=1).exact(one)).astype(np.float64)
    exact = case.exact(inputs)
    magnitude = case.exact({name: np.abs(values.astype(np.float64)) for name, values in inputs.items()})
    assert (np.abs(total - exact) > tolerance(case, exact, magnitude)).any()
