"""Warm-up compiles everything, and nothing is compiled after it."""

from __future__ import annotations

import numpy as np
from numba.core.event import install_recorder

from kernels import warmup
from tests.kernels.harness import check
from tests.problems import random_case


def test_progress_reaches_its_total() -> None:
    """Progress increases one by one and ends at the total."""
    progress = list(warmup())
    total = progress[-1][1]
    assert total > 0
    assert progress == [(done, total) for done in range(total + 1)]


def test_no_call_compiles() -> None:
    """After the warm-up, calls of every kind use only compiled code."""
    list(warmup())
    rng = np.random.default_rng(41)
    with install_recorder("numba:compile") as recorder:
        for _ in range(150):
            check(random_case(rng, macs=20_000))
    assert not recorder.buffer, f"compiled in a call: {recorder.buffer[0][1]}"
