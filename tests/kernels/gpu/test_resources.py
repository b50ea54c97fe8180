"""What the compiled kernels need on each generation of GPUs, none of which is used."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from kernels.gpu.configurations import GENERATIONS, Generation
from tests.kernels.gpu.running import compiling, needs_triton

ROOT = Path(__file__).resolve().parents[3]

pytestmark = needs_triton

RESOURCES: dict[int, dict[str, tuple[int, int]]] = {
    80: {
        "256 3x3, Convolution, bf16": (188, 49152), "256 3x3, Convolution, f32": (212, 36864),
        "256 3x3, ConvTranspose, bf16": (188, 49152), "256 3x3, ConvTranspose, f32": (212, 36864),
        "256 3x3, ConvolutionBackwardWeights, bf16": (169, 49152),
        "256 3x3, ConvolutionBackwardWeights, f32": (244, 28672), "64 3x3, Convolution, bf16": (198, 49152),
        "64 3x3, Convolution, f32": (212, 36864), "64 3x3, ConvTranspose, bf16": (198, 49152),
        "64 3x3, ConvTranspose, f32": (212, 36864), "64 3x3, ConvolutionBackwardWeights, bf16": (138, 24576),
        "64 3x3, ConvolutionBackwardWeights, f32": (244, 28672), "128 3x3 s2, Convolution, bf16": (188, 49152),
        "128 3x3 s2, Convolution, f32": (212, 36864), "128 3x3 s2, ConvTranspose, bf16": (188, 49152),
        "128 3x3 s2, ConvTranspose, f32": (212, 36864), "128 3x3 s2, ConvolutionBackwardWeights, bf16": (169, 49152),
        "128 3x3 s2, ConvolutionBackwardWeights, f32": (244, 28672), "stem 7x7 s2, Convolution, bf16": (188, 8192),
        "stem 7x7 s2, Convolution, f32": (230, 16384), "stem 7x7 s2, ConvTranspose, bf16": (166, 55296),
        "stem 7x7 s2, ConvTranspose, f32": (199, 55296), "stem 7x7 s2, ConvolutionBackwardWeights, bf16": (200, 32768),
        "stem 7x7 s2, ConvolutionBackwardWeights, f32": (181, 16384), "64 1x1 8, Convolution, bf16": (166, 55296),
        "64 1x1 8, Convolution, f32": (199, 55296), "64 1x1 8, ConvTranspose, bf16": (187, 8192),
        "64 1x1 8, ConvTranspose, f32": (230, 16384), "64 1x1 8, ConvolutionBackwardWeights, bf16": (80, 18432),
        "64 1x1 8, ConvolutionBackwardWeights, f32": (80, 25600),
    },
    90: {
        "256 3x3, Convolution, bf16": (255, 196640), "256 3x3, Convolution, f32": (201, 110680),
        "256 3x3, ConvTranspose, bf16": (255, 196640), "256 3x3, ConvTranspose, f32": (201, 110680),
        "256 3x3, ConvolutionBackwardWeights, bf16": (124, 98304),
        "256 3x3, ConvolutionBackwardWeights, f32": (105, 73728), "64 3x3, Convolution, bf16": (159, 73752),
        "64 3x3, Convolution, f32": (203, 110680), "64 3x3, ConvTranspose, bf16": (159, 73752),
        "64 3x3, ConvTranspose, f32": (203, 110680), "64 3x3, ConvolutionBackwardWeights, bf16": (82, 49152),
        "64 3x3, ConvolutionBackwardWeights, f32": (105, 73728), "128 3x3 s2, Convolution, bf16": (173, 98304),
        "128 3x3 s2, Convolution, f32": (133, 110592), "128 3x3 s2, ConvTranspose, bf16": (245, 98328),
        "128 3x3 s2, ConvTranspose, f32": (199, 110680), "128 3x3 s2, ConvolutionBackwardWeights, bf16": (124, 98304),
        "128 3x3 s2, ConvolutionBackwardWeights, f32": (105, 73728), "stem 7x7 s2, Convolution, bf16": (166, 8192),
        "stem 7x7 s2, Convolution, f32": (244, 24576), "stem 7x7 s2, ConvTranspose, bf16": (149, 73728),
        "stem 7x7 s2, ConvTranspose, f32": (128, 82944), "stem 7x7 s2, ConvolutionBackwardWeights, bf16": (253, 40960),
        "stem 7x7 s2, ConvolutionBackwardWeights, f32": (148, 49152), "64 1x1 8, Convolution, bf16": (149, 73728),
        "64 1x1 8, Convolution, f32": (128, 82944), "64 1x1 8, ConvTranspose, bf16": (164, 8192),
        "64 1x1 8, ConvTranspose, f32": (244, 24576), "64 1x1 8, ConvolutionBackwardWeights, bf16": (80, 18432),
        "64 1x1 8, ConvolutionBackwardWeights, f32": (80, 25600),
    },
    100: {
        "256 3x3, Convolution, bf16": (128, 98352), "256 3x3, Convolution, f32": (226, 73864),
        "256 3x3, ConvTranspose, bf16": (128, 98352), "256 3x3, ConvTranspose, f32": (226, 73864),
        "256 3x3, ConvolutionBackwardWeights, bf16": (122, 98320),
        "256 3x3, ConvolutionBackwardWeights, f32": (109, 49240), "64 3x3, Convolution, bf16": (140, 73776),
        "64 3x3, Convolution, f32": (192, 73864), "64 3x3, ConvTranspose, bf16": (140, 73776),
        "64 3x3, ConvTranspose, f32": (192, 73864), "64 3x3, ConvolutionBackwardWeights, bf16": (65, 49168),
        "64 3x3, ConvolutionBackwardWeights, f32": (109, 49240), "128 3x3 s2, Convolution, bf16": (114, 98320),
        "128 3x3 s2, Convolution, f32": (124, 73816), "128 3x3 s2, ConvTranspose, bf16": (124, 98352),
        "128 3x3 s2, ConvTranspose, f32": (194, 73864), "128 3x3 s2, ConvolutionBackwardWeights, bf16": (122, 98320),
        "128 3x3 s2, ConvolutionBackwardWeights, f32": (109, 49240), "stem 7x7 s2, Convolution, bf16": (128, 16400),
        "stem 7x7 s2, Convolution, f32": (211, 24584), "stem 7x7 s2, ConvTranspose, bf16": (96, 73744),
        "stem 7x7 s2, ConvTranspose, f32": (128, 55384), "stem 7x7 s2, ConvolutionBackwardWeights, bf16": (254, 57360),
        "stem 7x7 s2, ConvolutionBackwardWeights, f32": (134, 36872), "64 1x1 8, Convolution, bf16": (96, 73744),
        "64 1x1 8, Convolution, f32": (128, 55384), "64 1x1 8, ConvTranspose, bf16": (146, 16400),
        "64 1x1 8, ConvTranspose, f32": (211, 24584), "64 1x1 8, ConvolutionBackwardWeights, bf16": (80, 18432),
        "64 1x1 8, ConvolutionBackwardWeights, f32": (80, 25600),
    },
}  # fmt: skip
"""Of kernels of products, by generation, layer, operation and dtype: registers of a thread, bytes of shared memory."""

TRITON = "3.9.0"
"""The version of Triton that they are of."""


EVERY_CHANGE = 90
"""The generation that is compiled for every change; `scripts/test-gpu --all` has them all."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "of",
    [pytest.param(of, marks=() if of.capability == EVERY_CHANGE else pytest.mark.heavy) for of in GENERATIONS],
    ids=lambda of: str(of.capability),
)
def test_compiled_kernels(of: Generation) -> None:
    """Kernels of products spill no register and fit the shared memory; sums of float64 that are exact fuse nothing."""
    command = [sys.executable, "-m", "tests.kernels.gpu.resources", str(of.capability)]
    done = subprocess.run(command, cwd=ROOT, env=compiling(), stdout=subprocess.PIPE, text=True, check=True)
    found = {}
    for line in done.stdout.splitlines():
        name, counts = line.rsplit(": ", 1)
        registers, stores, loads, shared, fused = map(int, counts.split())
        assert shared <= of.shared, line
        kernel = name.rsplit(", ", 1)[1]
        if kernel.startswith("multiply"):
            assert stores == loads == 0, line
            found[name.rsplit(", ", 1)[0]] = registers, shared
        if "f64" in name:
            assert fused == 0, line
    if version("triton") == TRITON:
        assert found == RESOURCES[of.capability]
