"""Launches that are prepared do what Triton's do, which are looked for; nothing runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.kernels.gpu.running import compiling, needs_triton

ROOT = Path(__file__).resolve().parents[3]

pytestmark = needs_triton

SCRIPT = """
import torch, triton
from kernels.gpu.compute import compute, prepared
from tests.kernels.gpu.driver import Driver
from tests.kernels.gpu.resources import problem

driver = Driver(90)
triton.runtime.driver.set_active(driver)
for layer, op in (("64 3x3", "Convolution"), ("64 1x1 8", "Convolution"), ("64 1x1 8", "ConvolutionBackwardWeights")):
    one = problem(layer, op, "f32")
    inputs = [torch.zeros(shape) for shape in one.input_shapes]
    found = []
    for _ in range(3):
        compute(one, *inputs)
        found.append([(grid, code, [getattr(each, "shape", each) for each in given])
                      for grid, code, given in driver.launched])
        driver.launched.clear()
    assert found[0] == found[1] == found[2], found
    assert len(found[0]) == 4
    if layer == "64 3x3":  # bulk copies, of copies that are aligned
        assert prepared(one, False, inputs[0].device).kernel == "multiply_boxes"
    shifted = torch.zeros(inputs[0].numel() + 1)[1:].view(inputs[0].shape)
    for _ in range(2):
        compute(one, shifted, *inputs[1:])
        assert driver.launched[0][1] != found[0][0][1], "aligned code for a tensor that is not"
        assert driver.launched[1][1] == found[0][1][1]
        driver.launched.clear()
"""


def test_prepared_launches_are_those_that_triton_finds() -> None:
    """The second launch has the code, grid and arguments of the first; an unaligned tensor gets code of its own."""
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, env=compiling(), check=True, timeout=280)
