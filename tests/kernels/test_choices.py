"""The choice between paths: the one that every target takes, and the time lost by it where that was measured."""

from __future__ import annotations

from math import exp, log

import pytest

from benchmarks import choices, fit
from kernels.costs import COSTS

pytestmark = pytest.mark.heavy

MEASURED = fit.read(sorted(fit.DATA.glob("regret-*.json")))


def _mean(values: list[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def test_every_target_chooses_as_recorded() -> None:
    """No change moves a layer to another path unnoticed: `python -m benchmarks.choices` updates the record."""
    now, recorded = choices.table().splitlines(), choices.FILE.read_text(encoding="utf-8").splitlines()
    assert [row for row in now if row not in recorded] == []
    assert len(now) == len(recorded) > 200


@pytest.mark.skipif(not MEASURED, reason="nothing was measured on this code path")
def test_the_chosen_paths_lose_little() -> None:
    """Over all measured layers the mean time is near that of the best paths, and no layer is far from it."""
    found = fit.regrets(MEASURED, COSTS)
    assert len(found) > 100
    assert _mean(found) < 1.02
    assert max(found) < 1.5
