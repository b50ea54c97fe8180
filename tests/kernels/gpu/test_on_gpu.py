"""What only a GPU shows: runs with the same bits, streams, graphs, errors."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tests.kernels.gpu.running import INTERPRETED, device, needs_triton
from tests.kernels.harness import problem_of
from tests.problems import WITH_WEIGHTS, Case

pytestmark = [needs_triton, pytest.mark.skipif(INTERPRETED, reason="needs a GPU: scripts/test-gpu")]


def layer(op: str, dtype: str, channels: int = 64) -> Case:
    """Return an operation on a layer whose sums take several blocks and chunks."""
    return Case(
        op=op, dtype=dtype, n=8, src_channels=channels, dst_channels=2 * channels, src_spatial=(28, 28),
        dst_spatial=(28, 28), kernel=(3, 3), pads_begin=(1, 1), pads_end=(1, 1), data_format="NXC",
        groups_axis="O" if op.startswith("ConvTranspose") else "I",
    )  # fmt: skip


def tensors(case: Case) -> list[object]:
    """Return random inputs on the GPU."""
    import torch

    from kernels.gpu.compute import TORCH_DTYPES

    rng = np.random.default_rng(case.seed)
    made = (torch.from_numpy(rng.standard_normal(shape)) for shape in case.input_shapes.values())
    return [each.to(TORCH_DTYPES[case.dtype]).to(device()) for each in made]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("op", WITH_WEIGHTS)
def test_five_runs_have_the_same_bits(op: str, dtype: str) -> None:
    """A result has the same bits in every run, on two streams at once, and in a graph that was captured."""
    import torch

    case = layer(op, dtype)
    inputs = tensors(case)
    from kernels.gpu.compute import compute

    first = compute(problem_of(case), *inputs)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for run in range(6):
        with torch.cuda.stream(streams[run % 2]):
            found.append(compute(problem_of(case), *inputs))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compute(problem_of(case), *inputs)
    captured.fill_(0)
    graph.replay()
    torch.cuda.synchronize()
    for each in (*found, captured):
        assert torch.equal(each, first)


def test_an_error_of_cuda_is_named() -> None:
    """An error in a process is raised there as CUDA's, and another process computes."""
    fault = "import torch; x = torch.zeros(4, device='cuda'); i = torch.tensor([9], device='cuda')\n"
    fault += "try:\n    x[i]; torch.cuda.synchronize()\nexcept RuntimeError: pass\n"
    call = """
import numpy as np, convgrad
with convgrad.local(device="cuda") as client:
    x = np.ones((1, 2, 3, 3), np.float32)
    print(client.run("BiasAdd", {"src": x, "bias": x[0, :, 0, 0]}, {"data_format": "NCX"}).sum())
"""
    done = subprocess.run([sys.executable, "-c", fault + call], capture_output=True, text=True, check=False)
    assert done.returncode
    assert "CUDA error" in done.stderr
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["36.0"]
