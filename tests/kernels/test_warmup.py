"""Warm-up compiles everything, nothing is compiled after it, and what was compiled once is only loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba.core.event import install_recorder

from kernels import warmup
from kernels.emit.cache import cache_folder, folder_name
from kernels.emit.compiler import ENTRIES
from tests.kernels.harness import check
from tests.problems import random_case


def test_progress_reaches_its_total() -> None:
    """Progress increases one by one and ends at the total."""
    progress = list(warmup())
    total = progress[-1][1]
    assert total > 0
    assert progress == [(done, total) for done in range(total + 1)]


def test_the_cache_holds_machine_code_alone() -> None:
    """Without bitcode and annotated source all compiled functions of a target take less than 3 MB."""
    assert list(warmup())
    sizes = [file.stat().st_size for file in Path(cache_folder()).rglob("*.nbc")]
    assert len(sizes) >= len(ENTRIES)
    assert sum(sizes) < 3_000_000


def test_no_call_compiles() -> None:
    """After the warm-up, calls of every kind use only compiled code."""
    list(warmup())
    rng = np.random.default_rng(41)
    with install_recorder("numba:compile") as recorder:
        for _ in range(150):
            check(random_case(rng, macs=20_000))
    assert not recorder.buffer, f"compiled in a call: {recorder.buffer[0][1]}"


ROOT = Path(__file__).parents[2]

# Numba's own events tell a compilation from a load. This runs in its own process, like the one that workers are
# forked from. Numba compiles parts of its own library along with ours.
COUNT = """
from numba.core import event
import pytest

from kernels import warmup
with event.install_recorder("numba:compile") as recorder:
    for _ in warmup():
        pass
ours = [occurrence.data["dispatcher"].py_func.__module__.startswith("kernels.") and occurrence.is_start
        for _, occurrence in recorder.buffer]
print(sum(ours))
"""


def compilations(folder: Path | None = None) -> int:
    """Warm up in a new process, with `folder` as its cache if given; return the number of our functions compiled."""
    command = [sys.executable, "-c", COUNT]
    environment = dict(os.environ) if folder is None else {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, check=True, capture_output=True, text=True
    )
    return int(done.stdout)


@pytest.mark.heavy
def test_a_second_warm_up_compiles_nothing(tmp_path: Path) -> None:
    """After one warm-up has filled the cache, or the gaps in it, the next one compiles nothing."""
    compilations()
    half = tmp_path / folder_name()
    shutil.copytree(cache_folder(), half)
    # functions that others are built from, and one that nothing else calls
    missing = [file for name in ("_pack_run-", "bring_box-", "store-") for file in half.rglob(f"*.{name}*.nbi")]
    assert len(missing) == 3, missing
    for file in missing:
        file.unlink()
    assert compilations(tmp_path) == 3
    assert compilations(tmp_path) == 0


def test_no_function_is_compiled_for_two_signatures() -> None:
    """Constants and unsigned addresses among the arguments create no second specialisation."""
    list(warmup())
    compiled = [vars(sys.modules[e.function.__module__])[e.function.__name__] for e in ENTRIES if e.function]
    assert {len(each.overloads) for each in compiled if hasattr(each, "overloads")} == {1}
