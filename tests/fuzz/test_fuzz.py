"""The fuzz targets on a few thousand inputs that are always the same; `scripts/fuzz` looks for new ones."""

from __future__ import annotations

import pytest

from tests.fuzz.memory import MOST_MB, growth_mb
from tests.fuzz.targets import TARGETS


@pytest.mark.heavy
@pytest.mark.parametrize("name", TARGETS)
def test_no_input_violates_a_check(name: str) -> None:
    """Nearly valid inputs, split anyhow, end in a value or one of our errors, and leave no call or memory behind."""
    assert growth_mb(TARGETS[name], TARGETS[name].seeds, 2000) < MOST_MB


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_right(name: str) -> None:
    """Every target accepts its seeds, which are short enough to be mutated whole, and has words."""
    target = TARGETS[name]
    assert target.words
    for seed in target.seeds:
        assert len(seed) <= 4096
        target.take(seed)
