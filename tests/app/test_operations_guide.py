"""The operator's guide has a row for each reason of a rejection."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_reason_has_a_row() -> None:
    """A `reason` that the sources give has a row in the guide, and each row is one that they give."""
    guide = (ROOT / "docs" / "operations-guide.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(\w+)` \| \d{3}", guide, re.MULTILINE))
    sources = "".join(
        path.read_text(encoding="utf-8")
        for room in ("app", "engine", "convgrad")
        for path in (ROOT / room).rglob("*.py")
    )
    given = set(re.findall(r'"reason": "(\w+)"', sources))
    assert given <= rows, f"no row in docs/operations-guide.md: {sorted(given - rows)}"
    unknown = {row for row in rows if f'"{row}"' not in sources}
    assert not unknown, f"rows of docs/operations-guide.md that nothing gives: {sorted(unknown)}"
