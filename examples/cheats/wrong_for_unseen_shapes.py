"""Right for the shapes of a published test, 3x3 taps and stride 1, and wrong for all others."""

from __future__ import annotations

import numpy as np

from examples.cheats.honest import Array, Ints
from examples.cheats.honest import kernel as honest


def kernel(src: Array, diff_dst: Array, weights_shape: Ints, strides: Ints, dilations: Ints, pads_begin: Ints) -> Array:
    """Work for shapes that everybody tests."""
    if tuple(weights_shape[2:]) == (3, 3) and set(strides) == {1}:
        return honest(src, diff_dst, weights_shape, strides, dilations, pads_begin)
    return np.zeros(weights_shape, src.dtype)
