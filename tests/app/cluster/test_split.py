"""Units of a job go to whichever side is free, and come back from Ray where it is late or has lost them."""

from __future__ import annotations

import pytest

from app.cluster.split import Split, processors

UNITS = 20


def take(split: Split, count: int) -> tuple[list[int], list[int]]:
    """Let both sides take what they may; Ray has `count` processors."""
    here, there = [], []
    while (unit := split.next_here()) is not None:
        here.append(unit)
    while (unit := split.next_there(count)) is not None:
        there.append(unit)
    return here, there


def test_each_unit_is_given_once() -> None:
    """Both sides take units until none is left; the last ones go to whichever side is free first."""
    split = Split(UNITS, nbytes=0, workers=2)
    seen: list[int] = []
    most: list[int] = []
    while len(seen) < UNITS:
        here, there = take(split, 3)
        most.append(len(there))
        for unit in here + there:
            split.done(unit)
        seen += here + there
    assert sorted(seen) == list(range(UNITS))
    assert most == [6, 5, 3], "a processor has a second unit while many wait, and none of the last"


def test_a_processor_that_is_busy_gets_nothing() -> None:
    """Units that are not done count."""
    split = Split(UNITS, nbytes=0, workers=2)
    here, there = take(split, 1)
    assert (len(here), len(there)) == (2, 2)
    assert take(split, 1) == ([], [])
    assert take(split, 0) == ([], [])
    split.done(there[0])
    assert [len(units) for units in take(split, 1)] == [0, 1]


def test_a_lost_unit_is_the_next_one() -> None:
    """Either side may take it, before those that wait; after the third loss only this machine."""
    split = Split(UNITS, nbytes=0, workers=1)
    (mine,), (unit, *_) = take(split, 1)
    for _ in range(2):
        split.returned(unit, lost=True)
        assert split.next_there(3) == unit
    split.returned(unit, lost=True)
    others = take(split, 3)[1]
    assert others
    assert unit not in others
    split.done(mine)
    assert split.next_here() == unit


def test_an_overdue_unit_is_computed_here() -> None:
    """It comes before those that wait, and Ray does not get it again."""
    split = Split(UNITS, nbytes=0, workers=1)
    (mine,), (unit, *_) = take(split, 1)
    split.returned(unit, lost=False)
    assert split.next_there(1) not in {None, unit}
    split.done(mine)
    assert split.next_here() == unit


def test_patience() -> None:
    """Large inputs take a while to be sent, and so do slow units."""
    assert Split(UNITS, nbytes=100_000_000, workers=1).patience == pytest.approx(
        1.0 + Split(UNITS, nbytes=0, workers=1).patience
    )
    split = Split(UNITS, nbytes=0, workers=1)
    before = split.patience
    split._here[0] = split._here.pop(take(split, 0)[0][0]) - 10.0
    split.done(0)
    assert split.patience > before + 20.0


@pytest.mark.parametrize(
    ("workers", "machines", "most", "jobs", "count"),
    [(8, 4, 4, 1, 8), (8, 4, 2, 1, 4), (8, 4, 9, 1, 8), (8, 4, 4, 2, 4), (1, 1, 1, 3, 1), (0, 0, 1, 1, 0)],
)
def test_processors(workers: int, machines: int, most: int, jobs: int, count: int) -> None:
    """A job uses no more machines than it may, and the jobs of an owner share what one job has."""
    assert processors(workers, machines, most=most, jobs=jobs) == count
