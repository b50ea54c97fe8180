"""The examples run against the real service."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.live import LiveService

ROOT = Path(__file__).parents[1]


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=280
    )


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_real_layers(service: LiveService, dtype: str) -> None:
    """Real layers computed by the service agree with float64, and the table has a row for each."""
    done = _run("examples/real_layers.py", "--url", service.url, "--batch=1", "--model=WaveNet", "--dtype", dtype)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("WaveNet ")]
    assert len(rows) == 2
    assert "largest error" in done.stdout


def test_reproducible(service: LiveService) -> None:
    """The results have the bits that their page shows, on this processor too."""
    done = _run("examples/reproducible.py", "--url", service.url)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 7
    assert done.stdout in (ROOT / "docs" / "reproducibility.md").read_text(encoding="utf-8")


def test_verify_a_kernel(service: LiveService, tmp_path: Path) -> None:
    """The planted mistake is found in its tap and channels, and drawn."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "verify.png"
    done = _run("examples/verify_a_kernel.py", "--url", service.url, "--png", str(picture))
    assert "worst element [11, 5, 2, 2]" in done.stdout, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.release
def test_train_digits(service: LiveService, tmp_path: Path) -> None:
    """A network trained with filter gradients from the service learns the digits, and the loss curve is drawn."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    picture = tmp_path / "loss.png"
    done = _run("examples/train_digits.py", "--url", service.url, "--epochs=8", "--picture", str(picture))
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_no_service() -> None:
    """Without a service the examples say so, and how to start one."""
    done = _run("examples/real_layers.py", "--url", "http://127.0.0.1:9", "--wait=0")
    assert done.returncode == 2
    assert "scripts/serve" in done.stderr
