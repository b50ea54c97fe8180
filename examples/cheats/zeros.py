"""All zeros: right wherever a tolerance is wider than the values. KernelBench passed them on 4 of 60 problems."""

from __future__ import annotations

import numpy as np

from examples.cheats.honest import Array, Ints


def kernel(src: Array, diff_dst: Array, weights_shape: Ints, strides: Ints, dilations: Ints, pads_begin: Ints) -> Array:
    """Return zeros."""
    return np.zeros(weights_shape, src.dtype)
