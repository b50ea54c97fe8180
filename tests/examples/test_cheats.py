"""Each cheat of `examples/cheats` is found by sealed checks and by plain ones, as the page of agents says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from convgrad._check.relations import RELATIONS
from convgrad._cli import main

ROOT = Path(__file__).parents[2]
CHEATS = ROOT / "examples" / "cheats"
PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
SEALED = {"honest": "passed", **dict(re.findall(r"^\| `(\w+)` \| (passed|failed) \|", PAGE, re.MULTILINE))}
"""The verdict of a sealed check on each file, as the page says."""

PLAIN = {
    "zeros": {"wrong"},
    "wrong_after_warmup": {"wrong"},
    "cached_results": {*RELATIONS},
    "skipped_work": {*RELATIONS},
}
"""What a plain check finds."""

pytestmark = pytest.mark.heavy


def checked(name: str, path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Check a cheat; return the exit status and the report."""
    status = main(["check", f"{CHEATS / name}.py:kernel", "--local", "-q", "--report", str(path), *flags])
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return status, report


def test_every_cheat_is_tested() -> None:
    """Every file of the folder is in the table."""
    assert {path.stem for path in CHEATS.glob("*.py")} == SEALED.keys()


@pytest.mark.parametrize(("name", "verdict"), SEALED.items())
def test_a_sealed_check(name: str, verdict: str, tmp_path: Path) -> None:
    """The verdict is that of the page; a kernel that reuses results is wrong where a shape is repeated."""
    status, document = checked(name, tmp_path / "report.json", "--sealed", "--cases", "12", "--takes", "ranks=1,2")
    assert (document["verdict"], status) == (verdict, int(verdict == "failed")), document["counts"]
    if name == "wrong_after_warmup":
        found = [case["status"] for case in document["cases"]]
        assert found[:3] == ["passed"] * 3
        assert found.count("failed") >= 3, "zeros are right in few cases"
    if name == "library_under_test":
        assert document["counts"]["failed"] == 12
    if name in ("cached_results", "skipped_work"):
        wrong = [case for case in document["cases"] if case["status"] == "failed"]
        assert any("repeats" in case for case in wrong)


@pytest.mark.parametrize(("name", "faults"), PLAIN.items())
def test_a_plain_check(name: str, faults: set[str], tmp_path: Path) -> None:
    """A kernel that reuses results is not right when its inputs are scaled, exchanged or zero."""
    flags = ("--cases", "6", "--seed", "3", "--takes", "ranks=1,2", "--skip", "special", "--seconds", "30")
    status, report = checked(name, tmp_path / "report.json", *flags)
    assert status == 1
    assert faults & {fault for case in report["cases"] for fault in case["faults"]}
