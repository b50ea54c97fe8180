"""Real-valued data: errors stay below the bound of an f32 sum and one rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests import naive
from tests.kernels.accuracy import assert_accurate, tolerance
from tests.problems import Case, fit, random_case
from tests.traps import TRAPS


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
        dtype="bf16", n=16, src_channels=8, dst_channels=8, src_spatial=(9, 9), dst_spatial=(9, 9), kernel=(1, 1)
    )
    inputs = case.floats()
    total = np.zeros(case.output_shape)
    for image in range(case.n):
        one = {name: values[image : image + 1] for name, values in inputs.items()}
        total = naive.round_to("bf16", total + replace(case, n=1).exact(one)).astype(np.float64)
    exact = case.exact(inputs)
    magnitude = case.exact({name: np.abs(values.astype(np.float64)) for name, values in inputs.items()})
    assert (np.abs(total - exact) > tolerance(case, exact, magnitude)).any()
