"""Tensors on the wire."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from schemas.broken_rules import BrokenRule
from schemas.tensors import DataTensor, NpyTensor, TensorDescription, TensorMeta, WireTensor, read_tensor

LOC: list[str | int] = ["inputs", "src"]


def read(value: Any) -> tuple[WireTensor | None, dict[tuple[str | int, ...], str]]:
    """Return the tensor, and its errors by place."""
    broken: list[BrokenRule] = []
    found = read_tensor(value, LOC, broken)
    return found, {tuple(each["loc"][2:]): each["msg"] for each in broken}


MARK = object()
DUMPED = {"id": 0, "dtype": "f32", "shape": [1], "stride": [1], "layout_type": "strided", "property_type": "undef"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"dtype": "bf16", "shape": [2, 3], "data": "not base64"}, WireTensor("bf16", (2, 3), "data", "not base64")),
        ({"dtype": "f32", "shape": [1], "data": MARK}, WireTensor("f32", (1,), "data", MARK)),
        ({"npy": "AA"}, WireTensor(None, None, "npy", "AA")),
        ({"npy": "AA", "dtype": "bf16"}, WireTensor("bf16", None, "npy", "AA")),
        ({"dtype": "f32", "shape": [0]}, WireTensor("f32", (0,))),
        ({"dtype": "bf16"}, WireTensor("bf16", None)),
        ({}, WireTensor(None, None)),
        (DUMPED, WireTensor("f32", (1,))),
    ],
)
def test_tensors(value: Any, expected: WireTensor) -> None:
    """A tensor is raw bytes, for which a body's reader may put an object, an npy file, or a description."""
    assert read(value) == (expected, {})
    described = None if expected.dtype is None or expected.shape is None else (expected.dtype, expected.shape)
    assert expected.meta == (described and TensorMeta(*described))


@pytest.mark.parametrize(
    ("value", "where", "message"),
    [
        (3, (), "src must be a tensor: an object with dtype, shape and data"),
        ([1, 2], (), "src must be a tensor"),
        ({"dtype": "f32", "shape": [1], "data": 3}, ("data",), "data of src must be base64 text or a list of numbers"),
        ({"npy": ["AA"]}, ("npy",), "npy of src must be base64 text"),
        ({"npy": True}, ("npy",), "npy of src must be base64 text"),
        ({"shape": [1], "data": "AA"}, ("dtype",), "src has data and therefore needs a dtype"),
        ({"dtype": "f32", "data": "AA"}, ("shape",), "src has data and therefore needs a shape"),
        ({"dtype": 7, "shape": [1], "data": "AA"}, ("dtype",), "the dtype of src must be a string"),
        ({"dtype": "f32", "shape": [-1], "data": "AA"}, ("shape", 0), "size 0 of the shape of src must be from 0 to"),
        ({"dtype": "f32", "shape": [1.0], "data": "AA"}, ("shape", 0), "size 0 of the shape of src must be an integer"),
        ({"npy": "AA", "shape": [1]}, ("shape",), "the npy file of src has its own shape"),
        ({"npy": "AA", "data": "AA", "dtype": "f32", "shape": [1]}, (), "src has both data and npy: give one"),
        ({"dtype": "f32", "shape": [1], "values": "AA"}, ("values",), "but src has another member"),
        ({"dtype": "f32", "shapes": [1]}, ("shapes",), "did you mean shape?"),
        ({str(index): 1 for index in range(100)}, (), "src must have at most 64 members, but has 100"),
    ],
)
def test_wrong_tensors(value: Any, where: tuple[str | int, ...], message: str) -> None:
    """Errors in a tensor are reported at their place in it, and no tensor is returned."""
    found, broken = read(value)
    assert found is None
    assert message in broken[where]


def test_models_and_rules_agree() -> None:
    """The models of the documents accept what the reader accepts in a call, and reject what it rejects."""
    adapter: TypeAdapter[Any] = TypeAdapter(DataTensor | NpyTensor | TensorDescription)
    for right in ({"dtype": "f32", "shape": [1], "data": "AA"}, {"npy": "AA"}, {"dtype": "f32", "shape": []}):
        adapter.validate_python(right)
        assert read(right)[0] is not None
    for wrong in ({"dtype": "f32", "shape": [True], "data": "AA"}, {"npy": "AA", "shape": [1]}, 3, {"npy": 3}):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)
        assert read(wrong)[0] is None
