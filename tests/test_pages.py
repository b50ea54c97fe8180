"""Every Python and shell example of the README and of the site works as printed, against the real service."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.live import LiveService
from tests.pages import as_pattern, blocks, reader

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md") if blocks(path)
)
# What an example may do that these tests can't: everything else is run.
NOT_RUN = re.compile(
    r"(scripts/(serve|build|setup)|npx|pip install|convgrad serve|source|docker (compose|buildx)"
    r"|python (examples/|-m benchmarks\.))"
)


def named(path: Path) -> str:
    """Return the path of a page within the repository."""
    return path.relative_to(ROOT).as_posix()


def copied_to(folder: Path) -> set[Path]:
    """Copy what the examples read of the checkout into a folder; return the paths of the copies."""
    for name in ("examples", "docs/images"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks" / "shapes.json", folder / "benchmarks")
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.mark.skipif(shutil.which("curl") is None, reason="examples use curl")
@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_examples_of_a_page(service: LiveService, tmp_path: Path, page: Path) -> None:
    """Typed one after another in a checkout, they succeed, print what the page shows, and change no file of it."""
    typed = [block for block in blocks(page) if block.reason is None]
    imported = re.findall(r"^import (torch|jax|tritonclient)\b", "".join(block.text for block in typed), re.MULTILINE)
    for package in imported:
        pytest.importorskip(package, reason=f"{named(page)} needs it")
    files = {path: path.read_bytes() for path in copied_to(tmp_path)}
    with reader(service.url, tmp_path) as somebody:
        for block in typed:
            printed = somebody.type(block)
            if block.output is not None:
                assert as_pattern(block.output).fullmatch(printed), f"{block.text}\nprinted\n{printed}"
    assert {path: path.read_bytes() for path in files} == files


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_what_is_not_run_cannot_be(page: Path) -> None:
    """Only installing, serving in the foreground, Docker and the like are exempt, each with its reason."""
    for block in blocks(page):
        if block.reason is not None:
            assert block.reason.strip()
            commands = [line for line in block.text.splitlines() if line and not line.startswith("#")]
            assert all(NOT_RUN.match(line) for line in commands), block.text


def test_every_example_is_found() -> None:
    """No page has an example that is fenced in another way, and would not be run."""
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"):
        fences = re.findall(r"^ *(```+|~~~+) *([^\n]*)\n", path.read_text(encoding="utf-8"), re.MULTILINE)
        languages = [language for fence, language in fences if language]
        assert len(fences) == 2 * len(languages), f"{named(path)} has a block without a language"
        assert set(languages) <= {"sh", "python", "text", "json", "ts"}, named(
            path
        )  # scripts/test-clients runs TypeScript
        assert len([each for each in languages if each in ("sh", "python")]) == len(blocks(path)), named(path)


def test_shown_output_is_compared() -> None:
    """`...` stands for the rest of a line, or for any lines; everything else must be the same."""
    pattern = as_pattern("a ... c\n...\nend\n")
    assert pattern.fullmatch("a b c\nx\ny\nend\n")
    assert pattern.fullmatch("a b c\nend\n")
    assert not pattern.fullmatch("a b d\nend\n")
    assert not pattern.fullmatch("a b c\nend\nmore\n")
