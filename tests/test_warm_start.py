"""What a restart costs: kernels that were compiled once are loaded, never compiled again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Numba's own events tell a compilation from a load. It happens in a process of its own, like the one that
# workers are forked from.
COUNT = """
from numba.core import event
from kernels import warmup
with event.install_recorder("numba:compile") as recorder:
    for _ in warmup():
        pass
print(sum(occurrence.is_start for _, occurrence in recorder.buffer))
"""


def compilations() -> int:
    """Warm up in a new process and count what it compiled."""
    command = [sys.executable, "-c", COUNT]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), check=True, capture_output=True, text=True)
    return int(done.stdout)


def test_a_second_warm_up_compiles_nothing() -> None:
    """After one warm-up has filled the cache, the next process loads every kernel and compiles none."""
    compilations()
    assert compilations() == 0
