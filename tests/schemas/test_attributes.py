"""Attributes in both spellings, plain and wrapped, and the errors for wrong ones."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from schemas.attributes import attributes_model, read_attributes
from schemas.tables import OPERATIONS, CalledOperation, find_operation, operation_names
from tests.schemas.calls import attributes

NEW = find_operation("ConvTransposeBackwardWeights")
OLD = find_operation("ConvTransposeBackpropFilters-1")


def broken(called: CalledOperation, **changes: Any) -> dict[tuple[str | int, ...], str]:
    """Return the broken rules of changed attributes: message by place after "attributes"."""
    _, problems = read_attributes(called, attributes(**changes))
    return {tuple(found["loc"][1:]): found["msg"] for found in problems}


@pytest.mark.parametrize("name", operation_names())
def test_models_mirror_the_table(name: str) -> None:
    """Each model has the table's attributes and defaults and no others; required ones have no default."""
    called = find_operation(name)
    fields = attributes_model(called).model_fields
    assert list(fields) == [row.name for row in called.operation.attributes]
    for row in called.operation.attributes:
        assert fields[row.name].is_required() == (row.required == "yes")
        if row.required != "yes":
            assert fields[row.name].default == row.default_in(called.dialect)


@pytest.mark.parametrize("called", [NEW, OLD], ids=["new", "old"])
def test_the_json_schema_has_both_spellings(called: CalledOperation) -> None:
    """The JSON Schema of a model lists every spelling that the model accepts, and forbids others."""
    schema = attributes_model(called).model_json_schema()
    assert set(schema["properties"]) == set(called.operation.attribute_spellings)
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["strides", "dilations"]
    assert schema["properties"]["filter_format"]["default"] == called.operation.attribute["weights_format"].default_in(
        called.dialect
    )


def test_defaults() -> None:
    """Absent and null attributes get the table's defaults."""
    read, problems = read_attributes(NEW, attributes(data_format=None) | {"groups": None, "auto_pad": None})
    assert not problems
    assert (read.groups, read.auto_pad, read.data_format, read.weights_format) == (1, "none", "NXC", "XOI")
    assert read.output_padding is None
    assert read.weights_shape is None


@pytest.mark.parametrize("called", [NEW, OLD], ids=["new", "old"])
@pytest.mark.parametrize("name", ["weights_format", "filter_format"])
def test_both_spellings_are_read(called: CalledOperation, name: str) -> None:
    """Either spelling is accepted under either name of the operation."""
    read, problems = read_attributes(called, attributes() | {name: "IOX"})
    assert not problems
    assert read.weights_format == "IOX"
    assert read.spelled["weights_format"] == name


@pytest.mark.parametrize("other", [[4, 6, 3, 4], [4, 6, 3], [4.0, 6, 3, 3], [True, 6, 3, 3], [[4], 6, 3, 3], "4"])
def test_both_spellings_with_two_values(other: Any) -> None:
    """Both spellings with different values are rejected, even where Python considers the values equal."""
    given = {"weights_shape": [4, 6, 3, 3], "filter_shape": other}
    assert "another spelling of weights_shape" in broken(NEW, **given)[("filter_shape",)]


@pytest.mark.parametrize("text", ["none", "None", "NOTSET", "same_upper", "Same_Upper", "SAME_LOWER", "VALID"])
def test_auto_pad_in_any_case(text: str) -> None:
    """A padding rule may be written in any case, or `none` as ONNX writes it; with a rule the pads may be absent."""
    absent = text.lower() in ("none", "notset")
    pads: dict[str, Any] = {} if absent else {"pads_begin": None, "pads_end": None}
    read, problems = read_attributes(NEW, attributes(auto_pad=text, **pads))
    assert not problems
    assert read.auto_pad == ("none" if absent else text.lower())


def test_wrapped_values() -> None:
    """Values may be wrapped as oneDNN's graph dump writes them."""
    given = {
        "strides": {"type": "s64[]", "value": [2, 2]},
        "pads_begin": {"type": "s64[]", "value": []},
        "pads_end": {"type": "s64[]", "value": [0, 0]},
        "dilations": {"type": "s64[]", "value": [1, 1]},
        "auto_pad": {"type": "string", "value": "None"},
        "groups": {"type": "s64", "value": 2},
        "output_padding": {"type": "s64[]", "value": [0] * 12},
        "weights_shape": {"type": "s64[]", "value": [0] * 12},
    }
    read, problems = read_attributes(NEW, given)
    assert not problems
    assert (read.strides, read.pads_begin, read.groups, read.auto_pad) == ((2, 2), (), 2, "none")
    assert read.output_padding is None
    assert read.weights_shape is None


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"type": "s64", "value": [1, 1]}, ("strides", "type")),
        ({"type": ["s64[]"], "value": [1, 1]}, ("strides", "type")),
        ({"value": [1, 1]}, ("strides",)),
        ({"type": "s64[]", "value": [1, 1], "more": 1}, ("strides",)),
        ({}, ("strides",)),
    ],
)
def test_wrongly_wrapped_values(value: Any, where: tuple[str, ...]) -> None:
    """A wrapper needs the attribute's exact type and a value; a wrong one is reported once."""
    assert list(broken(NEW, strides=value)) == [where]


def test_lists_of_zeros() -> None:
    """Two zeros are an output padding; an empty list, and twelve zeros as oneDNN writes it, count as absent.

    A weights_shape of zeros counts as absent too, as oneDNN writes an attribute that was never set.
    """
    padding: list[tuple[list[int], tuple[int, ...] | None]] = [([0, 0], (0, 0)), ([0] * 12, None), ([], None)]
    for given, found in padding:
        read, problems = read_attributes(NEW, attributes(output_padding=given, weights_shape=[0] * len(given)))
        assert not problems
        assert (read.output_padding, read.weights_shape) == (found, None)


@pytest.mark.parametrize(
    ("name", "value", "where", "message"),
    [
        ("strides", [0, 1], ("strides", 0), "strides[0] must be at least 1, but is 0"),
        ("dilations", [1, 0], ("dilations", 1), "dilations[1] must be at least 1, but is 0"),
        ("pads_begin", [-1, 0], ("pads_begin", 0), "pads_begin[0] must be at least 0, but is -1"),
        ("pads_end", [0, -1], ("pads_end", 1), "pads_end[1] must be at least 0, but is -1"),
        ("output_padding", [0, -1], ("output_padding", 1), "output_padding[1] must be at least 0, but is -1"),
        ("groups", 0, ("groups",), "groups must be at least 1, but is 0"),
        ("groups", 2**63, ("groups",), "but is a number above 2^63 - 1"),
        ("groups", -(10**20), ("groups",), "but is a number below -2^63"),
        ("weights_shape", [4, 0, 3], ("weights_shape", 1), "weights_shape[1] must be at least 1, but is 0"),
        *(("groups", wrong, ("groups",), "groups must be an integer") for wrong in (True, 1.0, "1", [1])),
        ("strides", [True, 1], ("strides", 0), "strides[0] must be an integer"),
        ("strides", [1, 1.0], ("strides", 1), "strides[1] must be an integer"),
        *(("strides", wrong, ("strides",), "strides must be a list of integers") for wrong in (1, "1,1")),
        ("strides", [1] * 13, ("strides",), "strides must have at most 12 values, but has more"),
        ("auto_pad", "same", ("auto_pad",), "must be one of none, same_upper, same_lower, valid"),
        ("auto_pad", 1, ("auto_pad",), "auto_pad must be one of"),
        ("data_format", "NHWC", ("data_format",), "data_format must be one of NXC, NCX; use NXC"),
        ("weights_format", "OIHW", ("weights_format",), "IOX; use OIX, or IOX for jax.lax with transpose_kernel=True"),
        ("dilation", [1, 1], ("dilation",), "BackwardWeights; use dilations"),
        *((name, 1, ("?",), "this attribute is not an attribute") for name in ("\ud800", "x" * 65)),
    ],
)  # fmt: skip
def test_wrong_values(name: str, value: Any, where: tuple[str | int, ...], message: str) -> None:
    """A wrong value is reported alone, at its place, with the rule and the number."""
    found = broken(NEW, **{name: value})
    assert list(found) == [where]
    assert message in found[where]


@pytest.mark.parametrize("missing", ["strides", "dilations", "pads_begin", "pads_end"])
def test_required_attributes(missing: str) -> None:
    """A missing required attribute is reported; the pads are required while auto_pad is none."""
    assert f"{missing} is required" in broken(NEW, **{missing: None})[(missing,)]
    with_others = broken(NEW, **{missing: None, "groups": {}, "unknown": 1})
    assert set(with_others) == {(missing,), ("groups",), ("unknown",)}


def test_all_errors_in_one_pass_in_the_callers_spelling() -> None:
    """All wrong attributes are reported together, under the names that the caller used, and the right ones kept."""
    given = attributes(strides=[0, 0], dilations="x", groups=-1) | {"filter_format": "?", "unknown": 1}
    read, problems = read_attributes(OLD, given)
    places = {tuple(found["loc"][1:]) for found in problems}
    assert places == {("strides", 0), ("strides", 1), ("dilations",), ("groups",), ("filter_format",), ("unknown",)}
    assert read.bad == {"strides", "dilations", "groups", "weights_format"}
    assert (read.strides, read.groups, read.weights_format, read.pads_begin) == (None, None, None, (0, 0))


@pytest.mark.parametrize("name", [operation.name for operation in OPERATIONS if operation.convolves])
def test_models_and_reader_agree(name: str) -> None:
    """The JSON Schema of a model accepts both spellings and wrappers, and rejects what the reader rejects."""
    called = find_operation(name)
    schema = jsonschema.Draft202012Validator(attributes_model(called).model_json_schema())
    accepted = attributes(auto_pad="SAME_UPPER", filter_format={"type": "string", "value": "IOX"})
    assert not read_attributes(called, accepted)[1]
    assert schema.is_valid(accepted)
    wrongs: tuple[dict[str, Any], ...] = ({"unknown{}": 1}, {"strides": [0, 1]}, {"filter_format": {}})
    for wrong in (*(attributes() | wrong for wrong in wrongs), 3):
        assert read_attributes(called, wrong)[1]
        assert not schema.is_valid(wrong)
