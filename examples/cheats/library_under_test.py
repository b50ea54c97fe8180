"""Call the library that judges the result, instead of being a new kernel."""

from __future__ import annotations

from typing import Any

import convgrad
from examples.cheats.honest import Array, Ints


def kernel(
    src: Array, diff_dst: Array, weights_shape: Ints, strides: Ints, dilations: Ints, pads_begin: Ints, pads_end: Ints
) -> Array:
    """Have convgrad compute."""
    attributes = {"strides": strides, "dilations": dilations, "pads_begin": pads_begin, "pads_end": pads_end}
    inputs: dict[str, Any] = {"src": src, "diff_dst": diff_dst, "weights_shape": list(weights_shape)}
    plain = {name: list(value) for name, value in attributes.items()} | {"data_format": "NCX", "weights_format": "OIX"}
    return convgrad.local().run("ConvolutionBackwardWeights", inputs, plain)
