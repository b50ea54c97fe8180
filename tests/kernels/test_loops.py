"""The inner loops of the batch-reduce micro-kernels, for targets that this machine need not be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.target import BUILD
from tests.kernels.paths import inside

ROOT = Path(__file__).resolve().parents[2]

LOOPS = {
    "x86-64": {
        "f32 1": (10, 0, 7, 4, 0), "f32 2": (12, 0, 7, 10, 4), "lanes 1": (10, 0, 12, 0, 0),
    },
    "haswell": {
        "f32 1": (12, 0, 13, 0, 0), "f32 2": (12, 0, 8, 0, 0), "lanes 1": (12, 12, 1, 0, 0),
    },
    "skylake-avx512": {
        "f32 1": (12, 12, 1, 0, 0), "f32 2": (24, 0, 14, 0, 0), "lanes 1": (12, 12, 1, 0, 0),
    },
    "znver4": {
        "f32 1": (12, 12, 1, 0, 0), "f32 2": (24, 0, 14, 0, 0), "lanes 1": (12, 12, 1, 0, 0),
        "dots 1": (12, 0, 13, 0, 0), "dots 2": (24, 0, 14, 0, 0),
        "pairs 1": (8, 0, 5, 4, 0), "pairs 2": (16, 0, 6, 0, 0),
    },
    "neoverse-n1": {
        "f32 1": (18, 0, 10, 3, 0), "f32 2": (24, 0, 8, 2, 0), "lanes 1": (18, 0, 10, 0, 0),
    },
}  # fmt: skip
"""By target, kind and vectors: products, those with a folded factor, other loads, moves, accesses to the stack."""


@pytest.mark.heavy
@pytest.mark.skipif(inside(), reason="tests another path")
@pytest.mark.parametrize("name", LOOPS)
def test_inner_loops_have_as_many_instructions_as_recorded(name: str) -> None:
    """No tile's loop spills a sum, moves registers or stops folding a factor where it did not before."""
    command, environment = [sys.executable, "-m", "tests.kernels.loops"], {**os.environ, BUILD: name}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found = {}
    for kind, vectors, *counts in (line.split() for line in done.stdout.splitlines()):
        found[f"{kind} {vectors}"] = tuple(map(int, counts))
    assert found == LOOPS[name]
