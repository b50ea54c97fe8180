"""Every Python and shell example of the README and of the site works as printed, against the real service.

A comment `<!-- not run: .. -->` above an example says why it isn't run; a block of `text` below one is its output, in
which `...` stands for anything in a line, and alone for any lines.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.live import LiveService
from tests.naive import bwd_weights

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
ADDRESS = "127.0.0.1:8000"
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]*) -->\n)?"
    r"^```(?P<language>sh|python)\n(?P<text>.*?)^```$"
    r"(?:\n\n```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
# What an example may do that these tests can't.
NOT_RUN = re.compile(
    r"(scripts/(serve|build|setup)|npx|pip install|convgrad serve|source|docker (compose|buildx)"
    r"|python (examples/|-m benchmarks\.))"
)
# Runs each block that arrives as a line of JSON, in one namespace, and answers with what it printed.
PROMPT = """
import contextlib, io, json, sys
names = {"__name__": "__main__"}
for line in sys.stdin:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(json.loads(line), "the page", "exec"), names)
    print(json.dumps(printed.getvalue()), flush=True)
"""

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="the examples use curl")

Typed = Callable[[re.Match[str]], str]


def blocks(page: Path) -> list[re.Match[str]]:
    """Return the examples of a page, in order."""
    return list(FENCE.finditer(page.read_text(encoding="utf-8")))


def as_pattern(output: str) -> re.Pattern[str]:
    """Return the pattern that the real output must match in full."""
    lines = [
        r"(?:.*\n)*?" if line.strip() == "..." else r".*".join(map(re.escape, line.split("..."))) + r" *\n?"
        for line in output.splitlines()
    ]
    return re.compile("".join(lines))


@contextmanager
def reader(url: str, folder: Path) -> Iterator[Typed]:
    """Give a function that types an example, in one folder and one Python, and returns what it printed."""
    modules = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": modules, "CONVGRAD_URL": url, "COLUMNS": "80"}

    def typed(block: re.Match[str]) -> str:
        text = block["text"].replace(ADDRESS, url.removeprefix("http://"))
        if block["language"] == "sh":
            command = ["bash", "-e", "-o", "pipefail", "-c", text + "\n"]
            done = subprocess.run(
                command, cwd=folder, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True, timeout=240
            )
            assert done.returncode == 0, f"{text}\n{done.stdout}"
            return done.stdout
        assert prompt.stdin
        assert prompt.stdout
        assert prompt.stderr
        prompt.stdin.write(json.dumps(text) + "\n")
        prompt.stdin.flush()
        answer = prompt.stdout.readline()
        assert answer, f"{text}\n{prompt.stderr.read()}"
        return str(json.loads(answer))

    command = [sys.executable, "-W", "error", "-c", PROMPT]
    with subprocess.Popen(command, cwd=folder, env=environment, stdin=-1, stdout=-1, stderr=-1, text=True) as prompt:
        try:
            yield typed
        finally:
            prompt.kill()


PAGES = sorted(
    path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md") if blocks(path)
)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.heavy if page == README else pytest.mark.release) for page in PAGES],
    ids=[page.relative_to(ROOT).as_posix() for page in PAGES],
)
def test_the_examples_of_a_page(service: LiveService, tmp_path: Path, page: Path) -> None:
    """Typed one after another in a checkout, they succeed, print what the page shows, and change no file of it."""
    for block in blocks(page):
        lines = [line for line in block["text"].splitlines() if line and not line.startswith("#")]
        assert block["reason"] in (None, "needs a GPU") or all(map(NOT_RUN.match, lines)), block["text"]
    examples = [block for block in blocks(page) if block["reason"] is None]
    text = "".join(block["text"] for block in examples)
    for package in re.findall(r"^import (torch|jax|tritonclient)\b", text, re.MULTILINE):
        pytest.importorskip(package, reason="the page needs it")
    for name in ("examples", "docs/images"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks" / "shapes.json", tmp_path / "benchmarks")
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with reader(service.url, tmp_path) as typed:
        for block in examples:
            printed = typed(block)
            shown = block["output"]
            assert shown is None or as_pattern(shown).fullmatch(printed), f"{block['text']}\nprinted\n{printed}"
    assert {path: path.read_bytes() for path in files} == files


def test_the_gradient_is_right(service: LiveService, tmp_path: Path) -> None:
    """Curl and the command of the README write a file that numpy.load reads and that holds the gradient."""
    shell = [block for block in blocks(README) if block["language"] == "sh"]
    with reader(service.url, tmp_path) as typed:
        for command in ("np.save(", "convgrad run"):
            (block,) = (block for block in shell if command in block["text"])
            typed(block)
            computed = np.load(tmp_path / "diff_weights.npy")
            (tmp_path / "diff_weights.npy").unlink()
            src, diff_dst = (np.load(tmp_path / f"{name}.npy") for name in ("src", "diff_dst"))
            expected = bwd_weights(
                "ConvTransposeBackwardWeights", src, diff_dst, kernel=(4, 4), strides=(2, 2), pads_begin=(1, 1),
                dilations=(1, 1), data_format="NCX", weights_format="IOX", groups_axis="O",
            )  # fmt: skip
            np.testing.assert_allclose(computed, expected, rtol=1e-4, atol=1e-3 * np.abs(expected).max())
