"""What a restart costs: kernels that were compiled once are loaded, never compiled again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import warmup
from kernels.emit.cache import cache_folder, folder_name
from kernels.emit.compiler import ENTRIES

ROOT = Path(__file__).resolve().parent.parent

# Numba's own events tell a compilation from a load. It happens in a process of its own, like the one that
# workers are forked from. Numba compiles parts of its own along with ours.
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
    """Warm up in a new process, with a cache folder of its own if one is given, and count what it compiled."""
    command = [sys.executable, "-c", COUNT]
    environment = dict(os.environ) if folder is None else {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.heavy
def test_a_second_warm_up_compiles_nothing(tmp_path: Path) -> None:
    """After one warm-up has filled the cache, whole or what another one had left out, the next compiles nothing."""
    compilations()
    assert compilations() == 0
    half = tmp_path / folder_name()
    shutil.copytree(cache_folder(), half)
    # what others are made of, and what nobody else calls
    missing = [file for name in ("_pack_run-", "pack_panel-", "store-") for file in half.rglob(f"*.{name}*.nbi")]
    assert len(missing) == 3, missing
    for file in missing:
        file.unlink()
    assert compilations(tmp_path) == 3
    assert compilations(tmp_path) == 0


def test_no_function_is_compiled_for_two_signatures() -> None:
    """A constant or an address without a sign among the arguments makes no specialisation of its own."""
    list(warmup())
    compiled = [vars(sys.modules[e.function.__module__])[e.function.__name__] for e in ENTRIES if e.function]
    assert {len(each.overloads) for each in compiled if hasattr(each, "overloads")} == {1}
