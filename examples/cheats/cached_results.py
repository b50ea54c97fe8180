"""The first result of each shape, whatever the data: right in a harness that draws its data once."""

from __future__ import annotations

from examples.cheats.honest import Array, Ints
from examples.cheats.honest import kernel as honest

_RESULTS: dict[object, Array] = {}


def kernel(src: Array, diff_dst: Array, weights_shape: Ints, strides: Ints, dilations: Ints, pads_begin: Ints) -> Array:
    """Compute once for each shape."""
    key = src.shape, diff_dst.shape, tuple(weights_shape), tuple(strides), tuple(dilations), tuple(pads_begin)
    if key not in _RESULTS:
        _RESULTS[key] = honest(src, diff_dst, weights_shape, strides, dilations, pads_begin)
    return _RESULTS[key].copy()
