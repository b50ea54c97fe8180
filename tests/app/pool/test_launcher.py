"""The fork server's environment: our packages, and no threads that a fork would break."""

from __future__ import annotations

from pathlib import Path

import app
from app.pool.launcher import fork_server_environment


def test_the_fork_server_finds_our_packages_and_starts_no_thread(tmp_path: Path) -> None:
    """Our packages are first on the path, and libraries use one thread."""
    environment = fork_server_environment(
        {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": "/elsewhere", "OMP_NUM_THREADS": "8", "KEPT": "yes"}
    )
    root = str(Path(app.__file__).resolve().parents[1])
    assert environment["PYTHONPATH"].split(":") == [root, "/elsewhere"]
    assert environment["OMP_NUM_THREADS"] == environment["OPENBLAS_NUM_THREADS"] == "1"
    assert environment["KEPT"] == "yes"
