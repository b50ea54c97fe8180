"""Hooks of MkDocs: the site has the pages outside `docs/` too, and links lead where they lead in the repository."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = ["on_config", "on_files", "on_page_markdown"]

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changes.md",
    "LICENSE": "licence.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Pages of the site whose files are outside `docs/`, by their path in the repository."""

_LINK = re.compile(r"(?<=\]\()([^)#\s]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave out the entries of the navigation whose page doesn't exist, and add the pages that have no entry."""
    nav = _existing(config.nav or [])
    listed = set(_pages(nav))
    others = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name not in listed)
    config.nav = [*nav, *([{"More": others}] if others else [])]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside `docs/`."""
    for path, name in OUTSIDE.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        if path == "LICENSE":
            text = f"# Licence\n\n```text\n{text}```\n"
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    here = page.file.src_uri
    source = {name: path for path, name in OUTSIDE.items()}.get(here, f"docs/{here}")

    def page_of(link: re.Match[str]) -> str:
        if ":" in link[1]:
            return link[1]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        target = OUTSIDE.get(path, path.removeprefix("docs/"))
        return posixpath.relpath(target, posixpath.dirname(here) or ".")

    return _LINK.sub(page_of, markdown)


def _existing(entry: Any) -> Any:
    """Return an entry of the navigation, or a list of them, without the pages that don't exist."""
    if isinstance(entry, list):
        return [kept for kept in map(_existing, entry) if kept]
    if isinstance(entry, dict):
        return {title: kept for title, inner in entry.items() if (kept := _existing(inner))}
    return entry if entry in OUTSIDE.values() or (ROOT / "docs" / entry).is_file() else None


def _pages(entry: Any) -> Iterator[str]:
    """Yield the pages of an entry of the navigation."""
    if isinstance(entry, str):
        yield entry
    for inner in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from _pages(inner)
