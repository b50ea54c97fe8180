"""Controls of the explorer while they are used: none is replaced, and all of them work with the keyboard alone."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.web.pages.opening import Opener

GROUPED = "/#op=Convolution&src=5x5&i=4&o=4&groups=2&at=dst:1x1"


def slider(page: Page, name: str) -> Locator:
    """Return a slider of the drawing."""
    return page.get_by_role("slider", name=re.compile(f"^{name}"))


def test_a_slider_is_dragged_to_its_end(open_page: Opener) -> None:
    """A slider follows the pointer through all groups, and the other one follows into each."""
    page = open_page(GROUPED)
    expect(page.locator("#verdict")).to_have_text("Valid")
    for name, other in (("channel o", "channel i"), ("channel i", "channel o")):
        box = slider(page, name).bounding_box()
        assert box
        y = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + 8, y)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] - 2, y, steps=12)
        expect(slider(page, name)).to_have_value("3")
        assert int(slider(page, other).input_value()) >= 2
        page.mouse.move(box["x"] + 2, y, steps=12)
        page.mouse.up()
        expect(slider(page, name)).to_have_value("0")
        assert int(slider(page, other).input_value()) < 2


def test_a_slider_keeps_the_focus(open_page: Opener) -> None:
    """Arrow keys move a slider from its first value to its last; it is the same element all the time."""
    page = open_page(GROUPED)
    expect(page.locator("#verdict")).to_have_text("Valid")
    used = slider(page, "channel o")
    used.focus()
    for value in ("1", "2", "3"):
        page.keyboard.press("ArrowRight")
        expect(used).to_be_focused()
        expect(used).to_have_value(value)
    expect(page.locator("#told")).to_have_text("dst[0, 3, 1, 1] sums 18 products: 9 taps times 2 channels.")


@pytest.mark.parametrize(
    "state",
    [
        "op=ConvTranspose&src=4x4&i=4&o=4",
        "op=ConvolutionBackwardWeights&src=5x6x7&kernel=3x3x3&i=2&o=2&groups=2&n=2",
        "op=BiasAddBackward&src=4x5",
        "op=Convolution&src=9&kernel=3&values=random",
    ],
)
def test_no_control_is_replaced_while_it_is_used(open_page: Opener, state: str) -> None:
    """Whichever control an arrow key changes, it is still there afterwards, with the focus."""
    page = open_page(f"/#{state}")
    expect(page.locator("#verdict")).to_have_text("Valid")
    tried = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        kind, name = page.evaluate(
            """() => {
              window.used = document.activeElement;
              const row = used.closest("[data-field], label");
              return [used.type ?? "", row?.dataset.field ?? row?.textContent ?? ""];
            }"""
        )
        if kind not in ("number", "select-one", "range"):
            continue
        tried.add(f"{kind} {name}")
        for key in ("ArrowDown", "ArrowUp"):
            page.keyboard.press(key)
            page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
            assert page.evaluate("used.isConnected && used === document.activeElement"), (kind, name, key)
    assert len(tried) > 8


def test_known_layers_by_arrow_keys(open_page: Opener) -> None:
    """Arrow keys go through all known layers; changing a field goes back to none."""
    page = open_page("/")
    names = page.get_by_label("start with a layer of")
    names.focus()
    seen = []
    for _ in range(names.locator("option").count() - 1):
        page.keyboard.press("ArrowDown")
        seen.append(names.input_value())
    assert seen == [text for text in names.locator("option").all_text_contents() if text != ".."]
    page.get_by_label("images", exact=True).fill("2")
    expect(names).to_have_value("..")
