"""Kernels access only their own tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.target import target
from tests.kernels.paths import some


@pytest.mark.heavy
@pytest.mark.path
@pytest.mark.parametrize("seed", [31])
def test_tensors_between_forbidden_pages(seed: int) -> None:
    """With inaccessible memory right after, or right before, each tensor, the bits are right.

    What `malloc` returns is full of large numbers, where that is glibc's.
    """
    root = Path(__file__).parents[2]
    command = [
        sys.executable, "-m", "tests.kernels.guard_pages", str(seed), str(40 if target().imitated else some(150)),
    ]  # fmt: skip
    variables = {**os.environ, "MALLOC_PERTURB_": "128"}
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout.splitlines()[-1:]}\n{done.stderr[-2000:]}"
    assert done.stdout.endswith("done\n")
