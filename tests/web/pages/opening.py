"""What the tests of pages share."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from playwright.sync_api import Page

__all__ = ["Opener", "violations"]

_AXE = Path(__file__).parents[3] / ".cache" / "web" / "node_modules" / "axe-core" / "axe.min.js"


class Opener(Protocol):
    """Opens a page of the service, or of another at `origin`, light or dark, in a window of some width."""

    def __call__(self, path: str, *, origin: str = ..., width: int = 1280, dark: bool = False) -> Page:
        """Return the page, loaded."""


def violations(page: Page) -> list[str]:
    """Return what axe-core finds on a page: the rule and the elements."""
    page.evaluate(_AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run().then(({violations}) => violations)")
    return [f"{rule['id']}: {node['html']}" for rule in found for node in rule["nodes"]]
