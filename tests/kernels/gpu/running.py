"""Run the kernels on a GPU, or in Triton's interpreter on the CPU where TRITON_INTERPRET=1 is set."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from kernels.problem import storage_dtype
from tests.kernels.harness import Tensor, problem_of, stored
from tests.problems import Case

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INSTALLED = all(find_spec(name) is not None for name in ("torch", "triton"))

needs_triton = pytest.mark.skipif(not INSTALLED, reason="PyTorch or Triton is not installed: scripts/test-gpu has them")


def compiling() -> dict[str, str]:
    """Return the environment of a process that compiles kernels, also beside tests that are interpreted."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def device() -> Any:
    """Return where the kernels run; skip the test where they can't."""
    if not INSTALLED:
        pytest.skip("PyTorch or Triton is not installed: scripts/test-gpu has them")
    import torch

    torch.use_deterministic_algorithms(True)  # memory of new tensors is filled with NaN
    if INTERPRETED:
        _multiply_bfloat16()
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1: scripts/test-gpu")
    return torch.device("cuda")


def compute(case: Case, inputs: dict[str, Tensor], *, reference: bool = False) -> Tensor:
    """Compute a case on the device, from memory around which is NaN, into memory that is NaN; return it as stored."""
    import torch

    where = device()
    from kernels.gpu.compute import TORCH_DTYPES, compute

    problem = problem_of(case)
    tensors = []
    for each in inputs.values():
        flat = torch.from_numpy(stored(np.ascontiguousarray(each)).reshape(-1)).view(TORCH_DTYPES[case.dtype]).to(where)
        around = torch.full((flat.numel() + 64,), float("nan"), dtype=flat.dtype, device=where)
        around[32 : 32 + flat.numel()] = flat
        tensors.append(around[32 : 32 + flat.numel()].view(each.shape))
    with np.errstate(all="ignore"):  # of the interpreter
        found = compute(problem, *tensors, reference=reference).cpu().contiguous()
    array: Tensor = (found.view(torch.uint16) if found.element_size() == 2 else found).numpy()
    assert array.dtype == storage_dtype(case.dtype)
    return array.view(np.dtype(inputs[next(iter(inputs))].dtype))


def _multiply_bfloat16() -> None:
    """Let the interpreter multiply values of bfloat16, whose bits it multiplies as integers."""
    import triton.language as tl
    from triton.runtime import interpreter

    if getattr(interpreter.InterpreterBuilder.create_dot, "of_values", False):
        return

    def values(tensor: Any) -> Any:
        if tensor.dtype.scalar == tl.bfloat16:
            return (tensor.data.astype(np.uint32) << 16).view(np.float32)
        return tensor.data

    def create_dot(_: Any, a: Any, b: Any, total: Any, *_more: Any) -> Any:
        product = np.matmul(values(a), values(b), dtype=total.data.dtype)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    create_dot.of_values = True  # type: ignore[attr-defined]
    interpreter.InterpreterBuilder.create_dot = create_dot
