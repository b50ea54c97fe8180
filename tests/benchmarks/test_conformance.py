"""The page of `benchmarks.conformance` shows the recorded results."""

from __future__ import annotations

import json

from benchmarks.conformance import DATA, PAGE, page


def test_the_page_is_up_to_date() -> None:
    """The tables of the page are those of the record; `python -m benchmarks.conformance --page` writes them."""
    assert "\n".join(page(json.loads(DATA.read_bytes()))) in PAGE.read_text(encoding="utf-8")
