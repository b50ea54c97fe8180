"""The kernel tests that compute, once for every code path that this processor can run.

The path is chosen when the kernels are imported, so each one gets its own process, in which this file is
skipped. The path with every feature is the one that the suite uses anyway.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kernels.target import IMITATE, NAME, SETTING, host_target, narrower, target
from kernels.target.known import FEATURE_WORDS

INNER = "CONVGRAD_TEST_INNER"

NUMBERS = (
    "blocks", "dots", "exact", "forward_dots", "images_inside", "memory", "proof", "special_values", "subnormals",
    "workers",
)  # fmt: skip
"""Tests of the numbers, for imitated instructions, which are slow; `workers` tests that units decide no bits."""

_HALVES = ("exact", "forward", "special_values", "subnormals")
"""Tests of how half-precision numbers are converted."""

_ON_ANY_PATH = {
    "addresses", "arm", "cache", "cache_folder", "choices", "paths", "prepare", "reference", "schedule_size", "target",
    "targets", "warmup",
}  # fmt: skip
COMPUTING = tuple(
    name for name in sorted(file.stem.removeprefix("test_") for file in Path(__file__).parent.glob("test_*.py"))
    if name not in _ON_ANY_PATH
)  # fmt: skip
"""Every test that computes something; the others test compiling, caches and choices, which no path changes."""


def _other_paths() -> dict[str, dict[str, str]]:
    """Return the settings for each path other than this process's own.

    The compiler is restricted to the narrower target as well, so it can't emit instructions that the target lacks.
    """
    if INNER in os.environ or target().imitated:
        return {}
    found = {}
    step = narrower(target())
    while step.compiles:
        found[step.name] = {NAME: step.name}
        step = narrower(step)
    if target().features >= FEATURE_WORDS["avx2"] | FEATURE_WORDS["fma"]:
        found["without-f16c"] = {SETTING: "avx2,fma"}
    return found


OTHER_PATHS = _other_paths()

IMITATED = ("avx512f,amx-bf16", "avx512bf16")


def _run(environment: dict[str, str], names: Sequence[str]) -> str:
    """Run test files in a separate process; return the output of failures."""
    here = Path(__file__).parent
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "--all",
        "-p",
        "no:cacheprovider",
        *(str(here / f"test_{name}.py") for name in names),
    ]
    variables = {**os.environ, **environment, INNER: "1"}
    done = subprocess.run(command, cwd=here.parents[1], env=variables, capture_output=True, text=True, check=False)
    return done.stdout[-6000:] + done.stderr[-2000:] if done.returncode else ""


@pytest.mark.skipif(INNER in os.environ, reason="already inside")
@pytest.mark.heavy(minutes=3)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", OTHER_PATHS)
def test_suite_on_path(path: str) -> None:
    """With features switched off, every test that computes passes; without F16C alone, the tests of conversions."""
    assert not (wrong := _run(OTHER_PATHS[path], _HALVES if path == "without-f16c" else COMPUTING)), wrong


@pytest.mark.skipif(INNER in os.environ, reason="already inside")
@pytest.mark.heavy(minutes=8)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", IMITATED)
def test_numbers_on_imitated_path(path: str) -> None:
    """The paths of processors that this one is not give right numbers with their instructions imitated."""
    assert not (wrong := _run({IMITATE: path}, NUMBERS)), wrong


@pytest.mark.parametrize(
    ("path", "instructions", "imitated"),
    [("amx", "amx-bf16", "avx512f,amx-bf16"), ("avx512bf16", "avx512bf16", "avx512bf16")],
)
def test_imitations_give_the_bits_of_instructions(path: str, instructions: str, imitated: str) -> None:
    """If the processor has the instructions for bf16, random sums have the same bits with them and their imitations."""
    if not host_target().features >= FEATURE_WORDS[{"amx": "amx-bf16"}.get(path, path)]:
        pytest.skip(f"this processor has no {path}")
    command = [sys.executable, "-m", "tests.kernels.bits", "100"]
    settings = {SETTING: instructions}, {SETTING: "avx512f", IMITATE: imitated}
    real, like = (
        subprocess.run(command, env={**os.environ, **setting}, capture_output=True, text=True, check=True).stdout
        for setting in settings
    )
    assert len(real.splitlines()) == 100
    assert real == like
