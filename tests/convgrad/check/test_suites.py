"""Suites: their problems, and the score of a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import convgrad
from convgrad._check.problems import Takes
from convgrad._check.suites import KINDS, listed, problems, score, text
from convgrad._cli import main
from tests.convgrad.check.checking import assert_valid

SUITE = "backward-40"


def test_the_problems_are_forty_gradients() -> None:
    """They are valid, differ, and are of weights, data and biases; none is reduced for what a kernel takes."""
    found = problems(SUITE)
    assert len({(name, problem.op) for name, problem in found}) == 40
    assert {problem.output for _, problem in found} == {"diff_weights", "diff_src", "diff_bias"}
    for name, problem in found:
        assert_valid(problem)
        assert problem.macs <= 30_000_000, name
    few = listed(Takes(ops=["ConvolutionBackwardWeights"], dtypes=["f32"], strides=False), SUITE)
    assert 0 < len(few) < 18
    assert {problem for _, problem in few} <= {problem for _, problem in found}


def entries(status: str, seconds: float = 0.5) -> list[dict[str, Any]]:
    """Return the cases of a kernel that has this status everywhere."""
    return [
        {"name": name, "op": problem.op, "kind": kind, "status": status, "seconds": seconds}
        for kind in KINDS
        for name, problem in problems(SUITE)
    ]


def test_the_score_counts_problems() -> None:
    """One wrong result of the two fails a problem, and what was not taken is not passed."""
    cases = entries("passed")
    cases[0]["status"] = "failed"
    found = score({"cases": [case for case in cases if case["name"] != "ViT, patches"], "seed": 1}, SUITE, None)
    assert found["counts"] == {"passed": 36, "failed": 1, "not taken": 3}
    assert text(found) == "backward-40: 36 of 40 passed (1 failed, 3 not taken)"
    assert score({"cases": entries("unsupported"), "seed": 1}, SUITE, None)["counts"]["not taken"] == 40


@pytest.mark.heavy
def test_seconds_are_a_ratio_to_the_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the passed problems, seconds are compared with the library's in this process; others have none."""
    cases = [case | {"status": "passed" if case["name"] == "burn#1891" else "failed"} for case in entries("passed")]
    found = score({"cases": cases, "seed": 1}, SUITE, convgrad.local())
    (row,) = [row for row in found["rows"] if row["status"] == "passed"]
    assert found["ratio"] == pytest.approx(0.5 / row["library"])
    assert sum("library" in row for row in found["rows"]) == 1


def test_a_suite_chooses_the_problems(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown name is an error, and so is a suite beside other problems."""
    assert main(["check", "a:b", "--suite", "forward"]) == 2
    assert "'forward' is none of backward-40" in capsys.readouterr().err
    assert main(["check", "a:b", "--suite", SUITE, "--only", "resnet"]) == 2
    assert "--suite chooses the problems" in capsys.readouterr().err


@pytest.mark.heavy(minutes=2)
def test_zeros_score_nothing(tmp_path: Path) -> None:
    """A cheat that skips the work passes none of the problems that it takes, and has no seconds."""
    path = tmp_path / "report.json"
    cheat = Path(__file__).parents[3] / "examples" / "cheats" / "zeros.py"
    assert main(["check", f"{cheat}:kernel", "--suite", SUITE, "--local", "-q", "--report", str(path)]) == 1
    suite = json.loads(path.read_text(encoding="utf-8"))["suite"]
    assert suite["counts"]["passed"] == 0
    assert suite["ratio"] is None
