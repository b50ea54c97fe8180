"""What is remembered of problems: in bounded memory."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kernels import cache, plan
from kernels.cache import Cache, cached, measure
from kernels.forward.tiles import CONV_TRANSPOSE
from kernels.gradient.tiles.schedule import schedule
from kernels.gradient.tiles.unit import BWD_WEIGHTS
from tests.kernels.harness import problem_of
from tests.problems import Case

KIB = 1 << 10


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Cache:
    """A cache of 100 KiB in the place of the process's own."""
    fresh = Cache(100 * KIB)
    monkeypatch.setattr(cache, "CACHE", fresh)
    return fresh


def array(kib: int) -> np.ndarray[Any, Any]:
    """Make an array of so many KiB."""
    return np.zeros(kib * KIB, np.uint8)


def test_what_was_not_asked_for_the_longest_time_goes_first(small: Cache) -> None:
    """Ten arrays of 9 KiB have room; the one that was asked for again stays when an eleventh and a twelfth come."""
    made: list[int] = []

    @cached
    def make(number: int) -> np.ndarray[Any, Any]:
        made.append(number)
        return array(9)

    for number in (*range(10), 0, 10, 11):
        make(number)
    assert made == list(range(12))
    assert small.nbytes <= small.limit
    make(0)
    assert made == list(range(12))
    make(1)
    assert made[12:] == [1]


def test_what_takes_half_of_the_room_is_not_kept(small: Cache) -> None:
    """It would push all else out; so it is made anew, and what was there stays. All functions share the room."""
    made: list[int] = []

    @cached
    def make(kib: int) -> np.ndarray[Any, Any]:
        made.append(kib)
        return array(kib)

    for kib in (1, 60, 60, 1):
        make(kib)
    assert made == [1, 60, 60]
    assert len(small) == 1
    others = [cached(lambda _: array(9)) for _ in range(20)]
    for other in others:
        other(0)
    assert small.nbytes <= small.limit
    assert len(small) < 11


def test_threads_at_once_keep_the_books(small: Cache) -> None:
    """Whatever threads do at the same time, in the end the bytes are those of what is there."""
    make = cached(lambda number: array(number % 13 + 1))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: make(number % 50), range(4000)))
    assert small.nbytes <= small.limit
    assert small.nbytes == sum(size for _, size in small._entries.values())


def test_sizes_are_those_of_all_that_is_reached() -> None:
    """Arrays with what they are views of; a long list by a sample of its rows, here equal, within a few per cent."""
    rows = [tuple(range(1000 * row, 1000 * row + 8)) for row in range(1000)]
    assert measure([array(500), array(500)[:9]]) == pytest.approx(1000 * KIB, rel=0.01)
    # a row is a tuple of eight integers, each an object of 28 bytes
    assert measure(rows) == pytest.approx(1000 * (56 + 8 * 8 + 8 * 28 + 8 - 16), rel=0.1)


def test_a_setting_that_is_no_number_is_refused() -> None:
    """Better than a bound that nobody meant."""
    for setting in ("", "64 MiB", "-1", "1e6"):
        with pytest.raises(ValueError, match=cache.SETTING):
            cache._limit(setting)


def hostile(i: int) -> Case:
    """A short request for a long filter: tables of tens of megabytes."""
    taps = (1 << 17) - i
    return Case(src_spatial=(taps + 4095,), dst_spatial=(4096,), kernel=(taps,))


def test_units_with_their_tables_stay_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever shapes come, all tables together have the bytes that they may have, and some of them are kept."""
    bound = Cache(40 << 20)
    monkeypatch.setattr(cache, "CACHE", bound)
    for i in range(4):
        problem = problem_of(hostile(i))
        unit = plan(problem).units[0]
        part = BWD_WEIGHTS.part(problem, unit)
        assert bound.nbytes <= bound.limit
        assert BWD_WEIGHTS.part(problem, unit) is part
        assert measure(part) > 10 << 20
        assert schedule(problem) is part.plan
        forward = problem_of(Case(op="ConvTranspose", src_spatial=(9 + i,), dst_spatial=(11 + i,), kernel=(3,)))
        first = plan(forward).units[0]
        assert CONV_TRANSPOSE.share(forward, first) is CONV_TRANSPOSE.share(forward, first)
    assert BWD_WEIGHTS.part(problem, unit) is part


def test_a_problem_from_another_process_is_found() -> None:
    """Strings have another hash there: a problem's own is not sent along."""
    made = "problem_of(Case(src_spatial=(5,), dst_spatial=(3,), kernel=(3,)))"
    script = f"""if True:
        import pickle, sys
        from tests.kernels.harness import problem_of
        from tests.problems import Case
        problem = {made}
        hash(problem)
        sys.stdout.buffer.write(pickle.dumps(problem))
    """
    known = {problem_of(Case(src_spatial=(5,), dst_spatial=(3,), kernel=(3,))): "this one"}
    for seed in "1", "2":
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
        assert known[pickle.loads(done.stdout)] == "this one"
