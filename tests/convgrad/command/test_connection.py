"""Waiting for a service that starts, before a call and for its own sake."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convgrad._cli import main
from tests.convgrad.server import Server, free_port


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def replying(value: Any, status: int = 200) -> Any:
    """Return a step that replies with JSON."""
    return lambda handler, _: handler.reply(status, json.dumps(value).encode())


STARTING = [replying({"status": "starting", "progress": share}, 503) for share in (0.25, 0.5)]
READY = replying({"status": "ready"})


def test_run_waits(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run --wait` makes the call once the service is ready."""
    monkeypatch.chdir(tmp_path)
    np.save("src.npy", np.ones((2, 3), np.float32))
    server.script += [*STARTING, READY]
    assert main(["run", "Op", "--src", "src.npy", "--url", server.url, "--wait", "9"]) == 0
    paths = [received.path for received in server.received]
    assert paths == ["/readyz", "/readyz", "/readyz", "/v2/models/Op/infer"]


def test_health_shows_progress(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal `health --wait` draws how far the service is, and clears the line."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    server.script += [*STARTING, READY]
    assert main(["health", "--url", server.url, "--wait", "9"]) == 0
    _, first, second, last = terminal.getvalue().split("\r\x1b[K")
    assert first.startswith("convgrad: starting █")
    assert first.endswith(" 25 %")
    assert " 50 %, 0:" in second
    assert last == ""


def test_a_wait_without_a_service(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a service the wait ends in time, with the exit code for no connection."""
    assert main(["health", "--url", f"http://127.0.0.1:{free_port()}", "--wait", "0.2"]) == 5
    assert capsys.readouterr().err.startswith("convgrad: ")
