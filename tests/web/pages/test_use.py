"""Controls of the explorer while they are used: none is replaced, and all of them work with the keyboard alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.web.answers import ask
from tests.web.pages.opening import Opener

GROUPED = "/#op=Convolution&src=5x5&i=4&o=4&groups=2&at=dst:1x1"
QUESTIONS = re.findall(
    r"^### (\d+)\..*?\(http://127.0.0.1:8000/(#\S+)\).*?```text\n(.*?)\n```",
    (Path(__file__).parents[3] / "docs" / "explorer.md").read_text(encoding="utf-8"),
    re.DOTALL | re.MULTILINE,
)


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


def tab_to(page: Page, target: Locator) -> None:
    """Press Tab until an element has the focus."""
    for _ in range(90):
        if target.evaluate("element => element === document.activeElement"):
            return
        page.keyboard.press("Tab")
    raise AssertionError("no Tab leads to it")


def choose(page: Page, select: Locator, value: str) -> None:
    """Go to a value of the select that has the focus by arrow keys."""
    options = select.locator("option").all_text_contents()
    for _ in range(len(options)):
        away = options.index(value) - options.index(select.input_value())
        if away:
            page.keyboard.press("ArrowDown" if away > 0 else "ArrowUp")
    expect(select).to_have_value(value)


def fill_in(page: Page, layer: dict[str, Any]) -> None:
    """Set the fields of a layer with the keyboard alone."""
    wanted = {**layer, "rank": len(layer["src"])}
    tab_to(page, page.locator("#field-named"))
    while True:
        page.keyboard.press("Tab")
        field, axis, value = page.evaluate(
            """() => {
              const { activeElement: used } = document;
              const row = used.closest("#fields [data-field]");
              const inputs = [...(row?.querySelectorAll("input, select") ?? [])];
              return [row?.dataset.field ?? null, inputs.indexOf(used), used.value ?? ""];
            }"""
        )
        if field is None:
            return
        target = wanted[field]
        if isinstance(target, list):
            target = target[axis] if target else value
        if str(target) == value:
            continue
        if page.locator(f"select#field-{field}").count():
            choose(page, page.locator(f"#field-{field}"), str(target))
        else:
            page.keyboard.type(str(target))


@pytest.mark.parametrize(("number", "state", "answer"), QUESTIONS, ids=[number for number, *_ in QUESTIONS])
def test_a_question_by_keyboard_alone(open_page: Opener, number: str, state: str, answer: str) -> None:
    """From the first page the keyboard leads to the layer and the element of a question, and the page answers it."""
    (wanted,) = ask([{"ask": "state", "text": state}])
    element = wanted["state"]["element"]
    page = open_page("/")
    expect(page.locator("#verdict")).to_have_text("Valid")
    fill_in(page, wanted["state"]["layer"])
    for letter in "io":
        if element[letter]:
            tab_to(page, slider(page, f"channel {letter}"))
            for _ in range(element[letter] - int(slider(page, f"channel {letter}").input_value())):
                page.keyboard.press("ArrowRight")
    tab_to(page, page.locator(f"[data-role={element['role']}]"))
    if not re.match(rf"(diff_)?{element['role']}\[", page.locator("#element").inner_text()):
        page.keyboard.press("Enter")
    rank = len(element["at"])
    at = [int(each) for each in re.findall(r"\d+", page.locator("#element").inner_text())][-rank:]
    for (less, more), target, start in zip(
        [("ArrowUp", "ArrowDown"), ("ArrowLeft", "ArrowRight")][-rank:], element["at"], at, strict=True
    ):
        for _ in range(abs(target - start)):
            page.keyboard.press(more if target > start else less)
    told, line = answer.splitlines()
    expect(page.locator("#told")).to_have_text(told)
    expect(page.locator("#line")).to_have_text(line)
    expect(page.locator("#verdict")).to_have_text("Valid")
