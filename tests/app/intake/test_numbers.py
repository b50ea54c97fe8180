"""Numbers in JSON lists: the elements of a tensor, rounded once, or an error that says where they are wrong."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from app.intake.elements import TensorFault, elements_of
from convgrad._dtypes import DTYPES

LISTS = st.recursive(st.integers(-3, 3), lambda inner: st.lists(inner, max_size=3), max_leaves=9)


@given(
    seed=st.integers(0, 1 << 16),
    dtype=st.sampled_from(["f32", "f16", "bf16", "f64"]),
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    nested=st.booleans(),
)
def test_any_tensor(seed: int, dtype: str, shape: list[int], nested: bool) -> None:
    """Nested or flat, the elements are those of the numbers, infinities among them."""
    array = np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype].numpy)
    array[array > 1.5] = np.inf
    values = array.astype(np.float64)
    text = json.dumps((values if nested else values.ravel()).tolist()).replace("Infinity", '"Infinity"')
    assert elements_of(from_json(text), DTYPES[dtype], tuple(shape)).tobytes() == array.tobytes()


@given(values=st.lists(LISTS, max_size=4), shape=st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple))
def test_what_is_accepted_are_the_lists_of_a_tensor(values: list[Any], shape: tuple[int, ...]) -> None:
    """Lists are accepted if, and only if, NumPy reads an array of the shape, or one axis of as many numbers."""
    try:
        array: Any = np.array(values, np.float32)
    except (ValueError, TypeError):  # ragged
        array = np.zeros((9, 9))
    nested = shape[: shape.index(0) + 1] if 0 in shape else shape  # NumPy sees no more of it
    fits = array.shape == nested or (array.ndim == 1 and array.size == np.prod(shape))
    with nullcontext() if fits else pytest.raises(TensorFault):
        assert elements_of(values, DTYPES["f32"], shape).tobytes() == array.tobytes()


def test_integers_are_whole() -> None:
    """The values of a shape must be integers, but may be written as floats."""
    assert elements_of([3, 2.0, 1e1], DTYPES["s64"], (3,)).tolist() == [3, 2, 10]
    for wrong in ([3, 2.5], [3, "NaN"], ["Infinity", 3], [3, 1e30]):
        with pytest.raises(TensorFault, match=r"integers|range"):
            elements_of(wrong, DTYPES["s64"], (2,))


def test_rounding_to_bf16() -> None:
    """Numbers between two bf16 values are rounded once, to the nearest one, not to float32 before."""
    given = [1.0 + 2**-9, 1.0 + 3 * 2**-8, -3.14159, 1.0 + 2**-8 + 2**-40, -1.0 - 2**-8 - 2**-40, 1.0 + 2**-8, 1e-45]
    right = [1.0, 1.015625, -3.140625, 1.0078125, -1.0078125, 1.0, 0.0]
    assert elements_of(given, DTYPES["bf16"], (7,)).tobytes() == np.array(right, ml_dtypes.bfloat16).tobytes()


@pytest.mark.parametrize(
    ("dtype", "most", "over"),
    [
        ("f16", "65519.99", "65520"),
        ("bf16", "3.3961775e38", "3.3961776e38"),
        ("f32", "3.402823567797336e38", "3.4028235677973367e38"),
        ("f64", "1.7976931348623158e308", "1.7976931348623159e308"),
        ("f64", "1", "1e400"),
        ("f32", "1", "1" + "0" * 400),
    ],
)
def test_the_range_of_a_dtype(dtype: str, most: str, over: str) -> None:
    """A number that would round to infinity is refused, also beside an infinity that is meant; others are not."""
    for text, fits in ((most, True), (over, False), (f"-{over}", False), ('"-Infinity"', True)):
        for beside in ("1", '"Infinity"'):
            with nullcontext() if fits else pytest.raises(TensorFault, match="outside the range of"):
                elements_of(from_json(f"[{text}, {beside}]"), DTYPES[dtype], (2,))
