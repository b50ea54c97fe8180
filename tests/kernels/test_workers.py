"""The same bits for any number of workers, on problems that are split, mostly by channels, slabs or chunks."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.target import target
from tests.kernels.bits import DTYPES
from tests.kernels.paths import inside
from tests.kernels.workers import survey

pytestmark = [pytest.mark.heavy, pytest.mark.path]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_gradients(dtype: str) -> None:
    """Gradients of mixed magnitudes have the same bits for 1, 2, 3 and 7 workers, however they are split."""
    count = 12 if inside() else 40
    counted, wrong = survey(np.random.default_rng(102), dtype, count)
    assert not wrong, wrong
    assert counted["cut"] >= 0.8 * count, counted
    assert min(counted[how] for how in ("channels", "slabs", "chunks")) >= 0.3 * count, counted
    if dtype in DTYPES:
        assert counted[f"bwd_weights_{target().dots}"] >= 0.8 * count, counted


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_forward(dtype: str) -> None:
    """The same holds for ConvTranspose and Convolution."""
    count = 8 if inside() else 25
    counted, wrong = survey(np.random.default_rng(103), dtype, count, forward=True)
    assert not wrong, wrong
    assert counted["cut"] >= 0.8 * count, counted
    assert min(counted[how] for how in ("channels", "pixels")) >= 0.25 * count, counted
    if dtype in DTYPES:
        ways = [counted[f"{name}_{target().dots}"] for name in ("conv_transpose", "convolution")]
        assert sum(ways) >= 0.8 * count, counted
        assert min(ways) >= 0.3 * count, counted
