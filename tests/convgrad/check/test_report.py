"""The reports of `convgrad check`: text, HTML, JSON, JUnit, going on from one, and comparing two."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import jsonschema
import pytest

from convgrad._check.cases import KINDS
from convgrad._check.examine import FAULTS
from convgrad._check.large import SIGNS
from convgrad._check.page import page
from convgrad._check.problems import DTYPES, OPS
from convgrad._check.report import FORMAT, compared, counts, junit, load, text
from convgrad._cli import main
from tests.convgrad.check.checking import KERNELS, checked
from tests.live import LiveService

Data = dict[str, Any]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def report(service: LiveService) -> Data:
    """The report on a kernel with a fault."""
    return checked("group_offset", service.url, cases=60, shrinking=3.0)


class Tags(HTMLParser):
    """Check that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Nothing is open after it."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        """Remember what is open."""
        self.seen.add(tag)
        if tag not in ("meta", "br", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close the last one."""
        assert self.open.pop() == tag


def test_the_report_has_its_schema(report: Data) -> None:
    """The JSON report is as the schema of the documentation says, and the schema knows every kind there is."""
    schema = json.loads((ROOT / "docs" / "check-report.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(json.loads(json.dumps(report)), schema, jsonschema.Draft202012Validator)
    names = {name: set(schema["$defs"][name]["enum"]) for name in ("op", "dtype", "data", "fault_kind")}
    assert names == {"op": {*OPS}, "dtype": {*DTYPES}, "data": {*KINDS, SIGNS}, "fault_kind": {*FAULTS}}


def test_the_page_is_whole_and_needs_no_other_file(report: Data) -> None:
    """The page is well-formed, escapes what it shows, has the pictures and the script, and loads nothing."""
    data = copy.deepcopy(report)
    data["faults"][0]["text"] = "<script>alert(1)</script>"
    shown = page(data)
    tags = Tags()
    tags.feed(shown)
    assert tags.open == []
    assert {"svg", "table", "pre", "details"} <= tags.seen
    assert "script" not in tags.seen
    assert not re.search(r"""(src|href)=|url\(|@import""", re.sub(r"<pre>.*?</pre>", "", shown, flags=re.DOTALL))
    assert "prefers-color-scheme: dark" in shown
    assert "<svg" in page(report)
    assert "RMS_ALLOWED" in shown


def test_the_text_says_what_failed(report: Data) -> None:
    """The text has the counts, the smallest problem, the first verdict, accuracy, and the path of the script."""
    shown = text(report, {1: "scripts/1-wrong.py"})
    assert f"{counts(report)['failed']} of 60 cases FAILED" in shown
    assert report["faults"][0]["text"] in shown
    assert "groups 2" in report["faults"][0]["problem"]
    assert report["faults"][0]["problem"] in shown
    assert "reproduce with: python scripts/1-wrong.py" in shown
    assert re.search(r"RMS error [0-9.e-]+ of that of a naive sum", shown)


def test_junit_has_a_case_for_each_kind(report: Data) -> None:
    """A test case is an operation, dtype and kind of data; those with faults fail with their text."""
    suite = ET.fromstring(junit(report))
    failed = {entry["kind"] for entry in report["cases"] if entry["status"] == "failed"}
    assert {case.attrib["name"] for case in suite if case.find("failure") is not None} == {f"f32 {k}" for k in failed}
    assert suite.attrib["failures"] == str(len(failed))
    assert suite.attrib["tests"] == str(len({entry["kind"] for entry in report["cases"]}))


def test_reports_are_compared(report: Data, service: LiveService) -> None:
    """What fails in one report only broke or was mended; times of the same cases are compared."""
    mended = checked("right", service.url, cases=60)
    for entry in mended["cases"]:
        entry["seconds"] = 0.01
    found = compared(report, mended)
    assert found["mended"]
    assert not found["broke"]
    assert len(compared(mended, report)["broke"]) == len(found["mended"])
    slower = copy.deepcopy(mended)
    for entry in slower["cases"]:
        entry["seconds"] = 0.02
    assert compared(mended, slower) == {
        "broke": [], "mended": [], "faster": [], "slower": ["ConvolutionBackwardWeights, f32: 0.6 s, now 1.2 s"],
    }  # fmt: skip
    slower["seed"] += 1
    assert compared(mended, slower)["slower"] == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nothing", "must be the JSON report"),
        ("[1]", "must be the JSON report"),
        ('{"format": "other/1"}', "must be the JSON report"),
        (
            '{"format": "convgrad-check/9", "version": "7.0"}',
            f"convgrad-check/9 of convgrad 7.0; this version .* {FORMAT}",
        ),
        (f'{{"format": "{FORMAT}"}}', "its kernel must be str"),
        (f'{{"format": "{FORMAT}", "kernel": 3}}', "its kernel must be str"),
    ],
)
def test_files_that_are_no_reports(content: str, message: str, tmp_path: Path) -> None:
    """A file of another kind, or a report of another version, is rejected with what it is."""
    path = tmp_path / "report.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load(str(path))


def test_reports_that_were_cut(report: Data, tmp_path: Path) -> None:
    """A report whose cases or faults lack a member is rejected, instead of failing later."""
    path = tmp_path / "report.json"
    for name in ("cases", "faults"):
        data = copy.deepcopy(report)
        del data[name][0]["kind"]
        path.write_text(json.dumps(data), encoding="utf-8")
        with pytest.raises(ValueError, match=f"not complete: its {name} must have .*kind"):
            load(str(path))


@pytest.mark.heavy
def test_the_command(service: LiveService, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A check writes all reports and exits with 1; another goes on from it; two are compared."""
    path = {name: str(tmp_path / name) for name in ("a.json", "b.json", "a.html", "a.xml", "scripts")}
    kernel = f"{KERNELS}:last_image"
    common = ["--url", service.url, "--cases", "20", "-q"]
    files = {"--report": "a.json", "--html": "a.html", "--junit": "a.xml", "--scripts": "scripts"}
    written = [word for flag, name in files.items() for word in (flag, path[name])]
    assert main(["check", kernel, "--seed", "5", "--skip", "special,split", *common, *written]) == 1
    first = load(path["a.json"])
    assert (first["seed"], first["next"], len(first["cases"])) == (5, 20, 20)
    assert [fault["kind"] for fault in first["faults"]] == ["wrong"]
    assert (tmp_path / "scripts" / "1-wrong.py").exists()
    assert not {entry["kind"] for entry in first["cases"]} & {"special"}
    assert main(["check", "--resume", path["a.json"], "--report", path["b.json"], *common]) == 1
    second = load(path["b.json"])
    assert [entry["number"] for entry in second["cases"]] == list(range(40))
    assert "special" not in {entry["kind"] for entry in second["cases"]}
    assert main(["check", kernel, "--seed", "5", "--only", "3", "--report", path["b.json"], *common]) in (0, 1)
    assert [entry["number"] for entry in load(path["b.json"])["cases"]] == [3]
    capsys.readouterr()
    assert main(["check", "--compare", path["a.json"], path["a.json"]]) == 0
    assert capsys.readouterr().out.startswith("old: ")
    for wrong, message in (
        (["--only", "nonsense"], "--only 'nonsense' is none of"),
        (["--html", str(tmp_path / "nowhere" / "a.html")], "--html must be a file in a folder that exists"),
        (["--resume", path["a.json"], "--seed", "1"], "--seed is for a new check"),
        (["--ops", "Pooling"], "--ops 'Pooling' is none of"),
        (["--takes", "rank=2"], "no field 'rank'"),
        (["--dtypes", "f8"], "dtypes may only contain f32, f16, bf16, f64"),
    ):
        assert main(["check", kernel, *wrong, *common]) == 2
        assert message in capsys.readouterr().err
    assert json.loads(Path(path["a.json"]).read_text(encoding="utf-8"))["options"]["skip"] == ["special", "split"]
