"""Scripts of users pass pyright, strict; wrong calls do not. `mypy` checks the calls in these tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
README = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))

SCRIPT = """
import asyncio
from collections.abc import Sequence

import ml_dtypes
import numpy as np

import convgrad

common: convgrad.Attributes = {"strides": [1, 1], "dilations": [1, 1], "auto_pad": "same_upper", "data_format": "NCX"}


def gradient(client: convgrad.Client, src: convgrad.Tensor, shape: Sequence[int]) -> np.ndarray:
    try:
        return client.convolution_backward_weights(src, "diff_dst.npy", weights_shape=shape, **common)
    except convgrad.InvalidParams as error:
        print(error.errors[0]["loc"], error.data)
        raise


def watch(client: convgrad.Client, inputs: convgrad.Inputs) -> list[tuple[int, ...]]:
    with client.stream("Convolution", inputs, common, on_upload=lambda sent, total: print(sent / total)) as stream:
        tiles = [event.shape for event in stream if isinstance(event, convgrad.Tile)]
    return tiles


async def at_once(count: int) -> list[np.ndarray]:
    src = np.zeros((1, 3, 4), ml_dtypes.bfloat16)
    async with convgrad.AsyncClient(retry=None, verify="ca.pem", cert=("a.pem", "b.pem")) as client:
        await client.wait_until_ready(5, on_poll=lambda health: print(health))
        return await asyncio.gather(*(client.bias_add(src, src, data_format="NCX") for _ in range(count)))
"""
# Each line is one mistake.
WRONG = """
import convgrad

client = convgrad.Client()
client.convolution("src.npy", "weights.npy", strides=[1], dilations=[1], output_padding=[0])
client.convolution("src.npy", "weights.npy", strides=[1])
client.convolution("src.npy", "weights.npy", strides=[1], dilations=[1], auto_pad="same")
client.conv_transpose("src.npy", "weights.npy", strides=1, dilations=[1])
client.conv_transpose_backward_weights("src.npy", "diff_dst.npy", strides=[1], dilations=[1])
"""


def pyright(folder: Path) -> set[tuple[str, int]]:
    """Return the lines with errors, from the checker that is in the package: it fetches nothing."""
    config = {"typeCheckingMode": "strict", "include": ["*.py"], "extraPaths": [str(ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    offline = {"PYRIGHT_PYTHON_USE_BUNDLED_PYRIGHT": "true", "https_proxy": "http://127.0.0.1:9"}
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", "."]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **offline}, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: it found errors
    found = json.loads(done.stdout)
    return {(Path(e["file"]).name, e["range"]["start"]["line"] + 1) for e in found["generalDiagnostics"]}


@pytest.mark.heavy
def test_scripts(tmp_path: Path) -> None:
    """The README's Python and a script with both clients, `**attributes` and callbacks have no errors.

    Attributes that an operation lacks or needs, and values of the wrong type, are errors before the call.
    """
    for name, text in {"readme": README, "script": SCRIPT, "wrong": WRONG}.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    lines = enumerate(WRONG.splitlines(), 1)
    assert pyright(tmp_path) == {("wrong.py", number) for number, line in lines if line.startswith("client.")}
