"""Print the SHA-256 of a few results that have the same bits on every kind of processor.

    python examples/reproducible.py [--url URL] [--ordinary]

With `--ordinary` the calls are made without `reproducible`: these bits belong to one kind of processor.
"""

from __future__ import annotations

import argparse
from hashlib import sha256
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import convgrad

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f64": np.float64}
LAYER: dict[str, Any] = {
    "strides": [2, 2],
    "pads_begin": [1, 1],
    "pads_end": [1, 1],
    "dilations": [1, 1],
    "data_format": "NCX",
}
LARGE, SMALL, WEIGHTS = (4, 16, 29, 29), (4, 32, 15, 15), (32, 16, 3, 3)
CALLS: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "ConvolutionBackwardWeights": (
        {"src": LARGE, "diff_dst": SMALL},
        {**LAYER, "weights_format": "OIX", "weights_shape": WEIGHTS},
    ),
    "ConvTransposeBackwardWeights": (
        {"src": SMALL, "diff_dst": LARGE},
        {**LAYER, "weights_format": "IOX", "weights_shape": WEIGHTS},
    ),
    "Convolution": ({"src": LARGE, "weights": WEIGHTS, "bias": (32,)}, {**LAYER, "weights_format": "OIX"}),
    "ConvTranspose": ({"src": SMALL, "weights": WEIGHTS, "bias": (16,)}, {**LAYER, "weights_format": "IOX"}),
    "BiasAddBackward": ({"diff_dst": SMALL}, {"data_format": "NCX"}),
}


def numbers(shape: tuple[int, ...], start: int) -> npt.NDArray[np.float64]:
    """Return numbers from -0.5 to 0.5, by integer arithmetic, which is the same everywhere."""
    count = np.arange(start, start + np.prod(shape), dtype=np.uint64)
    bits = count * np.uint64(0x9E3779B97F4A7C15)
    found: npt.NDArray[np.float64] = ((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53 - 0.5).reshape(shape)
    return found


def main() -> None:
    """Make each call in each dtype."""
    parser = argparse.ArgumentParser(description="Print the SHA-256 of a few results.")
    parser.add_argument("--url", help="address of the service; by default CONVGRAD_URL or http://127.0.0.1:8000")
    parser.add_argument("--ordinary", action="store_true", help="without reproducible, and without f64, which needs it")
    options = parser.parse_args()
    dtypes = {name: dtype for name, dtype in DTYPES.items() if not (options.ordinary and name == "f64")}
    print("| call |" + "".join(f" {name} |" for name in dtypes))
    print("|---|" + "---|" * len(dtypes))
    with convgrad.Client(options.url) as client:
        for op, (shapes, attributes) in CALLS.items():
            line = f"| {op} |"
            for dtype in dtypes.values():
                inputs = {
                    name: numbers(shape, 1000 * at).astype(dtype) for at, (name, shape) in enumerate(shapes.items(), 1)
                }
                result = client.run(op, inputs, attributes, reproducible=not options.ordinary)
                line += f" `{sha256(result.tobytes()).hexdigest()[:16]}` |"
            print(line)


if __name__ == "__main__":
    main()
