"""The fork server's environment, without threads that a fork would break, and its end."""

from __future__ import annotations

import asyncio
import sys
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


_FAILING = f"""#!{sys.executable}
import socket, sys
from app.pool.messages import Failed, Warming, receive, send

server = socket.socket(fileno=int(sys.argv[-1]))
send(server, Failed("the cause", final=True))
send(server, Warming(1, 2))
receive(server)
"""


async def test_a_start_while_a_fork_server_ends_keeps_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a fork server that is still ending has reported is why it ended."""
    python = tmp_path / "python"
    python.write_text(_FAILING)
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    died = asyncio.get_running_loop().create_future()
    launcher = Launcher(
        start_s=60.0, on_loaded=lambda: None, on_worker=lambda *_: None, on_failed=lambda *_: None,
        on_died=lambda *reason: died.set_result(reason),
    )  # fmt: skip
    launcher.start()
    while not launcher.share:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.002)
    launcher.start()
    launcher.kill()
    assert await died == ("the cause", True)
    await launcher.stop()
