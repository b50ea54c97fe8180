"""Search for wrong bits, on every path of this machine, for as long as it is given.

    python -m tests.kernels.hunt [--minutes N] [--seed SEED] [--path NAME ...]

The seed is the date unless it is given. Each path (this processor's own, each narrower one, AVX2 without F16C, and
those that are imitated) gets an equal share of the time, in a process of its own, and draws problems until it is over.
A failure prints the case and how to repeat it, and the search goes on with the next path. Exits with 1 after a failure.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kernels.target import target
from tests.kernels.accuracy import assert_accurate
from tests.kernels.bits import DTYPES
from tests.kernels.guard_pages import run as run_between_guard_pages
from tests.kernels.harness import Run, assert_same_bits, check
from tests.kernels.paths import imitated_paths, inside, narrower_paths
from tests.kernels.poison import poisoned
from tests.kernels.special import assert_propagates
from tests.kernels.workers import differs, large_case, small_units
from tests.problems import Case, random_case

Generator = np.random.Generator
Check = Callable[[Generator, Case], None]


def _exact(rng: Generator, case: Case) -> None:
    """Integers have the oracle's bits."""
    check(case, workers=int(rng.integers(1, 5)))


def _accurate(_: Generator, case: Case) -> None:
    """Normally distributed data stay within the bound of an f32 sum."""
    assert_accurate(case)


def _guarded(rng: Generator, case: Case) -> None:
    """Nothing outside the tensors is read or written."""
    run_between_guard_pages(case, at_end=bool(rng.integers(2)), workers=int(rng.integers(1, 4)))


def _in_any_order(rng: Generator, case: Case) -> None:
    """Units of a stage give the same bits in any order, and when they are repeated."""
    inputs = case.floats()
    expected, run = Run(case, inputs, workers=8).all(), Run(case, inputs, workers=8)
    for stage in run.stages():
        for index in rng.permutation(stage + stage):
            assert run.unit(int(index))
    run.check_memory()
    assert_same_bits(run.output, expected, case)


def _cut(rng: Generator, case: Case) -> None:
    """Rounded sums have the same bits for any number of workers, however they are cut."""
    case = large_case(rng, case.dtype, forward=case.forward)
    with small_units(by_channels=bool(rng.integers(2))):
        assert not differs(case), f"the bits depend on the number of workers: {case}"


_CHECKS: tuple[tuple[Check, int], ...] = (
    (_exact, 20), (assert_propagates, 5), (_accurate, 5), (_guarded, 5), (_in_any_order, 3), (_cut, 1),
)  # fmt: skip
"""Each check, and how often it is drawn."""


def _draw(rng: Generator) -> Case:
    longer = int(rng.choice([1, 1, 1, 4, 16]))
    case = random_case(rng, macs=40_000 * longer, longer=longer, small=bool(rng.integers(2)))
    if DTYPES and rng.integers(2) and not case.of_bias:  # else half of them run on other kernels
        case = replace(case, dtype=str(rng.choice(DTYPES)))
    return case


def search(seed: int, first: int, seconds: float) -> None:
    """Check random problems of this process's path from number `first` on until the time is over."""
    every = [each for each, often in _CHECKS for _ in range(often)]
    counted: Counter[str] = Counter()
    until = time.monotonic() + seconds
    for number in itertools.count(first):
        if time.monotonic() > until:
            break
        rng = np.random.default_rng([seed, number])
        case, chosen = _draw(rng), every[int(rng.integers(len(every)))]
        try:
            with poisoned():
                chosen(rng, case)
        except BaseException:
            print(f"{target()}: {chosen.__doc__} Not so for seed {seed}, number {number}: {case}", flush=True)
            raise
        counted[chosen.__name__.strip("_")] += 1
    print(f"{target()}: {number - first} problems, nothing found: {dict(counted)}", flush=True)


def main() -> int:
    """Search on each path; return 1 if anything was found."""
    own = {str(target()): dict[str, str]()}
    paths = own | narrower_paths() | imitated_paths()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="for all paths together (default: 30)")
    parser.add_argument("--seed", type=int, default=int(f"{dt.datetime.now(dt.UTC):%Y%m%d}"))
    parser.add_argument("--path", nargs="+", choices=paths, default=list(paths), help="default: all")
    parser.add_argument("--first", type=int, default=0, help="the number of the first problem, to repeat a failure")
    chosen = parser.parse_args()
    if inside() or (chosen.path == list(own)):
        search(chosen.seed, chosen.first, chosen.minutes * 60)
        return 0
    share = str(chosen.minutes / len(chosen.path))
    rest = ["--minutes", share, "--seed", str(chosen.seed), "--first", str(chosen.first)]
    failed = []
    for name in chosen.path:
        environment = {**os.environ, **paths[name]}
        subprocess.run(
            [sys.executable, "-m", "kernels.prepare"], env=environment, check=True, stdout=subprocess.DEVNULL
        )
        command = [sys.executable, "-m", "tests.kernels.hunt", *rest]
        if not paths[name]:
            command += ["--path", name]
        if subprocess.run(command, env=environment, check=False).returncode:
            failed.append(name)
    print(f"found something on: {', '.join(failed)}" if failed else f"seed {chosen.seed}: nothing found")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
