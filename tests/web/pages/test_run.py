"""Run and verify in the explorer: files, streams, results and reports, with the real service."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.live import LiveService
from tests.naive import bwd_weights, round_to
from tests.web.pages.opening import HOLD, TILES, Opener, button, npy, said, saved, violations

LAYER = "/#op=ConvolutionBackwardWeights&n=2&i=3&o=4&src=9x9&strides=1x1"
ATTRIBUTES: dict[str, Any] = {
    "strides": [1, 1], "pads_begin": [1, 1], "pads_end": [1, 1], "dilations": [1, 1], "data_format": "NCX",
    "weights_format": "OIX", "weights_shape": [4, 3, 3, 3],
}  # fmt: skip
SRC, DIFF_DST, DIFF_WEIGHTS = (2, 3, 9, 9), (2, 4, 9, 9), (4, 3, 3, 3)


def compute(page: Page, data: str = "normal") -> None:
    """Run the layer on generated numbers."""
    page.get_by_label("Numbers", exact=True).select_option(data)
    button(page, "Run").click()
    expect(said(page)).to_have_text("Done.")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_run(open_page: Opener, dtype: str) -> None:
    """The gradient of generated integers, saved, is that of the inputs, saved, bit for bit."""
    page = open_page(f"{LAYER}&dtype={dtype}")
    compute(page, "random")
    src, diff_dst, found = (saved(page, name) for name in ("src", "diff_dst", "diff_weights"))
    assert np.unique(src).size == np.unique(diff_dst).size == 10
    attributes = {
        key: ATTRIBUTES[key] for key in ("strides", "pads_begin", "dilations", "data_format", "weights_format")
    }
    exact = bwd_weights("ConvolutionBackwardWeights", src, diff_dst, kernel=(3, 3), **attributes)
    assert found.tobytes() == round_to(dtype, exact).tobytes()
    expect(page.locator("run-layer .facts")).to_contain_text("agrees")


def test_the_algorithm(open_page: Opener) -> None:
    """A run says which algorithm it was; where Winograd's can't compute the layer, the rule stands beside the field."""
    page = open_page("/#op=ConvolutionBackwardWeights&i=16&o=16&src=9x9&strides=1x1")
    choice, facts = page.get_by_label("Algorithm"), page.locator("run-layer .facts div", has_text="algorithm")
    wrong = page.locator("#wrong-algorithm")
    page.get_by_text("How the service computes it").click()
    expect(page.locator("#plan div", has_text="by Winograd's algorithm")).to_contain_text("multiply-adds")
    compute(page, "random")
    expect(facts).to_contain_text("direct")
    direct = saved(page, "diff_weights")
    choice.select_option("winograd")
    expect(page.locator("#code")).to_contain_text('"algorithm": "winograd"')
    compute(page, "random")
    expect(facts).to_contain_text("winograd")
    assert (saved(page, "diff_weights") == direct).all()
    stepper = page.get_by_label("strides, axis 0", exact=True)
    stepper.fill("2")
    expect(wrong).to_contain_text("winograd takes strides of 1 in the last two axes; strides[0] is 2")
    button(page, "Run").click()
    expect(said(page)).to_contain_text(wrong.inner_text())
    choice.select_option("auto")
    expect(wrong).to_be_empty()
    compute(page)
    expect(facts).to_contain_text("direct")
    page.get_by_label("operation", exact=True).select_option("Convolution")
    expect(choice).to_be_visible()
    page.get_by_label("operation", exact=True).select_option("BiasAdd")
    expect(choice).to_be_hidden()
    compute(page)


def test_a_run_fills_by_tiles(open_page: Opener) -> None:
    """While tiles are missing their cells are empty, the bar shows the share done, and the text tells the same."""
    page = open_page(TILES)
    page.evaluate(HOLD)
    button(page, "Run").click()
    expect(page.locator("run-layer heat-map .faint").first).to_be_attached()
    page.get_by_text("The maps as text").click()
    expect(page.locator("run-layer details")).to_contain_text("elements arrived")
    expect(page.locator("run-layer .job")).to_contain_text(re.compile(r"\d %, [1-7] of 8 tiles"))
    page.evaluate("release()")
    expect(said(page)).to_have_text("Done.")
    expect(page.locator("run-layer heat-map .faint")).to_have_count(0)
    expect(page.locator("run-layer details")).to_contain_text("100 % arrived")


def test_cancel(open_page: Opener) -> None:
    """A run is cancelled in the middle, says so, gives the focus back, and the next one succeeds."""
    page = open_page(TILES)
    page.evaluate(HOLD)
    button(page, "Run").press("Enter")
    expect(page.locator("run-layer heat-map .faint").first).to_be_attached()
    expect(button(page, "Cancel").first).to_be_focused()
    page.keyboard.press("Enter")
    expect(said(page)).to_have_text("Cancelled.")
    expect(button(page, "Run")).to_be_focused()
    page.keyboard.press("Enter")
    expect(said(page)).to_have_text("Done.")


def refused(service: LiveService, **inputs: Any) -> list[str]:
    """Return the rules that a call breaks, in the words of the service."""
    params = {"op": "ConvolutionBackwardWeights", "attributes": ATTRIBUTES, "inputs": inputs}
    call = {"jsonrpc": "2.0", "id": 1, "method": "ops.validate", "params": params}
    errors = httpx.post(f"{service.url}/rpc", json=call).json()["error"]["data"]["errors"]
    return [error["msg"] for error in errors]


def test_a_wrong_file(open_page: Opener, service: LiveService) -> None:
    """A file of a wrong dtype or shape gets the service's sentence beside it, before any data are sent."""
    page = open_page(LAYER)
    source = page.locator("tensor-source").first
    diff_dst = {"dtype": "f32", "shape": DIFF_DST}
    for array, given in (
        (np.zeros((1, 3, 9, 9), np.float32), {"dtype": "f32", "shape": (1, 3, 9, 9)}),
        (np.zeros(SRC), {"dtype": "f64", "shape": SRC}),
        (np.zeros(SRC, np.int8), {"dtype": "|i1", "shape": SRC}),
        (np.zeros((3, 9), np.float32), {"dtype": "f32", "shape": (3, 9)}),
    ):
        page.get_by_label("File of src").set_input_files(npy(array))
        expect(source.locator(".wrong")).to_have_text("; ".join(refused(service, src=given, diff_dst=diff_dst)))
    drop(page, source, dropped=b"no tensor")
    expect(source.locator(".wrong")).to_have_text("src: a .npy file must begin with the bytes 93 4E 55 4D 50 59")
    button(page, "Run").click()
    expect(said(page)).to_have_text("src has no tensor")
    source.get_by_role("button", name="Remove").click()
    expect(source.locator(".wrong")).to_be_empty()
    drop(page, source, dropped=npy(np.ones(SRC, np.float32))["buffer"])
    expect(source).to_contain_text("dropped.npy: f32 [2, 3, 9, 9]")
    compute(page)
    assert page.url.startswith(f"{service.url}/")


def drop(page: Page, target: Locator, **files: bytes) -> None:
    """Drop files by name, without their endings."""
    transfer = page.evaluate_handle(
        """files => {
          const transfer = new DataTransfer();
          for (const [name, bytes] of Object.entries(files))
            transfer.items.add(new File([new Uint8Array(bytes)], `${name}.npy`));
          return transfer;
        }""",
        {name: list(content) for name, content in files.items()},
    )
    target.dispatch_event("drop", {"dataTransfer": transfer})


def test_dropped_files_find_their_inputs(open_page: Opener) -> None:
    """A file dropped on an input is its file; several at once go to the inputs that they are named after."""
    page = open_page(LAYER)
    sources = page.locator("run-layer tensor-source")
    drop(page, sources.last, mine=npy(np.ones(DIFF_DST, np.float32))["buffer"])
    expect(sources.last).to_contain_text("mine.npy: f32 [2, 4, 9, 9]")
    both = {"src": np.ones(SRC, np.float32), "diff_dst": np.ones(DIFF_DST, np.float32)}
    drop(page, sources.first, **{name: npy(array)["buffer"] for name, array in both.items()})
    expect(sources.first).to_contain_text("src.npy: f32 [2, 3, 9, 9]")
    expect(sources.last).to_contain_text("diff_dst.npy: f32 [2, 4, 9, 9]")
    compute(page)


def verify(page: Page, result: npt.NDArray[Any]) -> Locator:
    """Verify a result on generated inputs; return the report."""
    page.get_by_label("File of diff_weights").set_input_files(npy(result))
    button(page, "Verify").click()
    report = page.locator("verify-result .report")
    expect(report.locator(".verdict")).to_be_visible()
    return report


def test_a_right_result_passes(open_page: Opener) -> None:
    """The run's own result passes all rules, and the report says what could be hidden in it."""
    page = open_page(LAYER)
    compute(page)
    button(page, "Take the run's result").click()
    expect(page.locator("verify-result tensor-source")).to_contain_text("diff_weights.npy: f32 [4, 3, 3, 3]")
    button(page, "Verify").click()
    report = page.locator("verify-result .report")
    expect(report.locator(".verdict")).to_contain_text("diff_weights, f32 [4, 3, 3, 3]: passed")
    expect(report).to_contain_text("Detection limit")
    expect(report.locator(".broken")).to_have_count(0)


def test_a_wrong_result_fails(open_page: Opener) -> None:
    """One wrong element fails; the report names rule, place and products, and the drawing shows it in its colour."""
    page = open_page(LAYER)
    compute(page)
    result = saved(page, "diff_weights").copy()
    result[3, 1, 2, 0] += 1
    report = verify(page, result)
    expect(report.locator(".verdict")).to_contain_text("FAILED")
    expect(report.locator(".broken").first).to_contain_text("at most")
    expect(report).to_contain_text(
        "the one wrong element has dst channel = 3, src channel = 1, tap y = 2 and tap x = 0"
    )
    expect(report).to_contain_text("Worst element diff_weights[3, 1, 2, 0]")
    expect(report).to_contain_text("It sums 128 products, the largest")
    expect(page.locator("#element")).to_have_text("diff_weights[3, 1, 2, 0]")
    expect(page.locator("layer-drawing .level.over-6")).to_have_count(1)
    expect(report.locator("heat-map .marked").first).not_to_have_attribute("d", "")
    # The maps by keyboard: from the first tap to another element, and back by the button.
    report.locator("heat-map svg").first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    expect(report.locator(".readout").first).to_contain_text("tap y 1, tap x 1: ")
    expect(page.locator("#element")).to_have_text("diff_weights[3, 1, 1, 1]")
    button(page, "Show it in the drawing").click()
    expect(page.locator("#element")).to_have_text("diff_weights[3, 1, 2, 0]")


def test_a_result_that_does_not_fit(open_page: Opener, service: LiveService) -> None:
    """A result of a wrong dtype and shape gets the sentences of the verification beside it."""
    page = open_page(LAYER)
    result = np.zeros((4, 3, 3, 2), np.float16)
    inputs = {"src": SRC, "diff_dst": DIFF_DST}
    files = {name: npy(np.ones(shape, np.float32))["buffer"] for name, shape in inputs.items()}
    reply = httpx.post(
        f"{service.url}/v1/ops/ConvolutionBackwardWeights/verify",
        data={"request": json.dumps({"attributes": ATTRIBUTES})},
        files=[*files.items(), ("diff_weights", npy(result)["buffer"])],
    )
    page.get_by_label("File of diff_weights").set_input_files(npy(result))
    wrong = page.locator("verify-result .wrong")
    expect(wrong).to_have_text("; ".join(error["msg"] for error in reply.json()["errors"]))
    button(page, "Verify").click()
    expect(said(page, "verify-result")).to_contain_text("diff_weights must be f32 like the inputs, but is f16")


def test_a_result_of_another_layer(open_page: Opener) -> None:
    """Files stay when a field changes, are checked again, and the result of the other layer is gone."""
    page = open_page(LAYER)
    page.get_by_label("File of src").set_input_files(npy(np.ones(SRC, np.float32)))
    compute(page)
    page.get_by_label("images", exact=True).fill("3")
    wrong = page.locator("tensor-source .wrong").first
    expect(wrong).to_have_text("diff_dst must have the batch of src, which is 2, but has 3")
    expect(page.locator("run-layer heat-map")).to_have_count(0)
    page.get_by_label("images", exact=True).fill("2")
    expect(wrong).to_be_empty()
    compute(page)


def test_too_large(open_page: Opener) -> None:
    """A layer beyond the limits is refused before its numbers are made."""
    page = open_page("/#op=Convolution&src=100000x100000&values=none")
    button(page, "Run").click()
    expect(said(page)).to_contain_text("but this service allows")


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 360)], ids=["light", "dark and narrow"])
def test_axe_finds_nothing_in_results(open_page: Opener, dark: bool, width: int) -> None:
    """With a result and a failed verification axe-core finds no violation, and nothing is wider than the screen."""
    page = open_page(LAYER, dark=dark, width=width)
    compute(page)
    verify(page, np.zeros(DIFF_WEIGHTS, np.float32))
    for summary in page.get_by_text("The maps as text").all():
        summary.click()
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
