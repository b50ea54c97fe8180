"""The pages and examples of the frameworks work as printed, with the real packages and the real service."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import convgrad
from convgrad._layer import use
from tests.live import LiveService

ROOT = Path(__file__).parents[1]
PACKAGES = {"pytorch": ("torch", "train_torch"), "jax": ("jax", "train_jax")}


@pytest.mark.parametrize("page", PACKAGES)
def test_the_page(service: LiveService, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python blocks of a page run one after another, and print what they promise."""
    pytest.importorskip(PACKAGES[page][0], reason="scripts/test-frameworks installs it")
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    with convgrad.Client(service.url) as client:
        names: dict[str, Any] = {"client": client}
        try:
            for block in blocks:
                exec(block.replace('convgrad.Client("http://127.0.0.1:8000")', "client"), names)
        finally:
            use(None)
    printed = capsys.readouterr().out
    promised = {"pytorch": ["torch.Size([16, 3, 3, 3])"], "jax": ["(3, 3, 3, 16)", "(1, 6, 10, 10) ['diff_bias', "]}
    assert all(each in printed for each in promised[page]), printed


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
