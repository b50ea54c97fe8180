"""The generated pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import convgrad
from schemas.docs import main, pages, stale
from schemas.docstrings import CLIENT, with_attributes
from schemas.tables import OPERATIONS, find_operation

FOLDER = Path(__file__).parents[2] / "docs" / "operations"


def test_the_pages_are_up_to_date() -> None:
    """The pages in the repository are up to date; `scripts/docs` updates them."""
    assert stale(FOLDER) == []


def test_there_is_a_page_for_each_operation() -> None:
    """Each operation has a page with a row for each attribute, and the index links to it."""
    made = pages()
    for operation in OPERATIONS:
        page = made[f"{operation.name}.md"]
        assert f"({operation.name}.md)" in made["README.md"]
        for name in find_operation(operation.name).wire_names:
            assert f"`{name}`" in page


def test_formulas_fit_a_narrow_screen() -> None:
    """A page has the whole formula, in lines of at most 40 characters that break no index."""
    for operation in OPERATIONS:
        shown = re.findall(r"```text\n(.*?)```", pages()[f"{operation.name}.md"], re.DOTALL)[0]
        assert max(map(len, shown.splitlines())) <= 40
        assert all(line.count("[") == line.count("]") for line in shown.splitlines())
        assert re.sub(r",? where | and (?=y )", " ", " ".join(shown.split())) == re.sub(
            r", where | and (?=y )", " ", operation.formula
        )


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


def test_help_lists_every_attribute() -> None:
    """`help()` of each method of the client has every attribute with its default and meaning."""
    for operation in OPERATIONS:
        method = getattr(convgrad.Client, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", operation.name).lower())
        words = " ".join(method.__doc__.split())
        for row in operation.attributes:
            default = "" if row.default is None else f" [{row.default}]"
            assert f"* `{row.name}`{default}" in words
            assert row.doc.partition(". ")[0] in words


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
