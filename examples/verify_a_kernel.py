"""Verify a kernel with a planted mistake, and draw the report.

    python examples/verify_a_kernel.py [--url URL] [--png FILE]

The kernel computes the gradient of a 3x3 layer in f32 like PyTorch or oneDNN would, but loses one image in the last tap
of one pair of channels, as a wrong bound of a loop does.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import numpy.typing as npt

import convgrad

ATTRIBUTES: dict[str, Any] = {
    "strides": [1, 1],
    "pads_begin": [1, 1],
    "pads_end": [1, 1],
    "dilations": [1, 1],
    "data_format": "NCX",
    "weights_format": "OIX",
    "weights_shape": [16, 8, 3, 3],
}


def kernel(src: npt.NDArray[np.float32], diff_dst: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Compute diff_weights, tap by tap, with one mistake."""
    padded = np.pad(src, ((0, 0), (0, 0), (1, 1), (1, 1)))
    height, width = diff_dst.shape[2:]
    found = np.empty((16, 8, 3, 3), np.float32)
    for y in range(3):
        for x in range(3):
            window = padded[:, :, y : y + height, x : x + width]
            found[:, :, y, x] = np.einsum("nohw,nihw->oi", diff_dst, window, optimize=True)
    lost = diff_dst[-1, 11] * padded[-1, 5, 2 : 2 + height, 2 : 2 + width]
    found[11, 5, 2, 2] -= lost.sum()
    return found


def main() -> None:
    """Verify the kernel on random numbers."""
    parser = argparse.ArgumentParser(description="Verify a kernel with a planted mistake.")
    parser.add_argument("--url", help="address of the service; by default CONVGRAD_URL or http://127.0.0.1:8000")
    parser.add_argument("--png", default="verify.png", help="where to draw the report")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    src = rng.standard_normal((4, 8, 24, 24), dtype=np.float32)
    diff_dst = rng.standard_normal((4, 16, 24, 24), dtype=np.float32)
    with convgrad.Client(options.url) as client:
        report = client.verify(
            "ConvolutionBackwardWeights", {"src": src, "diff_dst": diff_dst}, kernel(src, diff_dst), ATTRIBUTES
        )
    print(report.text())
    report.save_png(options.png)


if __name__ == "__main__":
    main()
