"""The generated pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from schemas.docs import main, stale
from schemas.docstrings import CLIENT, with_attributes
from schemas.tables import OPERATIONS


def test_the_docstrings_of_the_client_are_up_to_date() -> None:
    """The client's methods list the attributes of the tables; a changed or missing list is restored."""
    source = CLIENT.read_text(encoding="utf-8")
    assert with_attributes(source) == source
    head = "Attributes (defaults in brackets):"
    assert source.count(head) == len(OPERATIONS)
    assert with_attributes(source.replace("* `groups` [1]", "* `groups` [2]")) == source
    without = re.sub(rf"\n\n +{re.escape(head)}\n\n( +[*\w`].*\n)+", "\n", source)
    assert head not in without
    assert with_attributes(without) == source


def test_writing_and_checking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A check names pages that are missing, changed or left over; writing fixes all three."""
    folder = ["--folder", str(tmp_path / "pages")]
    assert main(["--check", *folder]) == 1
    assert main(folder) == 0
    assert main(["--check", *folder]) == 0
    (tmp_path / "pages" / "ConvTranspose.md").write_text("old", encoding="utf-8")
    (tmp_path / "pages" / "Gone.md").write_text("old", encoding="utf-8")
    capsys.readouterr()
    assert main(["--check", *folder]) == 1
    told = capsys.readouterr().err
    assert "ConvTranspose.md" in told
    assert "Gone.md" in told
    assert main(folder) == 0
    assert stale(tmp_path / "pages") == []
