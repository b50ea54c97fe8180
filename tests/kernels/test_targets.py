"""Every known target's tables compile on any machine; `scripts/test-targets` compiles the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.target import KNOWN
from tests.kernels.test_paths import INNER

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.heavy
@pytest.mark.skipif(INNER in os.environ, reason="already inside")
@pytest.mark.parametrize("name", [known.name for known in KNOWN])
def test_tables_compile_for(name: str) -> None:
    """No register tile or product contains an instruction that the target does not have."""
    command = [sys.executable, "-m", "tests.kernels.targets", "--tables", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
