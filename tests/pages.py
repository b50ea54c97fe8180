"""The examples of the pages: reads them from Markdown, and types them into a shell and a Python prompt."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Block", "Reader", "as_pattern", "blocks", "reader"]

ADDRESS = "127.0.0.1:8000"
"""Where the pages say that the service is."""

_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]*) -->\n)?"
    r"^```(?P<language>sh|python)\n(?P<text>.*?)^```$"
    r"(?:\n\n```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
# Runs each block that arrives as a line of JSON, in one namespace, and answers with what it printed.
_PROMPT = """
import contextlib, io, json, sys
names = {"__name__": "__main__"}
for line in sys.stdin:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(json.loads(line), "the page", "exec"), names)
    print(json.dumps(printed.getvalue()), flush=True)
"""


@dataclass(frozen=True)
class Block:
    """An example: its language, its text, why it is not run, and the output that the page shows for it."""

    language: str
    text: str
    reason: str | None = None
    output: str | None = None


def blocks(page: Path) -> list[Block]:
    """Return the examples of a page, in order.

    A comment `<!-- not run: .. -->` above one says why it isn't run; a block of `text` below one is its output, in
    which `...` stands for anything in a line, and alone for any lines.
    """
    found = _FENCE.finditer(page.read_text(encoding="utf-8"))
    return [Block(each["language"], each["text"], each["reason"], each["output"]) for each in found]


def as_pattern(output: str) -> re.Pattern[str]:
    """Return the pattern that the real output must match in full."""
    lines = [
        r"(?:.*\n)*?" if line.strip() == "..." else r".*".join(map(re.escape, line.split("..."))) + r" *\n?"
        for line in output.splitlines()
    ]
    return re.compile("".join(lines))


@dataclass(frozen=True)
class Reader:
    """Somebody who types a page's examples, in one folder, with the service at an address; `prompt` is their Python."""

    url: str
    folder: Path
    prompt: subprocess.Popen[str]

    def type(self, block: Block) -> str:
        """Run a block; return what it printed. Raises `AssertionError` when it fails."""
        text = block.text.replace(ADDRESS, self.url.removeprefix("http://"))
        return self._shell(text) if block.language == "sh" else self._python(text)

    def _shell(self, text: str) -> str:
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", text],
            cwd=self.folder,
            env=_environment(self.url),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}"
        return done.stdout

    def _python(self, text: str) -> str:
        assert self.prompt.stdin is not None
        assert self.prompt.stdout is not None
        try:
            self.prompt.stdin.write(json.dumps(text) + "\n")
            self.prompt.stdin.flush()
        except BrokenPipeError:
            pass  # the error of an earlier block is reported below
        answer = self.prompt.stdout.readline()
        if not answer:
            assert self.prompt.stderr is not None
            raise AssertionError(f"{text}\n{self.prompt.stderr.read()}")
        printed: str = json.loads(answer)
        return printed


@contextmanager
def reader(url: str, folder: Path) -> Iterator[Reader]:
    """Give a reader who works in a folder."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", _PROMPT],
        cwd=folder,
        env=_environment(url),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as prompt:
        try:
            yield Reader(url, folder, prompt)
        finally:
            prompt.kill()


def _environment(url: str) -> dict[str, str]:
    root = Path(__file__).resolve().parent.parent
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    modules = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PATH": path, "PYTHONPATH": modules, "CONVGRAD_URL": url, "COLUMNS": "80"}
