"""Warm-up compiles everything, and nothing is compiled after it."""

from __future__ import annotations

import numpy as np

from kernels import warmup
from kernels._jit import COMPILED
from tests.kernels.harness import check
from tests.problems import random_case


def test_progress_reaches_its_total() -> None:
    """Progress goes up one by one and ends at the total."""
    progress = list(warmup())
    total = progress[-1][1]
    assert progress[-1] == (total, total)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert total >= len(COMPILED) > 0


def test_no_call_compiles() -> None:
    """After the warm-up, calls of every kind meet compiled code only."""
    list(warmup())
    before = [len(function.signatures) for function, _ in COMPILED]
    rng = np.random.default_rng(41)
    for _ in range(100):
        check(random_case(rng, macs=20_000))
    assert [len(function.signatures) for function, _ in COMPILED] == before
