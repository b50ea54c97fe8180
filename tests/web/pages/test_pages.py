"""What holds for every page: its width, its contrasts and names."""

from __future__ import annotations

import pytest

from tests.web.pages.opening import Opener, violations

PAGES = (
    "/",
    "/#op=Convolution&src=5x8x8&kernel=3x3x3",
    "/#op=Convolution&src=5x5&i=4&o=4&groups=2&typed=src:0x0x1x1:-0.5&values=random",
    "/#op=BiasAdd",
    "/machine",
)


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 360)], ids=["light and wide", "dark and narrow"])
@pytest.mark.parametrize("path", PAGES)
def test_axe_finds_nothing(open_page: Opener, path: str, dark: bool, width: int) -> None:
    """axe-core finds no violation on a page, light or dark, and nothing is wider than the screen."""
    page = open_page(path, dark=dark, width=width)
    page.get_by_text("ready", exact=True).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert violations(page) == []
