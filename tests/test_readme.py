"""What the README promises: its examples compute the right gradient, and the terminal shows what it says.

`test_pages.py` runs all examples and compares the output that the page shows.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.live import LiveService
from tests.naive import bwd_weights
from tests.pages import Block, Reader, as_pattern, blocks, reader

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BLOCKS = blocks(README)
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="the README's examples use curl")


def block_with(text: str) -> Block:
    """Return the shell block that contains a text."""
    (found,) = (block for block in BLOCKS if block.language == "sh" and text in block.text)
    return found


@pytest.fixture(scope="module")
def somebody(service: LiveService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A reader who has made the first call, so that the two tensors and the gradient exist."""
    with reader(service.url, tmp_path_factory.mktemp("readme")) as somebody:
        somebody.type(block_with("np.save("))
        yield somebody


@pytest.fixture(scope="module")
def expected(somebody: Reader) -> np.ndarray:
    """The gradient of the README's tensors by the oracle."""
    src, diff_dst = (np.load(somebody.folder / f"{name}.npy") for name in ("src", "diff_dst"))
    return bwd_weights(
        "ConvTransposeBackwardWeights", src, diff_dst, kernel=(4, 4), strides=(2, 2), pads_begin=(1, 1),
        dilations=(1, 1), data_format="NCX", weights_format="IOX", groups_axis="O",
    )  # fmt: skip


@pytest.mark.parametrize("command", ["np.save(", "convgrad run"])
def test_the_gradient_is_right(somebody: Reader, expected: np.ndarray, command: str) -> None:
    """Curl and the command write a file that numpy.load reads and that holds the gradient."""
    path = somebody.folder / "diff_weights.npy"
    path.unlink(missing_ok=True)
    somebody.type(block_with(command))
    computed = np.load(path)
    assert computed.shape == (512, 256, 4, 4)
    np.testing.assert_allclose(computed, expected, rtol=1e-4, atol=1e-3 * np.abs(expected).max())


def test_what_the_first_start_shows(service: LiveService) -> None:
    """The lines of the first start are those that the scripts and the service write, but for times and numbers."""
    (shown,) = re.findall(r"```text\n(convgrad: installing.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    setup = (ROOT / "scripts" / "setup").read_text(encoding="utf-8")
    for line in shown.splitlines():
        if line.startswith("convgrad: "):
            assert line.replace("'server'", "'$extra'") in setup
        elif "preparing" in line:
            (source,) = [path for path in (ROOT / "app").rglob("*.py") if "preparing the kernels" in path.read_text()]
            assert line.partition("INFO")[2].strip().partition(":")[0] in source.read_text(encoding="utf-8")
        else:
            numbers = as_pattern(re.sub(r"\d[\d.]*", "...", line) + "\n")
            assert any(numbers.fullmatch(logged) for logged in service.log), line
