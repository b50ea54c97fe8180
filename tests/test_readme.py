"""The examples of the README work as printed, typed into a shell against the real service."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.live import LiveService
from tests.naive import bwd_weights

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="the README's examples use curl")


@dataclass(frozen=True)
class Shell:
    """Runs blocks of the README in bash, in one folder, with the real address of the service."""

    url: str
    folder: Path

    def type(self, text: str) -> str:
        """Run the block that contains a text; return what it prints."""
        (block,) = (block for language, block in BLOCKS if language == "sh" and text in block)
        block = block.replace("http://127.0.0.1:8000", self.url).replace(".venv/bin/python", "python")
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", block],
            cwd=self.folder,
            env={**os.environ, "PATH": path, "CONVGRAD_URL": self.url},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def shell(service: LiveService, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A shell in whose folder the README's two tensors exist."""
    shell = Shell(service.url, tmp_path_factory.mktemp("readme"))
    shell.type("np.save(")
    return shell


def check_gradient(folder: Path) -> None:
    """Compare diff_weights.npy with the oracle on the README's tensors, and remove it."""
    src, diff_dst, computed = (np.load(folder / f"{name}.npy") for name in ("src", "diff_dst", "diff_weights"))
    (folder / "diff_weights.npy").unlink()
    expected = bwd_weights(
        "ConvTransposeBackwardWeights", src, diff_dst, kernel=(4, 4), strides=(2, 2), pads_begin=(1, 1),
        dilations=(1, 1), data_format="NCX", weights_format="IOX", groups_axis="O",
    )  # fmt: skip
    assert computed.shape == (64, 32, 4, 4)
    np.testing.assert_allclose(computed, expected, rtol=1e-4, atol=1e-3 * np.abs(expected).max())


@needs_curl
def test_two_files_and_curl(shell: Shell) -> None:
    """The curl command writes a file that numpy.load reads and that holds the gradient."""
    shell.type("-F diff_dst=@diff_dst.npy -o")
    check_gradient(shell.folder)


@needs_curl
def test_curl_watches_the_tiles(shell: Shell) -> None:
    """The events are progress, then tiles, and finally the response with the checksum."""
    printed = shell.type("curl -sSN")
    messages = [json.loads(line[5:]) for line in printed.splitlines() if line.startswith("data:")]
    kinds = [message.get("method", "response") for message in messages]
    assert kinds[-1] == "response"
    assert set(kinds[:-1]) == {"notifications/progress", "notifications/tile"}
    assert "sha256" in json.dumps(messages[-1])


@needs_curl
def test_json_rpc(shell: Shell) -> None:
    """The JSON-RPC call returns the numbers in the README."""
    result = json.loads(shell.type('"jsonrpc"'))["result"]
    data = result["outputs"]["diff_weights"]["data"]
    assert np.frombuffer(base64.b64decode(data), "<f4").tolist() == [3.0, 5.0]
    assert data in README.read_text(encoding="utf-8")


def test_the_shell_command(shell: Shell) -> None:
    """`convgrad run` writes the gradient, and the other commands of the block print their answers."""
    printed = shell.type("convgrad run")
    assert "ConvTransposeBackwardWeights" in printed
    check_gradient(shell.folder)


def test_the_python_client(service: LiveService, tmp_path: Path) -> None:
    """The Python block runs to the end, and both ways of calling return the same bits."""
    block = "\n".join(block for language, block in BLOCKS if language == "python")
    block = block.replace("http://127.0.0.1:8000", service.url)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Tile(" in done.stdout
