"""`--only issues` replays published faults: a right kernel passes, one with the fault of an issue fails in its row."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import pytest

from convgrad._check.issues import ISSUES, link, replayed
from convgrad._check.large import LARGE
from convgrad._check.named import problem_of
from convgrad._check.problems import DTYPES, Takes
from convgrad._check.report import counts, table, text
from convgrad._check.run import chosen
from tests.convgrad.check import replays
from tests.convgrad.check.checking import assert_valid, checked
from tests.live import LiveService

PAGE = Path(__file__).parents[3] / "docs" / "published-faults.md"


@pytest.mark.heavy
def test_a_right_kernel_passes_every_issue(service: LiveService) -> None:
    """Every issue is tried, with integers and real numbers, and then the check ends; each has a line of the report."""
    data = checked(f"{replays.__file__}:right", service.url, cases=1000, only=["issues"])
    assert counts(data)["failed"] == 0, data["faults"]
    assert {name for (name,) in table(data, "name")} == {*ISSUES}
    assert {entry["kind"] for entry in data["cases"]} == {"integers", "normal"}
    lines = text(data, {}).splitlines()
    assert all(any(re.fullmatch(rf" *{name} +passed", line) for line in lines) for name in ISSUES)


@pytest.mark.heavy(minutes=1)
@pytest.mark.parametrize("name", ISSUES)
def test_the_fault_of_an_issue_is_found(name: str, service: LiveService) -> None:
    """A kernel that has the fault of an issue fails there, and the report says what went wrong."""
    mutant = re.sub(r"\W", "_", name).lower()
    assert mutant in replays.MUTANTS
    data = checked(f"{replays.__file__}:{mutant}", service.url, cases=1000, only=[name], shrinking=0.1)
    assert table(data, "name")[name,]["failed"], data
    assert ISSUES[name].text in text(data, {})


def test_issues_are_valid_calls() -> None:
    """The service takes each problem; a kernel that takes few gets those alone, in its formats and otherwise alike."""
    for issue in ISSUES.values():
        for problem in issue.problems:
            assert_valid(problem)
    few = Takes(ops=("ConvolutionBackwardWeights",), dtypes=("f32",), data_formats=("NCX",), groups=False)
    found = replayed(few, ISSUES)
    assert {problem.groups for _, problem in found} == {1}
    assert ("oneDNN#6035", "NCX") in {(name, problem.data_format) for name, problem in found}
    assert len(replayed(Takes(dtypes=DTYPES), ISSUES)) == sum(len(issue.problems) for issue in ISSUES.values())


def test_issues_are_chosen_by_name() -> None:
    """`--only` takes part of the name of issues, with kinds of data; what is no issue is an error."""
    takes = Takes(dtypes=DTYPES)
    choice = chosen(["mlx#", "positive"], [])
    assert choice.listed is not None
    assert {name for name, _ in choice.listed(takes)} == {"mlx#3800"}
    assert choice.kinds == ["positive"]
    assert chosen(["issues"], ["normal"]).kinds == ["integers"]
    assert chosen(["traps"], []).listed is None
    with pytest.raises(ValueError, match="name of a trap, layer or issue"):
        chosen(["pytorch#7"], [])


def test_the_page_has_every_issue() -> None:
    """The page has a row for each issue, with its problems and what went wrong, and for each large problem."""
    rows = [
        f"| [{name}]({link(name)}) | {'; '.join(map(str, issue.problems))} | {issue.text} |"
        for name, issue in ISSUES.items()
    ]
    for name, geometry in LARGE.items():
        problem = problem_of("Convolution", "f32", geometry)
        assert problem is not None
        size = 4 * sum(map(prod, [*problem.input_shapes.values(), problem.output_shape]))
        rows.append(f"| {f'[{name}]({link(name)})' if '#' in name else name} | {problem} | {size / 1e9:.2g} GB |")
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("| ") and not line.startswith("| issue ")] == rows
