"""Inf and NaN among integers."""

from __future__ import annotations

import numpy as np

from tests.kernels.harness import Tensor, assert_same_bits, compute
from tests.problems import Case

SPECIAL = (np.inf, -np.inf, np.nan)


def _spoil(rng: np.random.Generator, tensor: Tensor, count: int) -> None:
    """Put special values into a tensor, the first ones at its very ends."""
    flat = tensor.reshape(-1)
    if not flat.size:
        return
    places = [0, flat.size - 1, *rng.integers(flat.size, size=count)]
    for place in rng.permutation(places)[:count]:
        flat[place] = rng.choice(SPECIAL)


def assert_propagates(rng: np.random.Generator, case: Case) -> None:
    """A few Inf and NaN among integers reach exactly the sums that the oracle gives them to."""
    inputs = case.inputs()
    for name in rng.permutation(list(inputs))[: int(rng.integers(1, len(inputs) + 1))]:
        _spoil(rng, inputs[name], int(rng.integers(1, 4)))
    assert_same_bits(compute(case, inputs), case.expected(inputs), case)
