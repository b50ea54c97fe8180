"""The whole kernel suite, once for every code path that this processor can run.

The path is chosen when the kernels are imported, so each one gets a process of its own, in which this file
steps aside. The path with every feature is the one that the suite runs on anyway.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kernels.target import IMITATE, SETTING, target
from tests.kernels.harness import check
from tests.problems import random_case

INNER = "CONVGRAD_TEST_INNER"
SETTINGS = ("avx512f,avx512bf16,avx2,fma", "avx512f,avx2,fma", "avx2,fma", "fma", "")


def _other_paths() -> dict[str, str]:
    """Give the settings that lead to a path other than this process's, one for each path."""
    if INNER in os.environ:
        return {}
    found: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        for setting in SETTINGS:
            patch.setenv(SETTING, setting)
            tag = target.__wrapped__().tag
            if tag != target().tag:
                found.setdefault(tag, setting)
    return found


OTHER_PATHS = _other_paths()


IMITATED = ("avx512f,amx-bf16", "avx512bf16")


def _run(environment: dict[str, str], names: Sequence[str]) -> str:
    """Run test files in a process of their own; gives what went wrong."""
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *(str(here / n) for n in names)]
    variables = {**os.environ, **environment, INNER: "1"}
    done = subprocess.run(command, cwd=here.parents[1], env=variables, capture_output=True, text=True, check=False)
    return done.stdout[-6000:] + done.stderr[-2000:] if done.returncode else ""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[str]]]:
    """Start the processes that the chosen tests ask for, as many at a time as there are processors."""
    chosen = {item.callspec.params.get("path") for item in request.session.items if hasattr(item, "callspec")}
    wanted = [(tag, {SETTING: setting}, ["."]) for tag, setting in OTHER_PATHS.items()]
    names = "dots", "forward_dots", "images_inside", "units", "workers", "special_values", "subnormals"
    numbers = [f"test_{name}.py" for name in names]
    wanted += [(imitated, {IMITATE: imitated}, numbers) for imitated in IMITATED]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {path: pool.submit(_run, setting, names) for path, setting, names in wanted if path in chosen}


@pytest.mark.skipif(INNER in os.environ, reason="already inside")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", OTHER_PATHS)
def test_suite_on_path(path: str, runs: dict[str, Future[str]]) -> None:
    """With features switched off, every kernel test passes."""
    assert not (wrong := runs[path].result()), wrong


@pytest.mark.skipif(INNER in os.environ, reason="already inside")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", IMITATED)
def test_numbers_on_imitated_path(path: str, runs: dict[str, Future[str]]) -> None:
    """The paths of processors that this one is not give right numbers with their instructions imitated."""
    assert not (wrong := runs[path].result()), wrong


@pytest.mark.parametrize(
    ("path", "instructions", "imitated"),
    [("amx", "avx512f,amx-tile,amx-bf16", "avx512f,amx-bf16"), ("avx512bf16", "avx512f,avx512bf16", "avx512bf16")],
)
def test_imitations_give_the_bits_of_instructions(path: str, instructions: str, imitated: str) -> None:
    """Where the processor has the instructions for bf16, random sums on them and on their imitations are the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SETTING, instructions)
        patch.delenv(IMITATE, raising=False)
        if target.__wrapped__().dots != path:
            pytest.skip(f"this processor has no {path}")
    command = [sys.executable, "-m", "tests.kernels.bits", "100"]
    settings = {SETTING: instructions}, {SETTING: "avx512f", IMITATE: imitated}
    real, like = (
        subprocess.run(command, env={**os.environ, **setting}, capture_output=True, text=True, check=True).stdout
        for setting in settings
    )
    assert len(real.splitlines()) == 100
    assert real == like


def test_setting_selects_the_path() -> None:
    """The processor's description follows the setting, unknown words are ignored, and results stay exact."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SETTING, " avx512f , no_such_feature")
        described = target.__wrapped__()
        assert described.features <= {"avx512f"}
        patch.setenv(SETTING, "")
        portable = target.__wrapped__()
    assert not portable.features
    assert portable.lanes <= target().lanes
    rng = np.random.default_rng(51)
    for _ in range(20):
        check(random_case(rng, macs=20_000))
