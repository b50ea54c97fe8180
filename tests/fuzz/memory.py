"""Check that a target's memory does not grow: `python -m tests.fuzz.memory TARGET FOLDER`, without instrumentation.

Traced code can't be measured: atheris 3.0.0 leaks the result of every comparison that is not a bool, so each comparison
of two arrays.
"""

from __future__ import annotations

import gc
import resource
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.mutation import mutants
from tests.fuzz.targets import TARGETS, Target

__all__ = ["MOST_MB", "growth_mb"]

MOST_MB = 2.0
"""How much the second half of some thousand inputs may add to resident memory: without a leak it is 0.1."""

_INPUTS = 8_000


def growth_mb(target: Target, kept: Sequence[bytes], inputs: int = _INPUTS) -> float:
    """Return what the second half of `inputs`, the `kept` ones and mutations of them, adds to resident memory."""
    before = 0.0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Reading `.npy` or `.npz` file required additional header parsing")
        for number, data in enumerate(mutants(kept, target.words, inputs, seed=1)):
            if number == inputs // 2:
                before = _resident_mb()
            try:
                target.take(data)
            except BaseException:
                print("the input was", data)
                raise
    return _resident_mb() - before


def _resident_mb() -> float:
    gc.collect()
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * resource.getpagesize() / 2**20


def main(name: str, folder: str) -> int:
    """Measure a target on the inputs in a folder; return the exit status."""
    kept = [file.read_bytes() for file in sorted(Path(folder).iterdir())]
    grown = growth_mb(TARGETS[name], kept)
    print(f"{name}: {_INPUTS // 2} inputs added {grown:.1f} MB to resident memory")
    return int(grown > MOST_MB)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
