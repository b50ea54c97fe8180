"""Calls given on the command line or in a spec file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from convgrad import NpyFile
from convgrad._command.spec import CallSpec, attribute, integers, named, read_spec, tensor

DUMP: dict[str, Any] = {
    "id": 0,
    "name": "DECONV_0",
    "kind": "ConvTransposeBackwardWeights",
    "attrs": {"strides": {"type": "s64[]", "value": [2, 2]}},
    "inputs": [{"id": 0, "dtype": "f32", "shape": [1, 2, 3, 3]}],
    "outputs": [{"id": 2, "dtype": "f32", "shape": [2, 2, 1, 1]}],
}


def written(folder: Path, spec: Any) -> Path:
    """Write a spec file."""
    path = folder / "op.json"
    path.write_text(spec if isinstance(spec, str) else json.dumps(spec))
    return path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("strides=2,2", [2, 2]), ("strides=2", [2]), ("strides=2,", [2]), ("strides=[2, 2]", [2, 2]), ("groups=4", 4),
        ("pads_begin=-1,0", [-1, 0]), ("data_format=NCX", "NCX"), ("auto_pad=same_upper", "same_upper"),
        ("other=1,2", [1, 2]), ('strides={"type": "s64[]", "value": [2]}', {"type": "s64[]", "value": [2]}),
        ("text=a=b", "a=b"), ("empty=", ""),
    ],
)  # fmt: skip
def test_attributes(text: str, value: Any) -> None:
    """Integers, lists, JSON and words are told apart; a single number for a list attribute is a list."""
    assert attribute(text) == (text.partition("=")[0], value)


@pytest.mark.parametrize("text", ["strides", "=2", "", "strides=[2"])
def test_malformed_attributes_are_rejected(text: str) -> None:
    """Text without a name, or with invalid JSON, is rejected."""
    with pytest.raises(ValueError):  # noqa: PT011 - argparse shows its own message
        attribute(text)


def test_lists_and_names() -> None:
    """Shapes may have brackets; a value may contain an equals sign."""
    assert integers("64,32,3,3") == integers("[64, 32, 3, 3]") == [64, 32, 3, 3]
    assert named("src=a=b.npy") == ("src", "a=b.npy")


def test_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor is a file, or described by dtype and shape; if a file of that name exists, it is the file."""
    monkeypatch.chdir(tmp_path)
    assert tensor("a.npy", "bf16") == NpyFile("a.npy", "bf16")
    assert tensor("bf16:8,64") == {"dtype": "bf16", "shape": [8, 64]}
    Path("f32:8").touch()
    assert tensor("f32:8") == NpyFile("f32:8")


def test_a_plain_spec(tmp_path: Path) -> None:
    """A spec has the members of a request; its paths are relative to its folder."""
    inputs = {"src": "a.npy", "weights_shape": [1], "diff_dst": {"dtype": "f32", "shape": [1]}}
    spec = read_spec(written(tmp_path, {"op": "Op", "attributes": {"groups": 2}, "inputs": inputs}))
    expected = inputs | {"src": NpyFile(tmp_path / "a.npy")}
    assert spec == CallSpec("Op", {"groups": 2}, expected, {})


@pytest.mark.parametrize("dump", [DUMP, {"version": "3.9.0", "graph": [DUMP]}])
def test_a_dumped_op(tmp_path: Path, dump: Any) -> None:
    """An op dumped by oneDNN Graph, alone or as the only one of a graph, is sent to the service unchanged."""
    spec = read_spec(written(tmp_path, dump))
    assert (spec.op, spec.attributes) == ("ConvTransposeBackwardWeights", DUMP)
    more = spec.with_more("Alias", {"groups": 2}, {"src": 1})
    assert more.op == "Alias"
    assert more.attributes == DUMP | {"attrs": {**DUMP["attrs"], "groups": 2}}
    assert more.inputs == {"src": 1}


@pytest.mark.parametrize(
    "spec",
    [
        "{", "[" * 100_000, "[]", '"text"', {"graph": [DUMP, DUMP]}, {"op": "Op", "attributes": []},
        {"op": "Op", "attribute": {}},
    ],
)  # fmt: skip
def test_malformed_specs_are_rejected(tmp_path: Path, spec: Any) -> None:
    """A file in any other form is rejected with its name and the rule."""
    with pytest.raises(ValueError, match=r"op\.json must "):
        read_spec(written(tmp_path, spec))
