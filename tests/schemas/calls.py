"""Valid calls to start from, and a helper that collects the errors of rejected ones."""

from __future__ import annotations

from typing import Any

import pytest

from convgrad._errors import InvalidParams
from schemas.ops import TensorMeta, resolve

GRADIENT = "ConvTransposeBackwardWeights"
CONVOLUTION = "ConvolutionBackwardWeights"
FORWARD = "ConvTranspose"


def attributes(spatial: int = 2, **changes: Any) -> dict[str, Any]:
    """Return attributes of an unpadded call with stride 1, in NCX; a change to None leaves the attribute out."""
    plain = {
        "strides": [1] * spatial, "pads_begin": [0] * spatial, "pads_end": [0] * spatial, "dilations": [1] * spatial,
        "data_format": "NCX",
    }  # fmt: skip
    return {name: value for name, value in (plain | changes).items() if value is not None}


def tensor(*shape: int, dtype: str = "f32") -> TensorMeta:
    """Return a tensor's metadata for a shape."""
    return TensorMeta(dtype, shape)


def gradient(**changes: Any) -> dict[str, Any]:
    """Return inputs of a transposed gradient that fit `attributes()`: 4 channels of 5 x 5, 6 of 7 x 7, 3 x 3 taps."""
    plain = {"src": tensor(2, 4, 5, 5), "diff_dst": tensor(2, 6, 7, 7), "weights_shape": [4, 6, 3, 3]}
    return plain | changes


def tensors(**inputs: Any) -> dict[str, Any]:
    """Return inputs by name: a tuple is a shape of f32, anything else is kept."""
    return {name: tensor(*value) if isinstance(value, tuple) else value for name, value in inputs.items()}


def place(text: str) -> tuple[str | int, ...]:
    """Return the `loc` that a dotted text stands for."""
    return tuple(int(part) if part.isdigit() else part for part in text.split("."))


def refused(op: str, given: Any, inputs: Any, **options: Any) -> dict[tuple[str | int, ...], str]:
    """Return the broken rules of a call, which must be rejected: message by place."""
    with pytest.raises(InvalidParams) as caught:
        resolve(op, given, inputs, **options)
    assert caught.value.errors
    return {tuple(error["loc"]): error["msg"] for error in caught.value.errors}


def windows(size: int, begin: int, end: int, kernel: int, stride: int, dilation: int) -> int:
    """Return the number of positions of a kernel in a padded axis, counted one by one."""
    first, last, count = -begin, size + end - 1, 0
    while first + (kernel - 1) * dilation <= last:
        count += 1
        first += stride
    return count


def spread(size: int, kernel: int, stride: int, dilation: int) -> int:
    """Return the size that a transposed convolution writes without padding, given by its last write."""
    return max(x * stride + k * dilation for x in range(size) for k in range(kernel)) + 1
