"""Block sizes: those that affect bits, and those that only affect speed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import numpy as np
import pytest

from kernels.blocks import STEPS, SUMS
from kernels.cache import CACHE
from tests.kernels.harness import assert_same_bits, compute
from tests.kernels.sizes import resize
from tests.kernels.workers import large_case, rough, small_units

COMPILED = {"strip_positions"}
"""Sizes that are built into compiled code."""


@contextmanager
def _sized(**sizes: int) -> Iterator[None]:
    with small_units(), pytest.MonkeyPatch.context() as patch:
        resize(patch, **sizes)
        CACHE.clear()
        yield
    CACHE.clear()


def test_a_size_has_one_name() -> None:
    """No name is in both tables."""
    assert not vars(SUMS).keys() & vars(STEPS).keys()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("forward", [False, True])
def test_steps_decide_no_bits(dtype: str, forward: bool) -> None:
    """The sizes of units, of visits, and of steps between checks for a stop may change: rounded sums stay the same."""
    case = large_case(np.random.default_rng([17, forward, len(dtype)]), dtype, forward=forward)
    inputs = rough(case)
    with _sized():
        expected = compute(case, inputs, workers=3)
    for name in sorted({field.name for field in fields(STEPS)} - COMPILED):
        for value in (1, getattr(STEPS, name) // 50, 8 * getattr(STEPS, name)):
            with _sized(**{name: value}):
                assert_same_bits(compute(case, inputs, workers=3), expected, case)
