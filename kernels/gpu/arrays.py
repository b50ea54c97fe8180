"""Tensors of callers: those on the GPU are read there, arrays in the memory of the CPU are copied there and back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from kernels.gpu.compute import TORCH_DTYPES, compute
from kernels.gpu.device import REFERENCE_NAME
from kernels.plan import Plan, Storage
from kernels.problem import ConvProblem

__all__ = ["compute_arrays", "compute_tensors", "device_of", "is_there", "name_of"]

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@cache
def _device() -> torch.device:
    """Return the GPU of this process, whose memory is then bounded; the CPU for Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    if limit := int(os.environ.get("CONVGRAD_DEVICE_MEMORY", "0")):
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    return device


def is_there(value: object) -> bool:
    """Whether a value is a tensor on a device of this kind."""
    return isinstance(value, torch.Tensor) and value.device.type == _device().type


def name_of(tensor: torch.Tensor) -> str:
    """Return the name of a dtype, as problems have it, or PyTorch's for others."""
    return _NAMES.get(tensor.dtype, str(tensor.dtype))


def device_of(tensors: Mapping[str, Any]) -> str:
    """Return the device of tensors. Raises ValueError if they are on several."""
    found = {name: str(getattr(value, "device", "cpu")) for name, value in tensors.items()}
    if len({*found.values()}) > 1:
        where = ", ".join(f"{name} is on {device}" for name, device in found.items())
        raise ValueError(f"all tensors must be on one device, but {where}")
    return next(iter(found.values()))


def compute_tensors(plan: Plan, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute a plan for a GPU from tensors there, on the current stream of PyTorch; raises what `compute` does."""
    assert isinstance(plan.problem, ConvProblem)
    return compute(plan.problem, *tensors, reference=plan.kernel == REFERENCE_NAME)


def compute_arrays(problem: ConvProblem, inputs: Sequence[Storage], *, reference: bool) -> Storage:
    """Compute a problem from arrays as `kernels.run_unit` takes them; raises what `compute` does."""
    given = [each if each.flags.writeable else each.copy() for each in inputs]  # PyTorch warns of others
    tensors = [torch.from_numpy(each).view(TORCH_DTYPES[problem.dtype]) for each in given]
    found = compute(problem, *tensors, reference=reference, device=_device()).cpu()
    stored: Storage = found.view(torch.uint16).numpy() if found.element_size() == 2 else found.numpy()
    return stored
