"""Compile the kernels of some layers for a generation of GPUs, and print what they need: no GPU is used.

    python -m tests.kernels.gpu.resources 90

prints a line for each layer, operation, dtype and kernel: registers of a thread, bytes of spilled ones that are stored
and loaded, bytes of shared memory, and multiply-adds of float64 where a tensor is.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from functools import partial
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas

from kernels.gpu import compute
from kernels.gpu.configurations import generation
from kernels.gpu.launches import Launch
from kernels.problem import ConvProblem
from tests.kernels.gpu.driver import Driver

LAYERS = {
    "256 3x3": (8, 256, 256, 1, 28, 3, 1), "64 3x3": (8, 64, 64, 1, 56, 3, 1), "128 3x3 s2": (8, 128, 128, 1, 28, 3, 2),
    "stem 7x7 s2": (8, 3, 64, 1, 112, 7, 2), "64 1x1 8": (8, 64, 8, 1, 28, 1, 1),
    "depthwise 3x3": (8, 64, 64, 64, 28, 3, 1),
}  # fmt: skip
"""Images, channels of src and dst, groups, positions of an axis of two, taps of an axis, stride."""

OPS = ("Convolution", "ConvTranspose", "ConvolutionBackwardWeights")


def problem(layer: str, op: str, dtype: Any) -> ConvProblem:
    """Return an operation on a layer, channels-last; ConvTranspose is its data gradient."""
    n, src, dst, groups, size, taps, stride = LAYERS[layer]
    spatial = (size,) * 2, ((size - 1) // stride + 1,) * 2
    if op == "ConvTranspose":
        src, dst, spatial = dst, src, spatial[::-1]
    two = {"kernel": (taps,) * 2, "strides": (stride,) * 2, "dilations": (1, 1), "pads_begin": (taps // 2,) * 2}
    return ConvProblem(
        op=op, dtype=dtype, n=n, src_channels=src, dst_channels=dst, groups=groups, src_spatial=spatial[0],  # type: ignore[arg-type]
        dst_spatial=spatial[1], data_format="NXC", weights_format="OIX", **two,  # type: ignore[arg-type]
    )  # fmt: skip


def assembled(ptx: str, capability: int) -> tuple[int, int, int]:
    """Return registers, and bytes of spills that are stored and loaded, as ptxas reports them."""
    name = re.search(r"\.target (sm_\w+)", ptx)
    assert name, ptx[:200]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={name[1]}", file.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stores, loads = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)[:2]
    registers = re.findall(r"Used (\d+) registers", done.stderr)
    return int(registers[0]), int(stores), int(loads)


def fused(cubin: bytes) -> int:
    """Count the multiply-adds of float64 in the instructions of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.count("DFMA")


def main() -> None:
    """Compile everything for the generation of the first argument."""
    capability = int(sys.argv[1])
    triton.runtime.driver.set_active(Driver(capability))
    known: dict[str, tuple[int, ...]] = {}
    seen: dict[str, tuple[int, ...]] = {}

    def compile_only(launch: Launch, *tensors: Any) -> None:
        compiled = launch.find(partial(launch.kernel.warmup, grid=launch.grid), tensors)
        if compiled.hash not in known:
            asm = assembled(compiled.asm["ptx"], capability)
            exact = any(getattr(each, "dtype", None) == torch.float64 for each in tensors)
            known[compiled.hash] = *asm, compiled.metadata.shared, fused(compiled.asm["cubin"]) if exact else 0
        seen[launch.kernel.fn.__name__] = known[compiled.hash]

    Launch.__call__ = compile_only  # type: ignore[assignment, method-assign] # instead of a launch
    compute._generation = lambda device: generation(capability)  # noqa: ARG005 - as its own
    calls = [(layer, op, dtype) for layer in LAYERS for op in OPS for dtype in ("bf16", "f32")]
    for layer, op, dtype in [*calls, *(("64 3x3", op, "f64") for op in OPS)]:
        one, kind = problem(layer, op, dtype), compute.TORCH_DTYPES[dtype]
        seen.clear()
        inputs = [torch.empty(shape, dtype=kind, device="meta") for shape in one.input_shapes]
        if dtype == "f64":  # as `_checked` would after it has read the tensors
            (compute._sum_dst if one.forward else compute._sum_weights)(one, inputs[0].device)(*inputs)
        else:
            compute.compute(one, *inputs)
        for name, counts in seen.items():
            print(f"{layer}, {op}, {dtype}, {name}:", *counts, flush=True)


if __name__ == "__main__":
    main()
