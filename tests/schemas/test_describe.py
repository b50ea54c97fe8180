"""The tables as plain JSON."""

from __future__ import annotations

import json

import pytest

from convgrad._errors import UnknownOperation
from schemas.describe import describe, example, list_operations, weights_layouts
from schemas.ops import resolve
from schemas.tables import OPERATIONS, find_operation, operation_names


def test_the_list_has_every_operation_and_alias() -> None:
    """The list has one entry for each operation, and together they have all names."""
    listed = list_operations()
    assert [entry["op"] for entry in listed] == [operation.name for operation in OPERATIONS]
    assert {name for entry in listed for name in (entry["op"], *entry["aliases"])} == set(operation_names())
    assert json.loads(json.dumps(listed)) == listed


@pytest.mark.parametrize("name", operation_names())
def test_a_description_is_the_whole_table(name: str) -> None:
    """A description has every attribute, input and output, in the dialect of the requested name."""
    called = find_operation(name)
    told = describe(name)
    assert json.loads(json.dumps(told)) == told
    assert (told["op"], told["operation"], told["dialect"]) == (name, called.operation.name, called.dialect)
    operation = called.operation
    attributes = {entry["name"]: entry["aliases"] for entry in told["attributes"]}
    assert list(attributes) == [called.wire_names[row.name] for row in operation.attributes]
    assert {*attributes, *(name for aliases in attributes.values() for name in aliases)} == set(
        operation.attribute_spellings
    )
    inputs = {entry["name"]: entry["aliases"] for entry in told["inputs"]}
    assert list(inputs) == [called.wire_names[row.name] for row in operation.inputs]
    assert {*inputs, *(name for aliases in inputs.values() for name in aliases)} == set(operation.input_spellings)
    assert [entry["name"] for entry in told["outputs"]] == [called.wire_names[row.name] for row in operation.outputs]


def test_layouts_name_the_divided_axis() -> None:
    """A layout has the format's letters, and marks the axis that the groups divide."""
    transposed = weights_layouts(find_operation("ConvTranspose"))
    assert transposed["IOX"] == {"O": "(I, O/g, X)", "I": "(I/g, O, X)"}
    assert weights_layouts(find_operation("ConvolutionBackwardWeights"))["XIO"] == {"I": "(X, I/g, O)"}
    with pytest.raises(UnknownOperation):
        describe("Deconvolution")


@pytest.mark.parametrize("name", operation_names())
def test_examples_resolve(name: str) -> None:
    """The example for each name is a valid call."""
    call = example(find_operation(name))
    assert resolve(name, call["attributes"], call["inputs"]).called_as == name
