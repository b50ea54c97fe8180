"""Numbers of the explorer: typed into cells, and the same in the drawing, in a run and in the call that is shown."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.web.pages.opening import Opener, button, npy, said, saved, violations

ROOT = Path(__file__).parents[3]
LAYER = "/#op=Convolution&src=5x5&strides=1x1&at=src:2x2"
DTYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def cell(page: Page, name: str) -> Locator:
    """Return the field over a cell."""
    return page.get_by_role("textbox", name=f"Number of {name}", exact=True)


def ready(page: Page) -> None:
    """Wait until the service has computed the numbers that are drawn."""
    expect(page.locator("#verdict")).to_have_text("Valid")
    expect(page.locator("[data-values]:empty")).to_have_count(0)


def drawn(page: Page, role: str) -> list[float]:
    """Return the numbers in the cells of a map."""
    return [float(text) for text in page.locator(f"[data-values={role}] .value").all_text_contents()]


def test_typing_by_mouse(open_page: Opener) -> None:
    """A double click opens a field over a cell; a click elsewhere keeps what is typed, which is drawn and summed."""
    page = open_page(LAYER)
    ready(page)
    page.mouse.dblclick(*position(page, "weights", 1, 1))
    field = cell(page, "weights[0, 0, 1, 1]")
    expect(field).to_be_focused()
    expect(field).to_have_value("5")
    page.keyboard.type("-0.5")
    page.mouse.click(*position(page, "dst", 2, 2))
    expect(field).to_have_count(0)
    assert drawn(page, "weights") == [1, 2, 3, 4, -0.5, 6, 7, 8, 9]
    expect(page.locator("#element")).to_have_text("dst[0, 0, 2, 2]")
    expect(page.locator("#sum")).to_contain_text("13 * (-0.5)")
    expect(page.locator("#sum .good")).to_contain_text("the service computed")
    expect(page.locator("#typed")).to_have_text("1 typed")
    button(page, "Forget them").click()
    expect(page.locator("#typed")).to_be_empty()
    assert drawn(page, "weights")[4] == 5


def position(page: Page, role: str, row: int, column: int) -> tuple[float, float]:
    """Return the middle of a cell, in one question: the drawing may be replaced between two."""
    x, y, width, height, rows, columns = page.evaluate(
        """role => {
          const map = document.querySelector(`[data-role=${role}]`);
          const { x, y, width, height } = map.querySelector("path.body").getBoundingClientRect();
          return [x, y, width, height, ...map.querySelector(".shape").textContent.split(" x ").slice(-2).map(Number)];
        }""",
        role,
    )
    return x + width * (column + 0.5) / columns, y + height * (row + 0.5) / rows


def test_typing_by_keyboard(open_page: Opener) -> None:
    """A digit or Enter opens the field, arrows take the number and go on, Enter ends, Escape changes nothing."""
    page = open_page(LAYER)
    ready(page)
    page.locator("[data-role=src]").focus()
    page.keyboard.press("7")
    field = cell(page, "src[0, 0, 2, 2]")
    expect(field).to_have_value("7")
    page.keyboard.type(".25")
    page.keyboard.press("ArrowDown")
    expect(cell(page, "src[0, 0, 3, 2]")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(cell(page, "src[0, 0, 3, 3]")).to_have_value("19")
    page.keyboard.type("-1e2")
    page.keyboard.press("Enter")
    expect(page.locator("[data-role=src]")).to_be_focused()
    expect(page.locator("[data-role=src]")).to_have_accessible_name(
        re.compile(r"src\[0, 0, 3, 3\] .* number is -100\.$")
    )
    page.keyboard.press("Enter")
    page.keyboard.type("55")
    page.keyboard.press("Escape")
    expect(page.locator("[data-role=src]")).to_be_focused()
    numbers = [float(number) for number in range(1, 26)]
    numbers[12], numbers[18] = 7.25, -100
    assert drawn(page, "src") == numbers
    page.keyboard.press("Enter")
    page.keyboard.press("Backspace")
    page.keyboard.press("Enter")
    numbers[18] = 19
    assert drawn(page, "src") == numbers
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#element")).to_have_text("src[0, 0, 3, 2]")


def test_what_is_no_number_stays_in_the_field(open_page: Opener) -> None:
    """A text that is no finite number of the dtype is told beside the field, which stays; Tab leaves without it."""
    page = open_page(f"{LAYER}&dtype=f16")
    ready(page)
    page.locator("[data-role=src]").focus()
    page.keyboard.press("Enter")
    field = cell(page, "src[0, 0, 2, 2]")
    for text in ("x", "1e6", "nan", "1 2", "--1"):
        field.fill(text)
        page.keyboard.press("Enter")
        expect(field).to_be_focused()
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(page.get_by_role("alert").filter(has_text="must be a number of f16")).to_be_visible()
    assert violations(page) == []
    page.keyboard.press("Tab")
    expect(field).to_have_count(0)
    assert drawn(page, "src")[12] == 13


def test_the_result_is_not_typed_into(open_page: Opener) -> None:
    """Neither keys nor a double click open a field over the result, over a file, or beside the maps."""
    page = open_page("/#op=Convolution&src=5x5&at=dst:1x1")
    ready(page)
    page.locator("[data-role=dst]").focus()
    for key in ("5", "Enter", "F2"):
        page.keyboard.press(key)
    page.mouse.dblclick(*position(page, "dst", 1, 1))
    page.get_by_label("File of src").set_input_files(npy(np.full((1, 1, 5, 5), 3, np.float32)))
    expect(page.locator("[data-values=src] .value").first).to_have_text("3")
    page.mouse.dblclick(*position(page, "src", 1, 1))
    page.keyboard.press("5")
    expect(page.locator(".cell")).to_have_count(0)
    page.mouse.click(*position(page, "weights", 1, 1))
    page.mouse.dblclick(*position(page, "weights", 4, 1))
    expect(page.locator("#element")).to_have_text("weights[0, 0, 1, 1]")
    expect(page.locator(".cell")).to_have_count(0)


def test_the_address_keeps_typed_numbers(open_page: Opener) -> None:
    """Typed numbers are in the address and come back; where they are too many the page says that a link lacks them."""
    page = open_page(LAYER)
    ready(page)
    page.locator("[data-role=src]").focus()
    page.keyboard.press("4")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("typed=src:0x0x2x2:4$"))
    page.reload()
    expect(page.locator("#typed")).to_have_text("1 typed")
    assert drawn(page, "src")[12] == 4
    page.goto("about:blank")
    many = ",".join(f"src:0x0x{index // 12}x{index % 12}:0.{index:03}" for index in range(100))
    page.goto(f"/#op=Convolution&src=12x12&at=src:11x11&typed={many}")
    expect(page.locator("#typed")).to_have_text("100 typed")
    page.locator("[data-role=src]").focus()
    page.keyboard.press("Enter")
    for _ in range(11):
        page.keyboard.type("-12345.06250001")
        page.keyboard.press("ArrowUp")
    page.keyboard.press("Escape")
    expect(page.locator("#typed")).to_contain_text("104 typed: too many for the address, a link will not have them")
    expect(page).not_to_have_url(re.compile("typed="))


def run(page: Page, output: str) -> npt.NDArray[Any]:
    """Run the layer; return its result."""
    button(page, "Run").click()
    expect(said(page)).to_have_text("Done.")
    return saved(page, output)


def executed(page: Page, language: str, folder: Path, output: str, dtype: str) -> npt.NDArray[Any]:
    """Return the result of the call that is shown, executed as it stands."""
    page.locator(f"[data-code={language}]").click()
    text = page.locator("#code").inner_text()
    kind = DTYPES[dtype]
    result = folder / "result.npy"
    if language in ("python", "pytorch"):
        # The text prints its result; what it printed is kept with all of its digits.
        keep = f"{output}.astype('f4')" if language == "python" else "printed.float().numpy()"
        text = re.sub(r"print\((.*)\)$", r"printed = \1\nprint(printed)", text)
        text += f"\nimport numpy as np\nnp.save('result.npy', {keep})"
        command = [sys.executable, "-c", text]
    else:
        command = ["bash", "-c", text]
    modules = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": modules}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    if result.exists():
        found: npt.NDArray[Any] = np.load(result)
        result.unlink()
        return found.astype(kind)
    if language == "curl" and not done.stdout:
        whole: npt.NDArray[Any] = np.load(folder / f"{output}.npy")
        return whole if dtype != "bf16" else whole.view(kind)
    reply = json.loads(done.stdout)
    (tensor,) = reply.get("result", reply)["outputs"].values()
    return np.array(tensor["data"]).astype(kind)


CALLS = [
    ("op=Convolution&src=5x5&i=4&o=4&groups=2&typed=src:0x2x1x1:-0.1,weights:3x1x0x2:1e-3", "dst", "f32"),
    ("op=ConvTransposeBackwardWeights&src=4x4&i=2&o=3&dtype=bf16&values=normal&seed=7", "diff_weights", "bf16"),
    ("op=ConvTranspose&src=4&kernel=3&i=4&o=6&groups=2&groups_axis=I&data_format=NXC&values=random", "dst", "f32"),
    ("op=ConvolutionBackwardData&src=5x4&auto_pad=same_lower&weights_format=XIO&dtype=f16&i=2", "diff_src", "f16"),
    ("op=BiasAdd&src=3x4&values=impulse", "dst", "f32"),
    ("op=BiasAddBackward&src=3x4&values=random", "diff_bias", "f32"),
]


LANGUAGES = ["curl", "python", "rpc", *(["pytorch"] if find_spec("torch") else [])]


def same(page: Page, folder: Path, output: str, dtype: str) -> None:
    """Check that each call shown, executed, gives the result of Run: bit for bit where the service computes it."""
    expected = run(page, output)
    for language in LANGUAGES:
        found = executed(page, language, folder, output, dtype)
        assert found.shape == expected.shape, language
        if language == "pytorch":
            tolerance = {"f32": 1e-4, "f16": 2e-2, "bf16": 1e-1}[dtype]
            assert np.allclose(found.astype("f4"), expected.astype("f4"), tolerance, 100 * tolerance)
        else:
            assert found.tobytes() == expected.tobytes(), language


@pytest.mark.parametrize(("state", "output", "dtype"), CALLS, ids=[state.split("&")[0] for state, *_ in CALLS])
def test_the_same_call(open_page: Opener, tmp_path: Path, state: str, output: str, dtype: str) -> None:
    """What is shown, executed as it stands, gives the result of Run."""
    page = open_page(f"/#{state}")
    ready(page)
    same(page, tmp_path, output, dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_same_call_with_files(open_page: Opener, tmp_path: Path, dtype: str) -> None:
    """Inputs of many numbers are files: those that are chosen, whatever their names, and those that Run saves."""
    page = open_page(f"/#op=Convolution&src=16x16&i=4&o=4&values=normal&dtype={dtype}")
    ready(page)
    weights = (np.arange(144).reshape(4, 4, 3, 3) - 70).astype(DTYPES[dtype])
    name = """my "own", it's; 100%.npy"""
    written = weights if dtype == "f32" else weights.view("V2")
    np.save(tmp_path / name, written)
    page.get_by_label("File of weights").set_input_files(npy(written, name))
    # The drawing has the numbers of the file.
    expect(page.locator("[data-values=weights] .value").first).to_have_text("-70")
    src = saved(page, "src")
    np.save(tmp_path / "src.npy", src if dtype == "f32" else src.view("V2"))
    expect(page.locator("#code")).to_contain_text("src.npy")
    same(page, tmp_path, "dst", dtype)
