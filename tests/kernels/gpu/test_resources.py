"""What the compiled kernels need on each generation of GPUs, none of which is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kernels.gpu.configurations import GENERATIONS, Generation
from tests.kernels.gpu.running import INTERPRETED, needs_triton

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [needs_triton, pytest.mark.skipif(INTERPRETED, reason="compiles: without TRITON_INTERPRET")]

RESOURCES: dict[int, dict[str, tuple[int, int]]] = {
    80: {
        "256 3x3, Convolution, bf16": (186, 49152), "256 3x3, Convolution, f32": (210, 36864),
        "256 3x3, ConvTranspose, bf16": (186, 49152), "256 3x3, ConvTranspose, f32": (210, 36864),
        "256 3x3, ConvolutionBackwardWeights, bf16": (168, 49152),
        "256 3x3, ConvolutionBackwardWeights, f32": (242, 28672), "64 3x3, Convolution, bf16": (196, 49152),
        "64 3x3, Convolution, f32": (210, 36864), "64 3x3, ConvTranspose, bf16": (196, 49152),
        "64 3x3, ConvTranspose, f32": (210, 36864), "64 3x3, ConvolutionBackwardWeights, bf16": (128, 24576),
        "64 3x3, ConvolutionBackwardWeights, f32": (242, 28672), "128 3x3 s2, Convolution, bf16": (186, 49152),
        "128 3x3 s2, Convolution, f32": (210, 36864), "128 3x3 s2, ConvTranspose, bf16": (186, 49152),
        "128 3x3 s2, ConvTranspose, f32": (210, 36864), "128 3x3 s2, ConvolutionBackwardWeights, bf16": (168, 49152),
        "128 3x3 s2, ConvolutionBackwardWeights, f32": (242, 28672), "stem 7x7 s2, Convolution, bf16": (185, 8192),
        "stem 7x7 s2, Convolution, f32": (228, 16384), "stem 7x7 s2, ConvTranspose, bf16": (156, 55296),
        "stem 7x7 s2, ConvTranspose, f32": (199, 55296), "stem 7x7 s2, ConvolutionBackwardWeights, bf16": (196, 32768),
        "stem 7x7 s2, ConvolutionBackwardWeights, f32": (181, 16384), "64 1x1 8, Convolution, bf16": (156, 55296),
        "64 1x1 8, Convolution, f32": (199, 55296), "64 1x1 8, ConvTranspose, bf16": (185, 8192),
        "64 1x1 8, ConvTranspose, f32": (230, 16384), "64 1x1 8, ConvolutionBackwardWeights, bf16": (79, 18432),
        "64 1x1 8, ConvolutionBackwardWeights, f32": (92, 25600),
    },
    90: {
        "256 3x3, Convolution, bf16": (255, 147456), "256 3x3, Convolution, f32": (128, 110592),
        "256 3x3, ConvTranspose, bf16": (255, 147456), "256 3x3, ConvTranspose, f32": (128, 110592),
        "256 3x3, ConvolutionBackwardWeights, bf16": (124, 98304),
        "256 3x3, ConvolutionBackwardWeights, f32": (100, 73728), "64 3x3, Convolution, bf16": (230, 73728),
        "64 3x3, Convolution, f32": (128, 110592), "64 3x3, ConvTranspose, bf16": (230, 73728),
        "64 3x3, ConvTranspose, f32": (128, 110592), "64 3x3, ConvolutionBackwardWeights, bf16": (80, 49152),
        "64 3x3, ConvolutionBackwardWeights, f32": (100, 73728), "128 3x3 s2, Convolution, bf16": (167, 98304),
        "128 3x3 s2, Convolution, f32": (128, 110592), "128 3x3 s2, ConvTranspose, bf16": (167, 98304),
        "128 3x3 s2, ConvTranspose, f32": (128, 110592), "128 3x3 s2, ConvolutionBackwardWeights, bf16": (124, 98304),
        "128 3x3 s2, ConvolutionBackwardWeights, f32": (100, 73728), "stem 7x7 s2, Convolution, bf16": (166, 8192),
        "stem 7x7 s2, Convolution, f32": (242, 24576), "stem 7x7 s2, ConvTranspose, bf16": (161, 73728),
        "stem 7x7 s2, ConvTranspose, f32": (128, 82944), "stem 7x7 s2, ConvolutionBackwardWeights, bf16": (243, 40960),
        "stem 7x7 s2, ConvolutionBackwardWeights, f32": (143, 49152), "64 1x1 8, Convolution, bf16": (161, 73728),
        "64 1x1 8, Convolution, f32": (128, 82944), "64 1x1 8, ConvTranspose, bf16": (166, 8192),
        "64 1x1 8, ConvTranspose, f32": (242, 24576), "64 1x1 8, ConvolutionBackwardWeights, bf16": (80, 18432),
        "64 1x1 8, ConvolutionBackwardWeights, f32": (93, 25600),
    },
    100: {
        "256 3x3, Convolution, bf16": (254, 147472), "256 3x3, Convolution, f32": (126, 73816),
        "256 3x3, ConvTranspose, bf16": (254, 147472), "256 3x3, ConvTranspose, f32": (126, 73816),
        "256 3x3, ConvolutionBackwardWeights, bf16": (122, 98320),
        "256 3x3, ConvolutionBackwardWeights, f32": (102, 49240), "64 3x3, Convolution, bf16": (128, 73744),
        "64 3x3, Convolution, f32": (126, 73816), "64 3x3, ConvTranspose, bf16": (128, 73744),
        "64 3x3, ConvTranspose, f32": (126, 73816), "64 3x3, ConvolutionBackwardWeights, bf16": (65, 49168),
        "64 3x3, ConvolutionBackwardWeights, f32": (102, 49240), "128 3x3 s2, Convolution, bf16": (114, 98320),
        "128 3x3 s2, Convolution, f32": (126, 73816), "128 3x3 s2, ConvTranspose, bf16": (114, 98320),
        "128 3x3 s2, ConvTranspose, f32": (126, 73816), "128 3x3 s2, ConvolutionBackwardWeights, bf16": (122, 98320),
        "128 3x3 s2, ConvolutionBackwardWeights, f32": (102, 49240), "stem 7x7 s2, Convolution, bf16": (167, 16400),
        "stem 7x7 s2, Convolution, f32": (203, 24584), "stem 7x7 s2, ConvTranspose, bf16": (115, 73744),
        "stem 7x7 s2, ConvTranspose, f32": (96, 55384), "stem 7x7 s2, ConvolutionBackwardWeights, bf16": (248, 57360),
        "stem 7x7 s2, ConvolutionBackwardWeights, f32": (132, 36872), "64 1x1 8, Convolution, bf16": (115, 73744),
        "64 1x1 8, Convolution, f32": (96, 55384), "64 1x1 8, ConvTranspose, bf16": (150, 16400),
        "64 1x1 8, ConvTranspose, f32": (203, 24584), "64 1x1 8, ConvolutionBackwardWeights, bf16": (80, 18432),
        "64 1x1 8, ConvolutionBackwardWeights, f32": (96, 25600),
    },
}  # fmt: skip
"""Of kernels of products, by generation, layer, operation and dtype: registers of a thread, bytes of shared memory.

Triton 3.9.0; another version may need others.
"""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("of", GENERATIONS, ids=lambda of: str(of.capability))
def test_compiled_kernels(of: Generation) -> None:
    """Kernels of products spill no register and fit the shared memory; sums of float64 that are exact fuse nothing."""
    command = [sys.executable, "-m", "tests.kernels.gpu.resources", str(of.capability)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
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
    assert found == RESOURCES[of.capability]
