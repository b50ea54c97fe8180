"""The fork server's environment: our packages, and no threads that a fork would break."""

from __future__ import annotations

from pathlib import Path

import pytest

import app
from app.pool.launcher import Launcher, fork_server_environment


def test_the_fork_server_finds_our_packages_and_starts_no_thread(tmp_path: Path) -> None:
    """Our packages are first on the path, and libraries use one thread."""
    environment = fork_server_environment(
        {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": "/elsewhere", "OMP_NUM_THREADS": "8", "KEPT": "yes"}
    )
    root = str(Path(app.__file__).resolve().parents[1])
    assert environment["PYTHONPATH"].split(":") == [root, "/elsewhere"]
    assert environment["OMP_NUM_THREADS"] == environment["OPENBLAS_NUM_THREADS"] == "1"
    assert environment["KEPT"] == "yes"


def test_the_time_left_is_estimated_from_the_share_that_is_done() -> None:
    """A quarter in ten seconds leaves thirty; before anything is done, as long as it has taken until now."""
    launcher = Launcher(
        start_s=1.0,
        on_loaded=lambda: None,
        on_worker=lambda *_: None,
        on_failed=lambda *_: None,
        on_died=lambda *_: None,
    )
    launcher._began -= 10
    assert launcher.seconds_left() == pytest.approx(10, abs=1)
    launcher.share = 0.25
    assert launcher.seconds_left() == pytest.approx(30, abs=3)
    launcher.share = 1.0
    assert launcher.seconds_left() == 0
