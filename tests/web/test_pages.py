"""What holds for every page: its policy, its width, its contrast and names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.web.conftest import Open

PAGES = ("/machine",)
_AXE = Path(__file__).parents[2] / ".cache" / "web" / "node_modules" / "axe-core" / "axe.min.js"


def violations(page: Any) -> list[str]:
    """Return what axe-core finds on a page: the rule and the elements."""
    page.evaluate(_AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run().then(({violations}) => violations)")
    return [f"{rule['id']}: {node['html']}" for rule in found for node in rule["nodes"]]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_axe_finds_nothing(open_page: Open, path: str, dark: bool) -> None:
    """axe-core finds no violation on a page, light or dark."""
    assert violations(open_page(path, dark=dark)) == []


@pytest.mark.parametrize("path", PAGES)
def test_it_fits_a_narrow_screen(open_page: Open, path: str) -> None:
    """Nothing is wider than a screen of 360 pixels."""
    page = open_page(path, width=360)
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_the_machine_page_comes_back(open_page: Open, complaints: list[str]) -> None:
    """The page shows the readiness, says that the service is not responding, and recovers by itself."""
    page = open_page("/machine")
    page.wait_for_function("document.getElementById('status').textContent === 'ready'")
    assert "workers ready" in page.inner_text("#facts")
    page.route("**/readyz", lambda route: route.abort())
    page.wait_for_function("document.getElementById('status').textContent === 'not responding'")
    page.unroute("**/readyz")
    page.wait_for_function("document.getElementById('status').textContent === 'ready'")
    assert {text for text in complaints if "ERR_FAILED" not in text} == set()
    complaints.clear()
