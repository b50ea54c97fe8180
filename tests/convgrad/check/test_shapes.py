"""`--shapes` reads problems and files of benchdnn, with its rules for what is omitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from convgrad._check.benchdnn import fitting, read_shapes
from convgrad._check.problems import OPS, Takes
from convgrad._check.run import chosen, of_shapes
from tests.convgrad.check.checking import assert_valid


def read(folder: Path, text: str, name: str = "shapes") -> dict[str, dict[str, Any]]:
    """Write a file and read its problems."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return read_shapes(str(path)).problems


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('g1mb3ic16ih14oc32oh14kh3ph1n"square"',
         {"n": 3, "wide": (14, 14), "kernel": (3, 3), "pads_begin": (1, 1), "pads_end": (1, 1), "dst_channels": 32}),
        ("ic3oc8ih8kh3", {"n": 2, "wide": (8, 8), "pads_begin": (0, 0), "pads_end": (0, 0), "strides": (1, 1)}),
        ("ic3oc8_ih224oh112kh7sh2_n", {"pads_begin": (2, 2), "pads_end": (3, 3)}),  # padding follows from the sizes
        ("ic1oc2_iw9kw3dw1", {"wide": (9,), "dilations": (2,)}),
        ("ic4oc4id5kd3pd1", {"wide": (5, 5, 5), "kernel": (3, 3, 3)}),
        ("g2ic4oc6_ih7oh11kh3ph2_iw9kw1sw2",
         {"groups": 2, "pads_begin": (2, 0), "pads_end": (4, 0), "strides": (1, 2)}),
        ("ic1oc1_ih10oh5kh1sh2", {"wide": (10, 10), "pads_end": (0, 0)}),  # a row at the end is not read
    ],
)  # fmt: skip
def test_problems_follow_the_rules_of_benchdnn(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    """Sizes, padding and the axes that are omitted follow from the others."""
    ((_, geometry),) = read(tmp_path, text).items()
    assert {name: geometry[name] for name in expected} == expected


def test_a_transposed_convolution(tmp_path: Path) -> None:
    """In a folder `deconv`, and behind `--deconv`, i is the narrow side: its operation gets what the line says."""
    line = 'mb2_ic3oc5_ih4oh8kh3sh2ph1_n"up"\n'
    assert read(tmp_path, line, "deconv/shapes") == read(tmp_path, f"--deconv {line}")
    ((_, problem),) = fitting(Takes(ops=("ConvTranspose",), dtypes=("f32",)), read(tmp_path, f"--deconv {line}"))
    assert problem.input_shapes == {"src": (2, 3, 4, 4), "weights": (5, 3, 3, 3)}
    assert (problem.output_shape, problem.output_padding, problem.pads_end) == ((2, 5, 8, 8), (0, 0), (0, 0))


def test_files_have_options_and_include_others(tmp_path: Path) -> None:
    """Comments, options over several lines, `--mb`, `--reset` and `--batch`, as benchdnn's own files have them."""
    read(tmp_path, "ic1oc1ih3kh1 # one\n", "more")
    path = tmp_path / "all"
    path.write_text(
        "# of all kinds\n--reset --dt=f32,bf16 --dir=FWD_B,BWD_W\n--attr-post-ops=sum:0.5, \\\n    add:f32:per_oc, \\\n"
        '    relu\n--mb=4,8\n--batch=more\n--reset\nmb3ic1oc1ih3kh1n"twice" mb5ic1oc1ih3kh1n"twice"\n',
        encoding="utf-8",
    )
    found = read_shapes(str(path))
    assert {name: each["n"] for name, each in found.problems.items()} == {
        "ic1oc1ih3kh1": 4, "ic1oc1ih3kh1'": 8, "twice": 3, "twice'": 5,
    }  # fmt: skip
    assert found.ignored == {"--dt", "--dir", "--attr-post-ops"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ic16ih14kh3", "oc must be given"),
        ("ic16oc16ih14", "kh must be given"),
        ("ic16oc16kh3", "ih must be given"),
        ("ic16oc16", "sizes of all axes"),
        ("ic16oc16id4ih4kd1kh1", "sizes of all axes"),
        ("ic16oc16ih14kh3q4", "'q4' is no part of a problem"),
        ("g3ic16oc15ih14kh3", "groups 3 must divide 16 and 15 channels"),
        ("ic1oc1ih9oh3kh1sh2", "oh3 does not follow from ih9"),
        ("ic1oc1ih2kh5", "does not follow from ih2"),
        ("--mb=many", "--mb must be a number of images"),
        ("--batch=nowhere", "No such file"),
        ("--batch=shapes", "more than 8 files include each other"),
    ],
)
def test_lines_that_can_not_be_read(line: str, message: str, tmp_path: Path) -> None:
    """The error has the number of the line and what is wrong with it."""
    with pytest.raises(ValueError, match=rf"shapes, line 3: .*{message}"):
        read(tmp_path, f"ic1oc1ih3kh1\n\n{line}\n")


def test_a_file_without_problems(tmp_path: Path) -> None:
    """A file of comments alone is an error, not a check that passes."""
    with pytest.raises(ValueError, match="has no problems"):
        read(tmp_path, "# --batch=other\n")


def test_problems_are_tried_whole_with_each_kind(tmp_path: Path) -> None:
    """Problems become calls of each operation, with fewer images and channels beyond 2**28 multiply-adds."""
    shapes = read(tmp_path, "mb50ic512ih28oc128oh28kh1ph0\nmb1ic4oc4iw9kw3\n")
    problems = fitting(Takes(ops=OPS, dtypes=("f32", "bf16")), shapes)
    for _, problem in problems:
        assert problem.macs <= 2**28
        assert_valid(problem)
    assert {problem.n for name, problem in problems if problem.op == "Convolution" and name.startswith("mb50")} == {5}
    assert not fitting(Takes(ranks=(3,)), shapes)
    assert of_shapes(chosen(["normal"], []), shapes).kinds == ["normal"]
    for only in ("issues", "whole taps"):
        with pytest.raises(ValueError, match="--shapes chooses the problems"):
            of_shapes(chosen([only], []), shapes)
