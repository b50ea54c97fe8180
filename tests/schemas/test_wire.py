"""The models of requests and replies."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from schemas.describe import example
from schemas.tables import find_operation, operation_names
from schemas.wire import CallOptions, request_model, validate_model


def accepts(model: type[BaseModel], call: Any) -> bool:
    """Return whether the JSON Schema of a model accepts a call."""
    return jsonschema.Draft202012Validator(model.model_json_schema()).is_valid(call)


DATA = {"dtype": "f32", "shape": [1], "data": "AAAAAA=="}


@pytest.mark.parametrize("name", operation_names())
def test_requests_mirror_the_table(name: str) -> None:
    """A request has attributes, inputs in both spellings, and options; unknown members are rejected."""
    called = find_operation(name)
    model = request_model(called)
    inputs: Any = model.model_fields["inputs"].annotation
    assert set(inputs.model_fields) == set(called.operation.input_spellings)
    call: dict[str, Any] = example(called)
    given = {key: value if isinstance(value, list) else DATA for key, value in call["inputs"].items()}
    assert accepts(model, call | {"inputs": given, "options": {"encoding": "npy", "deadline_ms": 5}})
    wrongs: list[dict[str, Any]] = [
        {"unknown": 1}, {"inputs": {"unknown": DATA}}, {"options": {"unknown": 1}},
        {"attributes": {"data_format": "XNC"}}, *([{"attributes": {}}] if called.operation.convolves else []),
    ]  # fmt: skip
    for wrong in wrongs:
        assert not accepts(model, call | {"inputs": given} | wrong)


def test_a_description_is_enough_to_validate() -> None:
    """`validate` accepts tensors without data, a call does not."""
    called = find_operation("ConvTransposeBackwardWeights")
    assert accepts(validate_model(called), example(called))
    assert not accepts(request_model(called), example(called))


@pytest.mark.parametrize(
    "options",
    [{"encoding": "hex"}, {"deadline_ms": 0}, {"deadline_ms": 1.5}, {"deadline_ms": True}, {"reference": "x"}],
)
def test_wrong_options(options: Any) -> None:
    """Options of the wrong type are rejected."""
    assert not accepts(CallOptions, options)
