"""Calls are checked and planned once, and remembered by their arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from convgrad._errors import ConvgradError
from engine.options import Options, parse_options
from engine.planning import Limits
from engine.prepare import Preparer
from kernels.cache import CACHE
from schemas.ops import TensorMeta
from tests.schemas.calls import GRADIENT, attributes, gradient


@pytest.fixture
def preparer() -> Preparer:
    """A preparer that remembers nothing yet."""
    return Preparer(Limits(2))


RIGHT = attributes(weights_format="IOX", groups=1)


def test_a_call_is_prepared_once(preparer: Preparer) -> None:
    """The same call gives the same object, also with tuples for lists; its deadline and limits are not shared."""
    first = preparer.prepare(GRADIENT, RIGHT, gradient(), Options())
    assert preparer.prepare(GRADIENT, dict(RIGHT), gradient(), Options()) is first
    tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in RIGHT.items()}
    assert preparer.known(GRADIENT, tuples, gradient(), Options()) is first
    hurried = preparer.prepare(GRADIENT, RIGHT, gradient(), parse_options({"deadline_ms": 7}))
    assert hurried.computations is first.computations
    assert (first.options.deadline_ms, hurried.options.deadline_ms) == (None, 7)
    with pytest.raises(ConvgradError, match="multiply-adds"):
        Preparer(Limits(2, work_limit=1)).prepare(GRADIENT, RIGHT, gradient(), Options())


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ({"strides": [True, 1]}, {}),
        ({"strides": [1.0, 1]}, {}),
        ({"groups": True}, {}),
        ({"groups": 1.0}, {}),
        ({}, {"src": TensorMeta("f32", (2, 4, 5, 5.0))}),  # type: ignore[arg-type] # what a rule must catch
        ({}, {"weights_shape": [4, 6, 3.0, 3]}),
    ],
)
def test_equal_values_of_other_types_are_other_calls(
    preparer: Preparer, given: dict[str, Any], inputs: dict[str, Any]
) -> None:
    """An invalid call is rejected even if a valid call that compares equal in Python was prepared before."""
    preparer.prepare(GRADIENT, RIGHT, gradient(), Options())
    with pytest.raises(ConvgradError):
        preparer.prepare(GRADIENT, RIGHT | given, gradient(**inputs), Options())


def test_attributes_and_inputs_do_not_mix(preparer: Preparer) -> None:
    """A weights_shape given as an attribute and one given as an input are different calls."""
    shape = gradient()["weights_shape"]
    rest = {name: value for name, value in gradient().items() if name != "weights_shape"}
    as_input = preparer.prepare(GRADIENT, RIGHT, gradient(), Options())
    as_attribute = preparer.prepare(GRADIENT, RIGHT | {"weights_shape": shape}, rest, Options())
    assert as_input.op == as_attribute.op
    assert as_input is not as_attribute


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        (None, {}), ({}, []), ({"a": [np.int64(1)]}, {}), ({"a": "x" * 65}, {}), ({"a": [1] * 13}, {}),
        ({str(index): 1 for index in range(17)}, {}), ({"a": np.zeros(2)}, {}), ({"a": [[np.int64(1)]]}, {}),
    ],
)  # fmt: skip
def test_unusual_calls_are_not_remembered(preparer: Preparer, given: Any, inputs: Any) -> None:
    """Calls that are large or not plain are not remembered, nor looked up, and are no error."""
    prepared, before = preparer.prepare(GRADIENT, RIGHT, gradient(), Options()), len(CACHE)
    preparer.keep(given, inputs, prepared)
    assert len(CACHE) == before
    assert preparer.known(GRADIENT, given, inputs, Options()) is None
