"""The tables of every set of features compile on any machine; `scripts/test-targets` compiles everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kernels.target import KNOWN, Target, target
from tests.kernels.paths import inside, narrower_paths

ROOT = Path(__file__).resolve().parents[2]


def _others() -> dict[str, Target]:
    """Return a known target for each code path and set of features that no test runs here.

    What LLVM can select depends on these. Other targets with the same ones differ in how instructions are scheduled.
    """
    run = [target(), *(known for known in KNOWN if known.name in narrower_paths())]
    found: dict[object, Target] = {(known.path, known.features): known for known in run}
    for known in KNOWN:
        found.setdefault((known.path, known.features), known)
    return {known.name: known for known in found.values() if known not in run}


RARE = ["aarch64", "neoverse-n1"]
"""Targets that releases compile: others of their kind have more features."""


@pytest.mark.heavy
@pytest.mark.skipif(inside(), reason="tests another path")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.release if name in RARE else ()) for name in _others()]
)
def test_tables_compile_for(name: str) -> None:
    """No register tile or product contains an instruction that the target does not have."""
    command = [sys.executable, "-m", "tests.kernels.targets", "--tables", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
