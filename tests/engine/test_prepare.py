"""The memo of resolved calls."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.memo import Memo, key_of
from schemas.ops import TensorMeta, resolve
from tests.schemas.calls import GRADIENT, attributes, gradient, refused, tensor


def test_the_same_call_is_the_same_object() -> None:
    """A call that was resolved once is not resolved again."""
    given = attributes(weights_format="IOX")
    assert resolve(GRADIENT, given, gradient()) is resolve(GRADIENT, dict(given), gradient())


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
def test_equal_values_of_other_types_are_other_calls(given: dict[str, Any], inputs: dict[str, Any]) -> None:
    """An invalid call is rejected even if a valid call that compares equal in Python was resolved before."""
    right = attributes(weights_format="IOX", groups=1)
    resolve(GRADIENT, right, gradient())
    assert refused(GRADIENT, right | given, gradient(**inputs))


def test_attributes_and_inputs_do_not_mix() -> None:
    """A weights_shape given as an attribute and one given as an input are different calls."""
    shape = [4, 6, 3, 3]
    src = {"src": tensor(1, 4, 5)}
    assert key_of(GRADIENT, {"weights_shape": shape}, src) != key_of(GRADIENT, {}, {"weights_shape": shape} | src)


@pytest.mark.parametrize(
    ("name", "given", "inputs"),
    [
        (1, {}, {}),
        ("x", None, {}),
        ("x", {}, []),
        ("x", {"a": {}}, {}),
        ("x", {"a": [[1]]}, {}),
        ("x", {"a": [1] * 13}, {}),
        ("x", {"a": "x" * 65}, {}),
        ("x", {"a" * 65: 1}, {}),
        ("x", {3: 1}, {}),
        ("x", {"a": None}, {}),
        ("x", {str(index): 1 for index in range(17)}, {}),
        ("x", {}, {"src": {"dtype": "f32", "shape": [1]}}),
    ],
)
def test_unusual_calls_have_no_key(name: Any, given: Any, inputs: Any) -> None:
    """Calls that are large or not plain are not remembered."""
    assert key_of(name, given, inputs) is None


def test_a_full_memo_drops_the_oldest() -> None:
    """The memo holds a fixed number of calls, the latest ones."""
    op = resolve(GRADIENT, attributes(weights_format="IOX"), gradient())
    memo = Memo(2)
    for key in ("a", "b", "c"):
        memo.put(key, op)
    assert [memo.get(key) for key in ("a", "b", "c")] == [None, op, op]
    memo.put(None, op)
    assert memo.get(None) is None
