"""The wheel that people install: only the client, typed, with the project's one version."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import convgrad

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel as built by `pip wheel .`."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_installs_one_package(wheel: zipfile.ZipFile) -> None:
    """Only `convgrad` becomes importable: no top-level `app`, `kernels` or `schemas`."""
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"convgrad"}
    assert "convgrad/py.typed" in wheel.namelist()


def test_the_wheel_says_what_it_needs(wheel: zipfile.ZipFile) -> None:
    """The light client needs NumPy, httpx, ml_dtypes and shtab; everything else is an extra."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(line.split(">=")[0] for line in required) == ["httpx", "ml-dtypes", "numpy", "shtab"]
    assert metadata["Version"] == convgrad.__version__
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_wheel_has_the_command(wheel: zipfile.ZipFile) -> None:
    """Installing it puts `convgrad` on the path."""
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "convgrad = convgrad._cli:main" in wheel.read(name).decode()
