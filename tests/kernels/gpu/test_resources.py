"""What the compiled kernels need on each generation of GPUs, none of which is used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.gpu.configurations import GENERATIONS, Generation
from tests.kernels.gpu.running import INTERPRETED, needs_triton

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [needs_triton, pytest.mark.skipif(INTERPRETED, reason="compiles: without TRITON_INTERPRET")]

RESOURCES: dict[int, dict[str, tuple[int, ...]]] = {}
"""Of kernels of products, by generation and layer: registers of a thread, and bytes of shared memory."""


@pytest.mark.parametrize("of", GENERATIONS, ids=lambda of: str(of.capability))
def test_compiled_kernels(of: Generation, tmp_path: Path) -> None:
    """Kernels of products spill no register and fit the shared memory; sums of float64 that are exact fuse nothing."""
    command = [sys.executable, "-m", "tests.kernels.gpu.resources", str(of.capability)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found = {}
    for line in done.stdout.splitlines():
        name, counts = line.rsplit(": ", 1)
        registers, stores, loads, shared, fused = map(int, counts.split())
        assert shared <= of.shared, line
        kernel = name.rsplit(", ", 1)[1]
        if kernel.startswith("multiply"):
            assert stores == loads == 0, line
            found[name] = registers, shared
        if "f64" in name:
            assert fused == 0, line
    assert found == RESOURCES[of.capability]
