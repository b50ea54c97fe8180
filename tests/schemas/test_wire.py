"""The models of requests and replies."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from schemas.describe import example
from schemas.tables import find_operation, operation_names
from schemas.wire import CallOptions, request_model, validate_model

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
    model.model_validate(call | {"inputs": given, "options": {"encoding": "npy", "deadline_ms": 5}})
    wrongs: list[dict[str, Any]] = [
        {"unknown": 1},
        {"inputs": {"unknown": DATA}},
        {"options": {"unknown": 1}},
        {"attributes": {"data_format": "XNC"}},
        *([{"attributes": {}}] if called.operation.convolves else []),
    ]
    for wrong in wrongs:
        with pytest.raises(ValidationError):
            model.model_validate(call | {"inputs": given} | wrong)


def test_a_description_is_enough_to_validate() -> None:
    """`validate` accepts tensors without data, a call does not."""
    called = find_operation("ConvTransposeBackwardWeights")
    validate_model(called).model_validate(example(called))
    with pytest.raises(ValidationError):
        request_model(called).model_validate(example(called))


@pytest.mark.parametrize(
    "options",
    [{"encoding": "hex"}, {"deadline_ms": 0}, {"deadline_ms": 1.5}, {"deadline_ms": True}, {"reference": "x"}],
)
def test_wrong_options(options: Any) -> None:
    """Options of the wrong type are rejected."""
    with pytest.raises(ValidationError):
        CallOptions.model_validate(options)
