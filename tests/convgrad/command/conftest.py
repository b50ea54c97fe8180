"""Fixtures for the tests of the command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import convgrad
from tests.convgrad.server import Server

Shell = Callable[[str], "subprocess.CompletedProcess[bytes]"]
SRC = np.arange(2**18, dtype=np.float32).reshape(4, 2**16)


@pytest.fixture
def shell(tmp_path: Path, server: Server) -> Shell:
    """Run a line in bash, in a folder with src.npy; `convgrad` calls the server of the test."""
    np.save(tmp_path / "src.npy", SRC)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "convgrad").write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m convgrad "$@"\n', encoding="utf-8")
    (tools / "convgrad").chmod(0o755)
    path = os.pathsep.join([str(tools), os.environ["PATH"]])
    package = str(Path(convgrad.__file__).parent.parent)
    environment = {**os.environ, "PATH": path, "PYTHONPATH": package, "CONVGRAD_URL": server.url}

    def run(line: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, check=False, timeout=60
        )

    return run
