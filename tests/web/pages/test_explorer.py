"""The explorer at `/`: its fields, its drawing, its address and the service's answers."""

from __future__ import annotations

import re

import numpy as np
import pytest
from playwright.sync_api import Locator, Page, expect

from schemas.tables import OPERATIONS
from tests.naive import round_to
from tests.web.pages.opening import Opener

PLAIN = "/#op=Convolution&src=7x7&kernel=3x3"
HOSTILE = (
    "op=<script>alert(1)</script>",
    "op=__proto__",
    "op=Convolution&src=1x2x3x4",
    "op=Convolution&src=-1x7",
    "op=Convolution&src=99999999999x7",
    "op=Convolution&src=7x",
    "op=Convolution&at=dst:99",
    "op=Convolution&at=window:0x0",
    "op=Convolution&constructor=1",
    "op=Convolution&__proto__=1x1",
    "op=Convolution&kernel=3x3x3&src=7x7",
    "&&==&&",
    "%00%ff%c3%28",
    "x" * 5000,
)


def element(page: Page) -> str:
    """Return the name and index of the element that the page describes."""
    text: str = page.locator("#element").inner_text()
    return text


def stepper(page: Page, name: str) -> Locator:
    """Return the field with an accessible name."""
    return page.get_by_label(name, exact=True)


def hover(page: Page, role: str, row: int, column: int) -> None:
    """Move the pointer over the centre of a cell of a map."""
    box = page.locator(f"[data-role={role}] path.body").bounding_box()
    shape = (page.locator(f"[data-role={role}] .shape").text_content() or "").split(" x ")
    assert box
    rows, columns = int(shape[-2]), int(shape[-1])
    page.mouse.move(
        box["x"] + box["width"] * (column + 0.5) / columns, box["y"] + box["height"] * (row + 0.5) / rows, steps=3
    )


def test_editing(open_page: Opener) -> None:
    """A changed field is drawn, resolved by the service and kept in the address, which brings it back."""
    page = open_page(PLAIN)
    expect(page.locator("#verdict")).to_have_text("Valid")
    expect(page.locator("[data-role=dst] .shape")).to_have_text("1 x 1 x 4 x 4")
    stepper(page, "strides, axis 1").fill("1")
    expect(page.locator("[data-role=dst] .shape")).to_have_text("1 x 1 x 4 x 7")
    page.get_by_label("dilations, axis 0: one more").click()
    expect(page.locator("[data-role=dst] .shape")).to_have_text("1 x 1 x 3 x 7")
    expect(page.locator("#resolved")).to_contain_text("f32 [1, 1, 3, 7]")
    expect(page).to_have_url(re.compile("dilations=2x1"))
    page.reload()
    expect(page.locator("[data-role=dst] .shape")).to_have_text("1 x 1 x 3 x 7")


def test_errors_are_beside_their_fields(open_page: Opener) -> None:
    """A broken rule of the service stands in the row of its field with both numbers, and goes when it is mended."""
    page = open_page(PLAIN)
    stepper(page, "channels of src").fill("3")
    stepper(page, "groups").fill("2")
    row = page.locator("[data-field=groups]")
    expect(row.locator(".wrong")).to_contain_text(re.compile("3.*2|2.*3"))
    expect(stepper(page, "groups")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#verdict")).to_contain_text("Invalid")
    stepper(page, "groups").fill("1")
    expect(row.locator(".wrong")).to_be_empty()
    expect(page.locator("#verdict")).to_have_text("Valid")


def test_the_pointer(open_page: Opener) -> None:
    """The element under the pointer is described while it is there; a click keeps it."""
    page = open_page(f"{PLAIN}&strides=2x2&at=dst:0x0")
    expect(page.locator("#told")).to_contain_text("dst[0, 0, 0, 0] sums 4 products. 5 more positions fall into")
    expect(page.locator("#sum .good")).to_contain_text("the service computed")
    hover(page, "dst", 1, 2)
    expect(page.locator("#told")).to_contain_text("dst[0, 0, 1, 2] sums 9 products.")
    hover(page, "weights", 0, 2)
    expect(page.locator("#told")).to_contain_text("weights[0, 0, 0, 2] takes part in 9 products. 7 more")
    page.mouse.move(1, 1)
    expect(page.locator("#element")).to_have_text("dst[0, 0, 0, 0]")
    hover(page, "src", 3, 3)
    page.mouse.down()
    page.mouse.up()
    page.mouse.move(1, 1)
    expect(page.locator("#element")).to_have_text("src[0, 0, 3, 3]")
    expect(page).to_have_url(re.compile("at=src:3x3"))


def test_the_keyboard(open_page: Opener) -> None:
    """Arrows, Home and End move on the focused map; plus and minus step through products, Space plays, Escape ends."""
    page = open_page(PLAIN)
    page.locator("[data-role=dst]").focus()
    for key, index in (
        ("ArrowRight", "1, 2"),
        ("ArrowDown", "2, 2"),
        ("Home", "2, 0"),
        ("End", "2, 3"),
        ("ArrowRight", "2, 3"),
    ):
        page.keyboard.press(key)
        expect(page.locator("#element")).to_have_text(f"dst[0, 0, {index}]")
    for key, at in (("+", "1"), ("+", "2"), ("-", "1"), ("-", "6")):
        page.keyboard.press(key)
        expect(page.locator("#at")).to_have_text(f"product {at} of 6")
    page.keyboard.press("Escape")
    expect(page.locator("#at")).to_be_empty()
    page.keyboard.press(" ")
    expect(page.locator("#play")).to_have_text("Stop")
    page.keyboard.press("Escape")
    expect(page.locator("#play")).to_have_text("Play")
    page.locator("[data-role=weights]").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#element")).to_have_text("weights[0, 0, 1, 1]")


@pytest.mark.parametrize("name", [operation.name for operation in OPERATIONS])
def test_the_service_computes_the_sums_shown(open_page: Opener, name: str) -> None:
    """The numbers in the cells of the result are the service's, and the sum of the element agrees with them."""
    page = open_page(f"/#op={name}")
    expect(page.locator("#verdict")).to_have_text("Valid")
    expect(page.locator("#sum .good")).to_contain_text("the service computed")
    expect(page.locator("#sum .bad")).to_have_count(0)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_sums_in_narrow_dtypes(open_page: Opener, dtype: str) -> None:
    """In f16 and bf16 the cells show what the service computes in that dtype, which is the sum's nearest number."""
    page = open_page(f"/#op=Convolution&src=9x9&strides=1x1&at=dst:7x7&dtype={dtype}")
    good = page.locator("#sum .good")
    expect(good).to_contain_text(f", the nearest {dtype} number")
    exact, computed = re.findall(r"-?\d+(?= \u2713|,)", page.locator("#sum").inner_text())[-2:]
    assert computed != exact
    assert float(computed) == float(round_to(dtype, np.array(float(exact))))


@pytest.mark.parametrize("state", HOSTILE, ids=lambda state: state[:30])
def test_an_address_that_is_no_state(open_page: Opener, state: str) -> None:
    """An address that names no layer opens the default with a note, and the page works."""
    page = open_page(f"/#{state}")
    expect(page.locator("#note")).to_contain_text("The address names no layer")
    expect(page.locator("#verdict")).to_have_text("Valid")
    assert element(page).startswith("diff_weights[")


@pytest.mark.parametrize(
    "state", ["src=100000x100000", "n=100000&i=100000", "strides=100000x1", "kernel=9x9&pads_begin=0x0", "src=600x600"]
)
def test_extreme_layers(open_page: Opener, state: str) -> None:
    """Layers that are too large or do not fit are resolved or refused by the service, and nothing breaks."""
    page = open_page(f"/#op=Convolution&{state}")
    expect(page.locator("#verdict")).not_to_have_text("Not checked yet")
