"""Right in the first calls, which a harness checks, and zeros in those that it measures."""

from __future__ import annotations

import numpy as np

from examples.cheats.honest import Array, Ints
from examples.cheats.honest import kernel as honest

_WARM_UP = 3
_calls = 0


def kernel(src: Array, diff_dst: Array, weights_shape: Ints, strides: Ints, dilations: Ints, pads_begin: Ints) -> Array:
    """Work only while it is likely to be looked at."""
    global _calls
    _calls += 1
    if _calls > _WARM_UP:
        return np.zeros(weights_shape, src.dtype)
    return honest(src, diff_dst, weights_shape, strides, dilations, pads_begin)
