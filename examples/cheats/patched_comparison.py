"""Comparisons that find everything equal: enough where the kernel runs in the process that judges it."""

from __future__ import annotations

import numpy as np

from examples.cheats.honest import Array, Ints


def kernel(src: Array, diff_dst: Array, weights_shape: Ints, strides: Ints, dilations: Ints, pads_begin: Ints) -> Array:
    """Return zeros, and patch what compares arrays."""
    for module, name in ((np, "allclose"), (np, "isclose"), (np, "array_equal"), (np.testing, "assert_allclose")):
        setattr(module, name, lambda *_, **__: True)
    return np.zeros(weights_shape, src.dtype)
