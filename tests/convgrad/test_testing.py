"""Verdicts in other people's test suites."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import convgrad
from convgrad.testing import assert_honest

ROOT = Path(__file__).parents[2]
LAYER = {"strides": [1], "dilations": [1], "pads_begin": [0], "pads_end": [0], "data_format": "NCX"}
INPUTS = {"src": np.array([[[1, 2, 3]]], np.float32), "weights": np.array([[[1, 1]]], np.float32)}


def test_an_honest_result_passes() -> None:
    """The report comes back, and a wrong result raises it as the message."""
    attributes = LAYER | {"weights_format": "OIX"}
    assert assert_honest(np.array([[[3, 5]]], np.float32), "Convolution", INPUTS, attributes).equal
    with pytest.raises(AssertionError, match=r"dst of Convolution, f32 .*FAILED"):
        assert_honest(np.array([[[3, 6]]], np.float32), "Convolution", INPUTS, attributes)
    with pytest.raises(convgrad.InvalidParams):
        assert_honest(np.array([[[3, 6]]], np.float32), "Convolution", INPUTS, LAYER | {"strides": [0]})


def test_the_example_and_the_fixture(tmp_path: Path) -> None:
    """The example passes as it stands, and the fixture needs no import."""
    test = "def test_it(convgrad_client):\n    assert convgrad_client.health().ready\n"
    (tmp_path / "test_fixture.py").write_text(test, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    files = [str(ROOT / "examples/test_my_kernel.py"), str(tmp_path / "test_fixture.py")]
    done = subprocess.run([*command, *files], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.rstrip().splitlines()[-1].startswith("3 passed"), done.stdout + done.stderr
