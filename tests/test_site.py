"""The documentation as a site: it builds without a warning, holds every page, and loads nothing from other hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {"README.md": "", "CONTRIBUTING.md": "contributing/", "SECURITY.md": "security/", "CHANGELOG.md": "changes/"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built as `scripts/docs --build` does it: a broken link is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def addresses() -> dict[str, Path]:
    """Return the pages of the repository by their addresses in the site."""
    found = {address: ROOT / name for name, address in OUTSIDE.items()}
    for path in (ROOT / "docs").rglob("*.md"):
        name = path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        found[f"{name}/".replace("README/", "")] = path
    return found


def test_every_page_is_there(site: Path) -> None:
    """Each page of the repository is a page of the site, with its heading, and the search finds it."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    searched = {entry["location"] for entry in index["docs"]}
    for address, path in addresses().items():
        heading = re.sub(r"[`\\]", "", path.read_text(encoding="utf-8").partition("# ")[2].partition("\n")[0])
        page = re.sub(r"<[^>]+>", "", (site / address / "index.html").read_text(encoding="utf-8"))
        assert heading in page, address
        assert address in searched


def test_nothing_is_loaded_from_other_hosts(site: Path) -> None:
    """Scripts, styles, fonts and pictures are files of the site."""
    for path in site.rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|source|iframe)[^>]* src=\"?([^\"\s>]+)", page)
        loaded += re.findall(r"<link[^>]* rel=\"?(?:stylesheet|preconnect|icon)\"?[^>]* href=\"?([^\"\s>]+)", page)
        loaded += re.findall(r"<link[^>]* href=\"?([^\"\s>]+)[^>]* rel=\"?(?:stylesheet|preconnect|icon)\b", page)
        assert any("search" in name or "bundle" in name for name in loaded), path
        assert not [name for name in loaded if re.match(r"(https?:)?//", name)], path
    # Material for MkDocs would fetch this script from a host of its own to draw a diagram.
    assert not [path for path in site.rglob("index.html") if 'class="mermaid"' in path.read_text(encoding="utf-8")]
