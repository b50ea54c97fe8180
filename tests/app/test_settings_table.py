"""The table of settings in `docs/running.md`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.settings import Settings
from app.settings_table import main, with_settings

PAGE = Path(__file__).parents[2] / "docs" / "running.md"


def test_the_table_is_up_to_date() -> None:
    """The table in the repository has a row for each setting, with its default; `scripts/docs` updates it."""
    page = PAGE.read_text(encoding="utf-8")
    assert with_settings(page) == page
    rows = dict(re.findall(r"^\| `CONVGRAD_(\w+)` \| `?(.*?)`? \|", page.partition("## Accuracy")[0], re.MULTILINE))
    assert {name.upper() for name in Settings.model_fields} <= rows.keys()
    shown = {name: rows[name] for name in ("BODY_LIMIT", "WORK_LIMIT", "DEADLINE_S", "PUBLIC", "UDS")}
    assert shown == {"BODY_LIMIT": "1GiB", "WORK_LIMIT": "1e13", "DEADLINE_S": "300", "PUBLIC": "false", "UDS": ""}


def test_defaults_can_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every default in the table, given as a variable, is the setting's default."""
    for name, default in re.findall(r"^\| `(CONVGRAD_\w+)` \| `(.+?)` \| [A-Z]", PAGE.read_text("utf-8"), re.MULTILINE):
        monkeypatch.setenv(name, default)
    assert Settings() == Settings.model_construct()


def test_writing_and_checking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A check names a page whose table is stale; writing restores it and leaves the rest of the page alone."""
    page = tmp_path / "running.md"
    right = PAGE.read_text(encoding="utf-8")
    page.write_text(right.replace("| `CONVGRAD_PORT` |", "| `CONVGRAD_DOOR` |"), encoding="utf-8")
    assert main(True, page) == 1
    assert str(page) in capsys.readouterr().err
    assert main(False, page) == 0
    assert page.read_text(encoding="utf-8") == right
    assert main(True, page) == 0
