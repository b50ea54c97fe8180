"""The address of the explorer: the names that the page shows, typed numbers, and the addresses of earlier versions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from schemas.tables import OPERATIONS
from tests.web.answers import ask

NAMES = ("src", "weights", "dst", "diff_src", "diff_weights", "diff_dst", "bias", "diff_bias")


def read(text: str) -> dict[str, Any]:
    """Return the state of an address, which has no note."""
    (found,) = ask([{"ask": "state", "text": f"#{text}"}])
    assert found["note"] == "", text
    state: dict[str, Any] = found["state"]
    return state


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_tensors_have_their_names(operation: Any) -> None:
    """An element is named like its tensor, or like the tensor's role as before; the page writes the tensor's name."""
    op = operation.name
    named = [ask([{"ask": "state", "text": f"#op={op}&at={name}:0x0"}])[0] for name in NAMES]
    roles = {found["state"]["element"]["role"] for found in named if not found["note"]}
    assert len(roles) == (2 if op == "BiasAddBackward" else 3)
    for name, found in zip(NAMES, named, strict=True):
        if found["note"]:
            continue
        written = found["again"].split("at=")[1].split(":")[0]
        assert written.removeprefix("diff_") in (name.removeprefix("diff_"), "bias")
        assert read(found["again"].removeprefix("#"))["element"] == found["state"]["element"]


@pytest.mark.parametrize(
    ("shown", "old"),
    [
        ("op=ConvTransposeBackwardWeights&at=diff_weights:0x2", "op=ConvTransposeBackwardWeights&at=weights:0x2"),
        ("op=Convolution&i=2&at=dst[0,%200,%202,%203]", "op=Convolution&i=2&at=dst:2x3"),
        ("op=Convolution&i=4&at=src[0,2,5,6]", "op=Convolution&i=4&at=src:5x6&of=0x2x0"),
        (
            "op=Convolution&i=4&o=4&groups=2&at=weights[3,1,0,2]",
            "op=Convolution&i=4&o=4&groups=2&at=weights:0x2&of=0x3x3",
        ),
        ("op=ConvolutionBackwardData&diff_src=6x5&at=diff_src:1x2", "op=ConvolutionBackwardData&src=6x5&at=src:1x2"),
        ("op=BiasAdd&channels=4&at=bias[2]", "op=BiasAdd&i=4&at=weights:0x0&of=0x2x2"),
        ("op=BiasAddBackward&diff_dst=3x4&at=diff_dst:1x2", "op=BiasAddBackward&src=3x4&at=dst:1x2"),
        ("op=ConvolutionBackwardWeights&diff_dst=4x4&weights=5x5", "op=ConvolutionBackwardWeights&dst=4x4&kernel=5x5"),
        ("operation=Convolution&images=2&I=3&O=5&numbers=random", "op=Convolution&n=2&i=3&o=5&values=random"),
    ],
)
def test_names_that_the_page_shows(shown: str, old: str) -> None:
    """A name that the page shows means what the address of an earlier version called otherwise."""
    assert read(shown) == read(old)


def test_typed_numbers() -> None:
    """Typed numbers come back from the address; those that a layer has no place for aren't written."""
    text = "op=Convolution&src=5x5&at=dst:1x1&seed=3&typed=src:0x0x1x2:-2.5,weights:0x0x0x0:1e-7"
    state = read(text)
    assert state["given"] == {"kind": "counting", "seed": 3, "typed": {"src:0x0x1x2": -2.5, "weights:0x0x0x0": 1e-7}}
    (found,) = ask([{"ask": "state", "text": f"#{text}"}])
    assert found["again"] == f"#{text}"


HOSTILE = (
    "op=<script>alert(1)</script>", "op=__proto__", "op=Convolution&src=1x2x3x4", "op=Convolution&src=-1x7",
    "op=Convolution&src=99999999999x7", "op=Convolution&src=7x", "op=Convolution&at=dst:99",
    "op=Convolution&at=window:0x0", "op=Convolution&constructor=1", "op=Convolution&__proto__=1x1",
    "op=Convolution&kernel=3x3x3&src=7x7", "&&==&&", "%00%ff%c3%28", "x" * 5000,
    *(f"op=Convolution&typed={typed}" for typed in (
        "src:0x0x9x9:1", "src:0x0x99x0:1", "src:0x0:1", "dst:0x0x1x1:1", "src:0x0x1x1:NaN", "src:0x0x1x1:1e999",
        "src:0x0x1x1:", "src:0x0x1x1", "src:-1x0x1x1:1", "__proto__:0:1", "",
    )),
)  # fmt: skip


def test_addresses_that_are_no_state() -> None:
    """An address that names no layer, or no number of an input, is the first layer, and the note says so."""
    first, *others = ask([{"ask": "state", "text": f"#{text}" if text else ""} for text in ("", *HOSTILE)])
    for text, found in zip(HOSTILE, others, strict=True):
        assert found["note"].startswith("The address names no layer"), text
        assert found["state"] == first["state"], text


def test_the_questions_of_the_page() -> None:
    """The layer and element behind each question of `docs/explorer.md` give the answer that the page shows."""
    page = (Path(__file__).parents[2] / "docs" / "explorer.md").read_text(encoding="utf-8")
    pattern = r"^### \d+\..*?\(http://127.0.0.1:8000/(#\S+)\).*?```text\n(.*?)\n```"
    questions = re.findall(pattern, page, re.DOTALL | re.MULTILINE)
    assert len(questions) > 5
    for (state, answer), found in zip(
        questions, ask([{"ask": "told", "text": each} for each, _ in questions]), strict=True
    ):
        assert found == {"note": "", "lines": answer.splitlines()}, state


def test_the_first_layer_is_an_ordinary_3x3() -> None:
    """Without an address the layer is a convolution of 3 x 3 that keeps the size of src."""
    (found,) = ask([{"ask": "state", "text": ""}])
    layer = found["state"]["layer"]
    assert (layer["op"], layer["kernel"]) == ("Convolution", [3, 3])
    assert layer["strides"] == layer["pads_begin"] == [1, 1]
    assert read(found["again"].removeprefix("#")) == found["state"]
