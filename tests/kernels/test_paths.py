"""The tests marked `path`, once for every code path that this processor can run or imitate.

They are those that reach code which differs between paths: widths of vectors and register tiles, fused products,
conversions, products of bf16. Compiling a path also runs a small exact problem for each compiled function. Searches
with many more problems: `scripts/hunt`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.target import IMITATE, NAME, host_target, target
from tests.kernels.paths import INNER, imitated_paths, narrower_paths

ROOT = Path(__file__).resolve().parents[2]
PATHS = narrower_paths() | imitated_paths()
RARE = ["ivybridge", "nehalem", *(["skylake-avx512"] if target().dots else [])]
"""Paths that releases test: of processors without AVX2, and the own one without products of bf16."""


PRODUCTS = "dots or exact or special_values or subnormals or proof"
"""Tests of products of bf16: all that differs from the own path where these are imitated."""


@pytest.mark.heavy(minutes=2)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=pytest.mark.release if path in RARE else ()) for path in PATHS]
)
def test_path(path: str) -> None:
    """Each compiled function of the path passes its proof, and the marked tests pass."""
    tests = ["-m", "pytest", "-q", "-x", "--all", "-m", "path", "-p", "no:cacheprovider", "tests/kernels"]
    if path not in narrower_paths():
        tests += ["-k", PRODUCTS]
    for command in (["-m", "kernels.prepare", "--jobs", "1"], tests):
        variables = {**os.environ, **PATHS[path]}
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
        )
        assert not done.returncode, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.heavy
def test_the_reference_without_compiled_code() -> None:
    """Where nothing can be compiled, the reference has the same bits."""
    tests = ["-m", "pytest", "-q", "-x", "--all", "-p", "no:cacheprovider", "tests/kernels/test_reproducible.py"]
    variables = {**os.environ, NAME: "reference", INNER: "1"}
    done = subprocess.run(
        [sys.executable, *tests], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.release
@pytest.mark.parametrize(("instructions", "name"), [("amx-bf16", "sapphirerapids"), ("avx512bf16", "cooperlake")])
def test_imitations_give_the_bits_of_instructions(instructions: str, name: str) -> None:
    """If the processor has the instructions for bf16, random sums have the same bits with them and their imitations."""
    if instructions not in host_target().features:
        pytest.skip(f"this processor has no {instructions}")
    command = [sys.executable, "-m", "tests.kernels.bits", "100"]
    settings = {NAME: name}, {NAME: "skylake-avx512", IMITATE: instructions}
    real, like = (
        subprocess.run(command, env={**os.environ, **setting}, capture_output=True, text=True, check=True).stdout
        for setting in settings
    )
    assert len(real.splitlines()) == 100
    assert real == like
