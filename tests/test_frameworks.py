"""The examples of the frameworks work, with the real packages and the real service."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.live import LiveService

ROOT = Path(__file__).parents[1]
PACKAGES = {"pytorch": ("torch", "train_torch"), "jax": ("jax", "train_jax")}


@pytest.mark.parametrize("page", PACKAGES)
def test_the_example_trains_to_the_same_loss(service: LiveService, page: str, tmp_path: Path) -> None:
    """Every step's loss is that of the framework alone, but for rounding, and the curves are drawn."""
    package, example = PACKAGES[page]
    for needed in (package, "sklearn", "matplotlib"):
        pytest.importorskip(needed, reason="scripts/test-frameworks installs it")
    picture = tmp_path / "losses.png"
    command = [f"examples/{example}.py", "--url", service.url, "--epochs=1", "--picture", str(picture)]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "largest difference" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
