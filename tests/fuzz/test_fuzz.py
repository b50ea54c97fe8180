"""The fuzz targets on a few thousand inputs that are always the same; `scripts/fuzz` looks for new ones."""

from __future__ import annotations

import gc
import resource
import warnings
from pathlib import Path

import pytest

from tests.fuzz.mutation import mutants
from tests.fuzz.targets import TARGETS

_INPUTS = 2000
_GROWTH_MB = 32


@pytest.mark.heavy
@pytest.mark.parametrize("name", TARGETS)
def test_no_input_violates_a_check(name: str) -> None:
    """Nearly valid inputs, split anyhow, end in a value or one of our errors, and leave no call or memory behind."""
    target = TARGETS[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Reading `.npy` or `.npz` file required additional header parsing")
        for number, data in enumerate(mutants(target.seeds, target.words, _INPUTS, seed=1)):
            if number == _INPUTS // 2:
                before = _resident_mb()
            try:
                target.take(data)
            except BaseException:
                print("the input was", data)
                raise
    assert _resident_mb() - before < _GROWTH_MB


def _resident_mb() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_right(name: str) -> None:
    """Every target accepts its seeds, which are short enough to be mutated whole, and has words."""
    target = TARGETS[name]
    assert target.words
    for seed in target.seeds:
        assert len(seed) <= 4096
        target.take(seed)
