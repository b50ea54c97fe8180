"""A test file for a kernel: its verdicts are computed in the process of the tests, without a server.

pytest examples/test_my_kernel.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from convgrad.testing import assert_honest

ATTRIBUTES: dict[str, Any] = {
    "strides": [1, 1],
    "pads_begin": [0, 0],
    "pads_end": [0, 0],
    "dilations": [1, 1],
    "data_format": "NCX",
    "weights_format": "OIX",
    "weights_shape": [16, 8, 3, 3],
}


def my_kernel(src: npt.NDArray[np.float32], diff_dst: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Compute diff_weights, tap by tap: the kernel under test."""
    height, width = diff_dst.shape[2:]
    taps = [src[:, :, y : y + height, x : x + width] for y in range(3) for x in range(3)]
    found = np.stack([np.einsum("nohw,nihw->oi", diff_dst, tap, optimize=True) for tap in taps], axis=-1)
    return found.reshape(16, 8, 3, 3)


@pytest.fixture
def inputs() -> dict[str, Any]:
    """Random tensors."""
    rng = np.random.default_rng(0)
    src, diff_dst = (rng.standard_normal(shape, np.float32) for shape in ((4, 8, 16, 16), (4, 16, 14, 14)))
    return {"src": src, "diff_dst": diff_dst}


def test_the_kernel_is_honest(inputs: dict[str, Any]) -> None:
    """Its errors are those of an f32 sum, and no others."""
    assert_honest(my_kernel(**inputs), "ConvolutionBackwardWeights", inputs, ATTRIBUTES)


def test_a_planted_fault_is_found(inputs: dict[str, Any]) -> None:
    """One image missing from one tap of one pair of channels is found, and the message says where."""
    wrong = my_kernel(**inputs)
    wrong[11, 5, 2, 2] -= (inputs["diff_dst"][-1, 11] * inputs["src"][-1, 5, 2:, 2:]).sum()
    with pytest.raises(AssertionError, match=r"\[11, 5, 2, 2\]"):
        assert_honest(wrong, "ConvolutionBackwardWeights", inputs, ATTRIBUTES)
