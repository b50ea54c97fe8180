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


def test_an_address_that_is_no_state(open_page: Opener) -> None:
    """An address that names no layer opens the default with a note, and the page works."""
    page = open_page("/#op=<script>alert(1)</script>")
    expect(page.locator("#note")).to_contain_text("The address names no layer")
    expect(page.locator("#verdict")).to_have_text("Valid")
    expect(page.locator("#element")).to_have_text("dst[0, 0, 3, 3]")


@pytest.mark.parametrize(
    "state", ["src=100000x100000", "n=100000&i=100000", "strides=100000x1", "kernel=9x9&pads_begin=0x0", "src=600x600"]
)
def test_extreme_layers(open_page: Opener, state: str) -> None:
    """Layers that are too large or do not fit are resolved or refused by the service, and nothing breaks."""
    page = open_page(f"/#op=Convolution&{state}")
    expect(page.locator("#verdict")).not_to_have_text("Not checked yet")


def test_only_shapes_and_work_are_shown(open_page: Opener) -> None:
    """The panel of a valid layer has shapes and work; units, tiles and refusals are there for who opens them."""
    page = open_page(PLAIN)
    panel = page.get_by_label("Layer as the service resolves it")
    expect(panel.locator("#verdict")).to_have_text("Valid")
    for text in ("src", "f32 [1, 1, 7, 7]", "dst", "multiply-adds", "144"):
        expect(panel).to_contain_text(text)
    plan = panel.locator("#plan")
    expect(plan).to_be_hidden()
    panel.get_by_text("How the service computes it").press("Enter")
    for name in ("units", "tiles", "scratch", "refusals", "pads_begin"):
        expect(plan.get_by_text(name, exact=True)).to_be_visible()
    stepper(page, "strides, axis 0").fill("1")
    expect(page.locator("#resolved")).to_contain_text("f32 [1, 1, 7, 4]")
    expect(plan).to_be_visible()


@pytest.mark.parametrize(("groups", "src", "dst"), [(2, 4, 4), (4, 8, 4), (32, 32, 64), (2, 256, 256)])
def test_groups_are_drawn(open_page: Opener, groups: int, src: int, dst: int) -> None:
    """Bands join the channels of each group; that of the element is marked, and said in words."""
    page = open_page(f"/#op=Convolution&src=5x5&i={src}&o={dst}&groups={groups}&at=dst:1x1&of=0x0x{dst - 1}")
    drawn = page.locator("channel-groups")
    i, o = src // groups, dst // groups
    expect(drawn.locator("path.band.joined")).to_have_count(1)
    assert drawn.locator("path.band").count() <= groups
    words = [
        f"channel {size - 1}" if length == 1 else f"channels {size - length} to {size - 1}"
        for size, length in ((src, i), (dst, o))
    ]
    expect(drawn).to_contain_text(f"One of {groups} groups: {words[0]} of src and {words[1]} of dst belong together.")
    boxes = page.evaluate(
        """() => [...document.querySelectorAll("channel-groups path.edge, channel-groups .band")].map((each) => {
          const { x, width } = each.getBBox();
          return [x, x + width];
        })"""
    )
    assert max(right for _, right in boxes) <= page.evaluate("document.querySelector('channel-groups').clientWidth")
    stepper(page, "groups").fill("1")
    expect(drawn).to_be_hidden()


# Text that a line of a product passes, sampled along the line.
CROSSED = """() => {
  const path = document.querySelector(".links");
  const texts = [...document.querySelectorAll(".drawing .value, .drawing .ruler, .drawing .name")];
  const boxes = texts.map((text) => [text.textContent, text.getBBox()]);
  const found = new Set();
  for (let at = 0; at <= path.getTotalLength(); at++) {
    const { x, y } = path.getPointAtLength(at);
    for (const [text, box] of boxes)
      if (x > box.x && x < box.x + box.width && y > box.y + 2 && y < box.y + box.height - 2) found.add(text);
  }
  return [path.getTotalLength(), [...found]];
}"""


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize(
    "state",
    [
        "op=Convolution&src=7x7&strides=1x1&at=dst:4x5",
        "op=ConvTransposeBackwardWeights&src=4x4&at=diff_weights:0x2",
        "op=ConvolutionBackwardData&src=9x9&dilations=2x2&at=diff_src:3x3",
        "op=Convolution&src=12&kernel=3&strides=1&dilations=2&pads_begin=2&pads_end=2&at=dst:5",
        "op=ConvTranspose&src=3x4x4&kernel=3x3x3&at=dst:2x3x3",
        "op=BiasAdd&at=dst:1x2",
    ],
)
def test_the_line_of_a_product_crosses_no_number(open_page: Opener, state: str, width: int) -> None:
    """The line that joins the elements of each product runs between the numbers."""
    page = open_page(f"/#{state}", width=width)
    expect(page.locator("#sum .good")).to_contain_text("the service computed")
    for _ in range(4):
        page.get_by_role("button", name="Next product").click()
        length, crossed = page.evaluate(CROSSED)
        assert length > 20
        assert crossed == []
