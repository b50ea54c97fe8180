"""The loop that measures a processor's speed."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.speed import TileLoop, tile_gflops
from kernels.target import target


@pytest.mark.skipif(not target().compiles, reason="needs compiled code")
def test_the_loop_does_the_work_that_it_counts() -> None:
    """Each sum has one product of every pixel, so the rate is that of multiply-adds that were computed."""
    loop = TileLoop()
    loop(3200)
    assert np.allclose(loop._sums, 3200 * 1e-18, rtol=1e-3, atol=0)
    assert loop.flops == 2 * loop._sums.size
    assert tile_gflops(rounds=1) > 0
