"""The benchmark that measures the constants of the cost model runs, before an engine takes the processors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cluster.lab import HEAD, Lab


def test_constants(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints each constant, measured between two nodes."""
    command = [sys.executable, "-m", "benchmarks.cluster", "--address", HEAD]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.splitlines()
    with capsys.disabled():
        print("", *lines, sep="\n")
    assert lines[-5] == "another node"
    for line, name in zip(lines[-4:], ("unit_s", "put_rate", "send_rate", "mac_rate"), strict=True):
        assert line.split()[0] == name
        assert float(line.split()[1]) > 0
